#include "lane.hpp"

#include <utility>

#include "failure.hpp"

namespace phalanx {

namespace {

// How long a short call is left to those who may come and wait for it, how often the worker looks
// for calls that have been there for longer, and how many times in vain before it falls asleep.
constexpr std::chrono::microseconds kMoment(100), kLook(500);
constexpr int kPatience = 20;
constexpr const char* kClosed = "the group is destroyed";

}  // namespace

bool Job::done() const { return done_.load(std::memory_order_acquire); }

std::exception_ptr Job::error() const { return done() ? error_ : nullptr; }

bool Job::wait(Clock::time_point until) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, until, [&] { return done(); });
}

std::exception_ptr Job::run(bool on_lane) {
  std::exception_ptr foreign;
  try {
    body_(on_lane);
  } catch (const Failure&) {
    outcome_ = std::current_exception();
  } catch (...) {
    foreign = outcome_ = std::current_exception();
    if (!on_lane)
      outcome_ = std::make_exception_ptr(Failure(
          Kind::Backend,
          "the operation was given up: the thread that waited for it was interrupted in the middle "
          "(by a signal handler that raised an exception)"));
  }
  body_ = nullptr;  // lets go of what the call kept alive
  return foreign;
}

void Job::finish() {
  {
    std::lock_guard lock(mutex_);
    error_ = outcome_;
    done_.store(true, std::memory_order_release);  // shows what was written before
  }
  changed_.notify_all();
}

std::shared_ptr<Job> Lane::submit(Job::Body body, bool at_once) {
  auto job = make_here<Job>(std::move(body));
  std::lock_guard lock(mutex_);
  if (closing_) throw_closed();
  if (!worker_.joinable()) worker_ = std::thread([this] { work(); });
  // What queues up behind a call on a user's thread becomes work when that call leaves, and what
  // queues up behind other work is found by whoever runs that.
  if (queue_.empty() && !busy_) on_work_(1);
  queue_.push_back(job);
  quiet_looks_ = 0;
  if (!busy_ && (at_once || asleep_)) wake();
  return job;
}

void Lane::help(const Job& job) {
  std::unique_lock lock(mutex_);
  if (busy_ || queue_.empty() || job.done()) return;
  on_work_(-1);
  busy_ = helping_ = true;
  std::exception_ptr foreign;
  do {
    auto next = queue_.front();
    queue_.pop_front();
    lock.unlock();
    foreign = next->run(false);
    if (!origin_.is_here()) std::rethrow_exception(foreign ? foreign : next->outcome_);
    lock.lock();
    next->finish();
  } while (!foreign && !queue_.empty() && !job.done());
  busy_ = helping_ = false;
  hand_over();
  idle_.notify_all();
  lock.unlock();
  if (foreign) std::rethrow_exception(foreign);
}

void Lane::wake() {
  urgent_ = true;
  woken_.notify_one();
}

void Lane::hand_over() {
  if (!queue_.empty()) on_work_(1);
  if (!queue_.empty() || closing_) wake();
}

void Lane::throw_closed() { throw Failure(Kind::Backend, kClosed); }

// Wait for something to do; true if it has been there for long enough to be done here.
bool Lane::doze(std::unique_lock<std::mutex>& lock) {
  auto is_urgent = [&] { return urgent_; };
  asleep_ = quiet_looks_ >= kPatience;
  if (asleep_) {
    woken_.wait(lock, is_urgent);
    asleep_ = false;
  } else {
    woken_.wait_for(lock, kLook, is_urgent);
    ++quiet_looks_;
  }
  const bool was_urgent = std::exchange(urgent_, false);
  return was_urgent || queue_.empty() || Clock::now() - queue_.front()->issued_ > kMoment;
}

void Lane::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (!doze(lock)) continue;
    // What runs on a user's thread is that thread's affair, also while closing.
    if (busy_ && !(closing_ && queue_.empty())) continue;
    const bool had_work = !queue_.empty();
    while (!queue_.empty()) {
      auto job = queue_.front();
      queue_.pop_front();
      busy_ = working_ = true;
      lock.unlock();
      job->run(true);
      lock.lock();
      busy_ = working_ = false;
      job->finish();  // whoever waited for it finds the lane idle
    }
    if (had_work) {
      on_work_(-1);
      idle_.notify_all();
    }
    if (closing_) return;
  }
}

bool Lane::drained(Clock::time_point until) {
  std::unique_lock lock(mutex_);
  return idle_.wait_until(lock, until, [&] { return queue_.empty() && !working_ && !helping_; });
}

void Lane::close(bool patient) {
  std::thread worker;
  {
    std::unique_lock lock(mutex_);
    closing_ = true;
    worker.swap(worker_);  // of several that close, one joins
    if (patient) idle_.wait(lock, [&] { return !helping_; });
    for (; !patient && !queue_.empty(); queue_.pop_front()) {
      queue_.front()->outcome_ = std::make_exception_ptr(Failure(Kind::Backend, kClosed));
      queue_.front()->finish();
    }
    wake();
  }
  if (worker.joinable()) worker.join();
}

}  // namespace phalanx
