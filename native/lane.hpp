// The order of a group's collectives on one rank. A call on an idle lane runs at once on the
// caller's thread; an asynchronous one, or one that finds others before it, goes through the queue.
#pragma once

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
  explicit Job(std::function<void()> body) : body_(std::move(body)) {}
  bool done() const;
  std::exception_ptr error() const;    // once done; null if it went well
  bool wait(Clock::time_point until);  // false if it is not done by then

 private:
  friend class Lane;
  void run();
  void finish();
  std::function<void()> body_;
  std::exception_ptr outcome_;  // the worker's own until it is shown as error_
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::exception_ptr error_;
};

class Lane {
 public:
  // Told of +1 when the lane's own thread gets something to do, of -1 when it has done it.
  using OnWork = std::function<void(int)>;
  explicit Lane(OnWork on_work = [](int) {}) : on_work_(std::move(on_work)) {}
  ~Lane() { close(); }
  std::shared_ptr<Job> submit(std::function<void()> body);

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
        std::lock_guard lock(lane.mutex_);
        lane.busy_ = false;
        if (lane.queue_.empty()) return;
        lane.on_work_(1);
        lane.changed_.notify_all();
      }
    } leave{*this};
    body();
    return true;
  }

  bool drained(Clock::time_point until);  // whether all that is in the queue is done by then
  void close();                           // waits for it
  void release() {
    new std::thread(std::move(worker_));
  }  // forget a thread that a fork has not copied

 private:
  void work();
  [[noreturn]] static void throw_closed();
  std::mutex mutex_;
  std::condition_variable changed_, idle_;
  std::deque<std::shared_ptr<Job>> queue_;
  OnWork on_work_;
  std::thread worker_;
  bool busy_ = false;
  bool closing_ = false;
};

}  // namespace phalanx
