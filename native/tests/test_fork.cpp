// Forked children, while threads of the parent wait, work and hold locks.
#include "fork.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <latch>
#include <thread>

#include "check.hpp"
#include "lane.hpp"
#include "store/heart.hpp"
#include "store/table.hpp"

using namespace phalanx;

namespace {

// Runs it in a child, which has ten seconds; returns its exit code, -1 if it was ended.
template <class Body>
int in_child(Body&& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(10);
    int code = 1;
    try {
      code = body();
    } catch (...) {
      code = 2;
    }
    ::_exit(code);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

store::Reply run(store::Store& store, store::Request request) {
  return store.run(std::move(request), store::Patience(10));
}

}  // namespace

TEST(a_child_leaves_a_lane_alone_whose_thread_sleeps) {
  auto lane = make_here<Lane>();
  int runs = 0;
  auto job = lane->submit([&](bool) { ++runs; }, true);
  CHECK(job->wait(Clock::now() + std::chrono::seconds(10)));
  CHECK_EQ(in_child([&] {
             const bool is_done = job->done() && !job->error();
             job.reset();
             lane.reset();  // would wait for the sleeper that is not there
             return is_done ? 0 : 1;
           }),
           0);
  // The parent's goes on.
  CHECK(lane->submit([&](bool) { ++runs; }, true)->wait(Clock::now() + std::chrono::seconds(10)));
  CHECK_EQ(runs, 2);
}

TEST(a_child_sees_what_its_parent_has_and_not_who_waits) {
  store::Table table;
  run(table, {store::Op::Set, 0, {"seven"}, {"7"}});
  static std::atomic<bool> waits = false;  // the thread, in the table and with nothing locked
  std::thread waiter([&] {
    table.run({store::Op::Get, 0, {"late"}, {}}, store::Patience(10, [] { waits = true; }));
  });
  while (!waits) std::this_thread::yield();
  CHECK_EQ(in_child([&] {
             const auto found = run(table, {store::Op::Get, 0, {"seven"}, {}});
             run(table, {store::Op::Set, 0, {"late"}, {"mine"}});
             return found.values.at(0) == "7" ? 0 : 1;
           }),
           0);
  CHECK_EQ(run(table, {store::Op::Check, 0, {"late"}, {}}).number, 0);
  run(table, {store::Op::Set, 0, {"late"}, {"ours"}});
  waiter.join();
}

TEST(a_child_has_not_the_beat_of_its_parent) {
  store::Table table;
  auto heart = make_here<store::Heart>(table, "beat", 0.005);
  run(table, {store::Op::Get, 0, {"beat"}, {}});
  for (int i = 0; i < 20; ++i)
    CHECK_EQ(in_child([&] {
               heart->stop();
               heart.reset();
               return 0;
             }),
             0);
  const auto before = run(table, {store::Op::Add, 0, {"beat"}, {}}).number;
  while (run(table, {store::Op::Add, 0, {"beat"}, {}}).number <= before + 1)
    std::this_thread::yield();
}

TEST(a_lock_is_new_in_a_child) {
  PerProcess<std::mutex> mutex;
  std::latch locked(1), done(1);
  std::thread holder([&] {
    std::lock_guard lock(mutex.here());
    locked.count_down();
    done.wait();
  });
  locked.wait();
  CHECK_EQ(in_child([&] {
             std::lock_guard lock(mutex.here());
             // And in a child of the child.
             return in_child([&] {
               std::lock_guard again(mutex.here());
               return 0;
             });
           }),
           0);
  CHECK(!mutex.here().try_lock());
  done.count_down();
  holder.join();
}
