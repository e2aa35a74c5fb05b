// The order of a group's collectives on one rank. A call on an idle lane runs at once on the
// caller's thread; an asynchronous one, or one that finds others before it, goes through the queue.
// What is in the queue runs on the thread of whoever comes to wait for it, or else on the lane's
// own: most who do not want to wait at once want to soon, and changing threads is slow. So a call
// that is short does not wake the lane's thread, which looks at the queue from time to time while
// there is traffic; only if there has been none for a while, it sleeps until it is woken.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "wait.hpp"

namespace phalanx {

// One call in the queue.
class Job {
 public:
  // The body is told whether it runs on the lane's own thread.
  using Body = std::function<void(bool on_lane)>;
  explicit Job(Body body) : body_(std::move(body)) {}
  bool done() const;
  std::exception_ptr error() const;    // once done; null if it went well
  bool wait(Clock::time_point until);  // false if it is not done by then

 private:
  friend class Lane;
  // What the body raised that is no Failure, on a user's thread: that of a signal handler, say. It
  // is that thread's to raise; others who wait get a Failure.
  std::exception_ptr run(bool on_lane);
  void finish();
  Body body_;
  const Clock::time_point issued_ = Clock::now();
  std::exception_ptr outcome_;  // the worker's own until it is shown as error_
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> done_ = false;  // read without the lock, which nobody may release in a child
  std::exception_ptr error_;        // set before that
};

// A forked child has not the thread: it leaves its copy alone (see fork.hpp).
class Lane {
 public:
  // Told of +1 when the lane's own thread gets something to do, of -1 when it has done it.
  using OnWork = std::function<void(int)>;
  explicit Lane(OnWork on_work = [](int) {}) : on_work_(std::move(on_work)) {}
  ~Lane() { close(); }
  // `at_once` wakes the lane's own thread.
  std::shared_ptr<Job> submit(Job::Body body, bool at_once);

  // Run the queue up to this job on the calling thread, unless somebody is running it.
  void help(const Job& job);

  // Run now, on this thread, if nothing is before it; false if something is.
  template <class Body>
  bool try_run(Body&& body) {
    {
      std::lock_guard lock(mutex_);
      if (closing_) throw_closed();
      if (busy_ || !queue_.empty()) return false;
      busy_ = true;
    }
    struct Leave {
      Lane& lane;
      ~Leave() {
        if (!lane.origin_.is_here()) return;
        std::lock_guard lock(lane.mutex_);
        lane.busy_ = false;
        lane.hand_over();
      }
    } leave{*this};
    body();
    return true;
  }

  bool drained(Clock::time_point until);  // whether all that is in the queue is done by then
  // Waits for it. Unless `patient`, when a call on this thread is in the way, what has not begun
  // fails.
  void close(bool patient = true);

 private:
  void work();
  bool doze(std::unique_lock<std::mutex>& lock);
  void wake();
  void hand_over();  // what is left to the lane's own thread, by one who has run a call
  [[noreturn]] static void throw_closed();
  const Origin origin_;
  std::mutex mutex_;
  std::condition_variable woken_, idle_;
  std::deque<std::shared_ptr<Job>> queue_;
  OnWork on_work_;
  std::thread worker_;
  bool busy_ = false;
  bool working_ = false;  // the worker, not a user's thread
  bool helping_ = false;  // a user's thread, with what is from the queue
  bool closing_ = false;
  bool urgent_ = false;  // the worker is wanted now
  bool asleep_ = true;   // it does not look by itself
  int quiet_looks_ = 0;  // since the last call
};

}  // namespace phalanx
