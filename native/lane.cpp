#include "lane.hpp"

#include "failure.hpp"

namespace phalanx {

bool Job::done() const {
  std::lock_guard lock(mutex_);
  return done_;
}

std::exception_ptr Job::error() const {
  std::lock_guard lock(mutex_);
  return error_;
}

bool Job::wait(Clock::time_point until) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, until, [&] { return done_; });
}

void Job::run() {
  try {
    body_();
  } catch (...) {
    outcome_ = std::current_exception();
  }
  body_ = nullptr;  // lets go of what the call kept alive
}

void Job::finish() {
  {
    std::lock_guard lock(mutex_);
    error_ = outcome_;
    done_ = true;
  }
  changed_.notify_all();
}

std::shared_ptr<Job> Lane::submit(std::function<void()> body) {
  auto job = std::make_shared<Job>(std::move(body));
  std::lock_guard lock(mutex_);
  if (closing_) throw_closed();
  if (!worker_.joinable()) worker_ = std::thread([this] { work(); });
  // What queues up behind a call on a user's thread becomes work when that call leaves.
  if (queue_.empty() && !busy_) on_work_(1);
  queue_.push_back(job);
  changed_.notify_all();
  return job;
}

void Lane::throw_closed() { throw Failure(Kind::Backend, "the group is destroyed"); }

void Lane::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    // A call that runs inline on another thread is that thread's affair, also while closing.
    changed_.wait(lock, [&] { return queue_.empty() ? closing_ : !busy_; });
    if (queue_.empty()) return;
    auto job = queue_.front();
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    job->run();
    lock.lock();
    busy_ = false;
    job->finish();  // whoever waited for it finds the lane idle
    job.reset();
    if (!queue_.empty()) continue;
    on_work_(-1);
    idle_.notify_all();
  }
}

bool Lane::drained(Clock::time_point until) {
  std::unique_lock lock(mutex_);
  return idle_.wait_until(lock, until, [&] { return queue_.empty() && !busy_; });
}

void Lane::close() {
  std::thread worker;
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
    worker.swap(worker_);  // of several that close, one joins
    changed_.notify_all();
  }
  if (worker.joinable()) worker.join();
}

}  // namespace phalanx
