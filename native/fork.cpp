#include "fork.hpp"

#include <pthread.h>

#include <cstdlib>

namespace phalanx {
namespace {

// Constant-initialised: whoever registers may do so before this file's other statics are made.
constexpr size_t kHandlers = 16;
constinit std::atomic<void (*)()> handlers[kHandlers] = {};

void run_handlers() {
  fork_count.fetch_add(1, std::memory_order_relaxed);
  for (auto& handler : handlers)
    if (auto* run = handler.load(std::memory_order_relaxed)) run();
}

const int registered = ::pthread_atfork(nullptr, nullptr, run_handlers);

struct Left {
  void* object;
  Left* before;
};
constinit std::atomic<Left*> left = nullptr;

}  // namespace

bool after_fork_in_child(void (*handler)()) {
  for (auto& place : handlers) {
    void (*none)() = nullptr;
    if (place.compare_exchange_strong(none, handler)) return true;
  }
  std::abort();  // more handlers than there are places: make kHandlers larger
}

void leave_alone(void* object) {
  // In a list, so that tools which look for lost memory find it.
  auto* mine = new Left{object, left.load(std::memory_order_relaxed)};
  while (!left.compare_exchange_weak(mine->before, mine)) continue;
}

}  // namespace phalanx
