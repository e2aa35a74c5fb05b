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
  std::exception_ptr error;
  try {
    body_();
  } catch (...) {
    error = std::current_exception();
  }
  body_ = nullptr;  // lets go of what the call kept alive
  {
    std::lock_guard lock(mutex_);
    error_ = error;
    done_ = true;
  }
  changed_.notify_all();
}

std::shared_ptr<Job> Lane::submit(std::function<void()> body) {
  auto job = std::make_shared<Job>(std::move(body));
  std::lock_guard lock(mutex_);
  if (closing_) throw Failure(Kind::Backend, "the group is destroyed");
  if (!worker_.joinable()) worker_ = std::thread([this] { work(); });
  queue_.push_back(job);
  changed_.notify_one();
  return job;
}

void Lane::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !busy_ && (closing_ || !queue_.empty()); });
    if (queue_.empty()) return;
    auto job = queue_.front();
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    job->run();
    job.reset();
    lock.lock();
    busy_ = false;
  }
}

void Lane::close() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
    changed_.notify_one();
  }
  if (worker_.joinable()) worker_.join();
}

}  // namespace phalanx
