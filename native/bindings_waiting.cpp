// Python's part in the search for deadlocks: how many threads may act, and waits of its own.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <sys/time.h>

#include "bindings_site.hpp"
#include "bindings_unlocked.hpp"
#include "deadlock.hpp"
#include "failure.hpp"

namespace nb = nanobind;
using namespace phalanx;

namespace {

PyObject* bystanders = nullptr;  // tells how many threads never take part

int count_threads() {
  // A timer's signal handler may do anything.
  itimerval timer{};
  if (is_finalizing() || ::getitimer(ITIMER_REAL, &timer) != 0) return -1;
  if (timer.it_value.tv_sec || timer.it_value.tv_usec) return -1;
  nb::gil_scoped_acquire lock;
  int threads = 0;
  for (auto* thread = PyInterpreterState_ThreadHead(PyInterpreterState_Get()); thread;
       thread = PyThreadState_Next(thread))
    ++threads;
  if (threads == 1 || !bystanders) return threads;
  // This may run a signal handler, whose exception ends the wait.
  return threads - nb::cast<int>(nb::handle(bystanders)());
}

// A wait that is made in Python, for other ranks.
class Waiting {
 public:
  Waiting(std::shared_ptr<Roster> roster, int rank, const std::string& group,
          const std::string& what, const std::vector<int>& needs, double timeout)
      : roster_(std::move(roster)),
        waiter_(std::in_place, *roster_, rank),
        group_(group),
        what_(what),
        needs_(needs),
        timeout_(timeout),
        started_ns_(now_ns()) {
    char api[24];
    Sites::find(site_, api);
  }
  void close() { waiter_.reset(); }
  // The wait's condition was looked at since the last check.
  void check() {
    WaitFacts facts = wait_facts(Op::Barrier, group_, what_, site_, started_ns_);
    std::swap(facts.checked_ns, last_check_ns_);
    facts.making = true;
    facts.blocked = !ends_by_itself(timeout_, false);
    for (int rank : needs_) facts.needs.add(rank);
    Unlocked unlock;
    if (auto deadlock = waiter_->update(facts)) throw Failure(Kind::Deadlock, *deadlock);
  }

 private:
  std::shared_ptr<Roster> roster_;
  std::optional<Waiter> waiter_;
  std::string group_, what_;
  std::vector<int> needs_;
  double timeout_;
  int64_t started_ns_, last_check_ns_ = now_ns();
  char site_[80];
};

}  // namespace

void bind_waiting(nb::module_& m) {
  set_thread_count(count_threads);
  m.def(
      "set_bystanders",
      [](nb::callable count) {
        Py_XDECREF(bystanders);
        bystanders = count.inc_ref().ptr();
      },
      nb::arg("count"), "Set the function that counts the threads that never act for a rank.");
  nb::class_<Waiting>(m, "Waiting", "A wait for other ranks that is made in Python.")
      .def(nb::init<std::shared_ptr<Roster>, int, const std::string&, const std::string&,
                    const std::vector<int>&, double>(),
           nb::arg("roster"), nb::arg("rank"), nb::arg("group"), nb::arg("what"), nb::arg("needs"),
           nb::arg("timeout"))
      .def("close", &Waiting::close, "Wait no longer.")
      .def("check", &Waiting::check, "Say that it goes on; raise Deadlock if it is part of one.");
}
