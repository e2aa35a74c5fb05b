#include "store/heart.hpp"

namespace phalanx::store {
namespace {

struct Stopped {};
thread_local const std::atomic<bool>* stopped = nullptr;  // of the heart whose thread this is

void look_up() {
  if (*stopped) throw Stopped();
}

}  // namespace

Heart::Heart(Store& store, std::string key, double interval)
    : store_(store),
      key_(std::move(key)),
      interval_(interval),
      answered_(Clock::now()),
      thread_([this] { beat(); }) {}

void Heart::beat() {
  stopped = &stopping_;
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    lock.unlock();
    const Patience patience(4 * interval_.count(), look_up);
    try {
      store_.run({Op::Add, 1, {key_}, {}}, patience);
      answered_ = Clock::now();
      refused_ = false;
    } catch (const Failure&) {  // a store that is stopped takes all of the time instead
      refused_ = !patience.exhausted();
    } catch (const Stopped&) {  // a store that is gone holds nobody up
    }
    lock.lock();
    wake_.wait_for(lock, interval_, [this] { return stopping_.load(); });
  }
}

void Heart::stop() {
  if (!origin_.is_here()) return;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

double Heart::silence() const {
  return std::chrono::duration<double>(Clock::now() - answered_.load()).count();
}

}  // namespace phalanx::store
