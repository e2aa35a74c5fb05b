#include "lane.hpp"

#include <sys/timerfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "failure.hpp"

namespace phalanx {

namespace {

// How long a call waits for somebody to come and wait for it.
constexpr std::chrono::microseconds kMoment(100);
constexpr std::chrono::nanoseconds kNow(1);

}  // namespace

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

void Job::run(bool on_lane) {
  try {
    body_(on_lane);
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

Alarm::Alarm() : fd_(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC)) {
  if (fd_ < 0)
    throw Failure(Kind::Backend, std::string("cannot make a timer: ") + std::strerror(errno));
}

Alarm::~Alarm() { ::close(fd_); }

void Alarm::set(std::chrono::nanoseconds from_now) {
  itimerspec time{};
  time.it_value.tv_sec = from_now.count() / 1'000'000'000;
  time.it_value.tv_nsec = from_now.count() % 1'000'000'000;
  ::timerfd_settime(fd_, 0, &time, nullptr);
}

void Alarm::wait() {
  uint64_t times;
  while (::read(fd_, &times, sizeof times) < 0 && errno == EINTR) continue;
}

std::shared_ptr<Job> Lane::submit(Job::Body body) {
  auto job = std::make_shared<Job>(std::move(body));
  std::lock_guard lock(mutex_);
  if (closing_) throw_closed();
  if (!worker_.joinable()) worker_ = std::thread([this] { work(); });
  // What queues up behind a call on a user's thread becomes work when that call leaves, and what
  // queues up behind other work is found by whoever runs that.
  if (queue_.empty() && !busy_) {
    on_work_(1);
    alarm_.set(kMoment);
  }
  queue_.push_back(job);
  return job;
}

void Lane::help(const Job& job) {
  std::unique_lock lock(mutex_);
  if (busy_ || queue_.empty() || job.done()) return;
  on_work_(-1);
  alarm_.clear();
  busy_ = helping_ = true;
  do {
    auto next = queue_.front();
    queue_.pop_front();
    lock.unlock();
    next->run(false);
    lock.lock();
    next->finish();
  } while (!queue_.empty() && !job.done());
  busy_ = helping_ = false;
  hand_over();
  idle_.notify_all();
}

void Lane::hand_over() {
  if (!queue_.empty()) on_work_(1);
  if (!queue_.empty() || closing_) alarm_.set(kNow);
}

void Lane::throw_closed() { throw Failure(Kind::Backend, "the group is destroyed"); }

void Lane::work() {
  for (;;) {
    alarm_.wait();
    std::unique_lock lock(mutex_);
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
  return idle_.wait_until(lock, until, [&] { return queue_.empty() && !working_; });
}

void Lane::close(bool wait_for_helpers) {
  std::thread worker;
  {
    std::unique_lock lock(mutex_);
    closing_ = true;
    worker.swap(worker_);  // of several that close, one joins
    if (wait_for_helpers) idle_.wait(lock, [&] { return !helping_; });
    alarm_.set(kNow);
  }
  if (worker.joinable()) worker.join();
}

}  // namespace phalanx
