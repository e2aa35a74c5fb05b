// Python's part in the search for deadlocks: how many threads may act, and waits of its own.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <sys/time.h>

#include "bindings_posting.hpp"
#include "bindings_site.hpp"
#include "bindings_unlocked.hpp"
#include "deadlock.hpp"
#include "failure.hpp"
#include "report.hpp"

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

// What another host has told.
WaitFacts facts_of(const nb::bytes& told) {
  WaitFacts facts;
  if (told.size() == sizeof facts)
    std::memcpy(static_cast<void*>(&facts), told.c_str(), sizeof facts);
  if (told.size() != sizeof facts || !make_sound(facts))
    throw Failure(Kind::Invalid, "these are not the facts of a wait");
  return facts;
}

// A wait that is made in Python, for other ranks.
class Waiting {
 public:
  Waiting(std::shared_ptr<Roster> roster, int rank, const std::string& group,
          const std::string& what, const std::vector<int>& needs, double timeout,
          const std::string& kind, bool any)
      : roster_(std::move(roster)),
        waiter_(std::in_place, *roster_, roster_->checked(rank)),
        group_(group),
        what_(what),
        needs_(needs),
        timeout_(timeout),
        kind_(kind),
        any_(any),
        started_ns_(now_ns()) {
    for (int need : needs_) roster_->checked(need);
    char api[24];
    Sites::find(site_, api);
  }
  void close() { waiter_.reset(); }
  // The wait's condition was looked at since the last check.
  void check() {
    const Op op = kind_ == "send" ? Op::Send : kind_ == "recv" ? Op::Recv : Op::Barrier;
    WaitFacts facts = wait_facts(op, group_, what_, site_, started_ns_);
    std::swap(facts.checked_ns, last_check_ns_);
    facts.making = kind_ == "making";
    facts.any = any_;
    facts.blocked = !ends_by_itself(timeout_, false);
    for (int rank : needs_) facts.needs.add(rank);
    if (!waiter_) throw Failure(Kind::Invalid, "this wait has ended");
    Unlocked unlock;
    if (auto deadlock = waiter_->update(facts)) throw Failure(Kind::Deadlock, *deadlock);
  }

 private:
  std::shared_ptr<Roster> roster_;
  std::optional<Waiter> waiter_;
  std::string group_, what_;
  std::vector<int> needs_;
  double timeout_;
  std::string kind_;
  bool any_;
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
                    const std::vector<int>&, double, const std::string&, bool>(),
           nb::arg("roster"), nb::arg("rank"), nb::arg("group"), nb::arg("what"), nb::arg("needs"),
           nb::arg("timeout"), nb::arg("kind") = "making", nb::arg("any") = false)
      .def("close", &Waiting::close, "Wait no longer.")
      .def("check", &Waiting::check, "Say that it goes on; raise Deadlock if it is part of one.");
  m.def(
      "blocked_waits",
      [](const Roster& roster) {
        nb::list found;
        for (const BlockedWait& wait : blocked_waits(roster))
          found.append(nb::make_tuple(
              wait.rank, wait.facts.since_ns,
              nb::bytes(reinterpret_cast<const char*>(&wait.facts), sizeof wait.facts)));
        return found;
      },
      nb::arg("roster"),
      "Return (rank, since, facts) of the waits of ranks of which all threads wait.");
  m.def(
      "check_facts", [](const nb::bytes& facts) { facts_of(facts); }, nb::arg("facts"),
      "Raise ValueError unless these are the facts of a wait, as `blocked_waits` gives them.");
  m.def(
      "deadlock_among",
      [](int size, const nb::list& waits, const std::vector<int>& ended) {
        std::vector<std::pair<int, WaitFacts>> told;
        for (nb::handle each : waits) {
          auto rank = nb::cast<int>(each[0]);
          told.emplace_back(rank, facts_of(nb::cast<nb::bytes>(each[1])));
        }
        Found found = deadlock_among(size, told, ended);
        return nb::make_tuple(found.ranks, as_str(found.report));
      },
      nb::arg("size"), nb::arg("waits"), nb::arg("ended"),
      "Return the ranks, if any, that wait for each other for ever, and the report of it.");
  m.def(
      "sentence",
      [](const Roster& roster, const std::vector<int>& ranks, const std::string& report) {
        sentence(roster, ranks, report);
      },
      nb::arg("roster"), nb::arg("ranks"), nb::arg("report"),
      "Have those of these ranks that wait here raise Deadlock.");
}
