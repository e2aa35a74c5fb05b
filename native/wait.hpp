// How a rank waits: spin for a moment where every rank can have a core of its own, then sleep on a
// futex in short slices, looking between slices for what ends a wait that will never be answered.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <string>

#include "fork.hpp"

namespace phalanx {

using Clock = std::chrono::steady_clock;

inline int64_t nanoseconds(Clock::time_point at) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(at.time_since_epoch()).count();
}
inline int64_t now_ns() { return nanoseconds(Clock::now()); }

class Deadline {
 public:
  // A negative or huge number of seconds means never.
  static Deadline in(double seconds) { return after(Clock::now(), seconds); }
  static Deadline after(Clock::time_point start, double seconds);
  bool passed() const { return Clock::now() >= at_; }
  Clock::time_point at() const { return at_; }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}
  Clock::time_point at_;
};

// A place to sleep. Whoever changes something that a sleeper may wait for calls ring() afterwards.
struct alignas(64) Bell {
  std::atomic<uint32_t> rings;
  std::atomic<uint32_t> sleepers;

  void ring(int most = INT_MAX) {
    // Pairs with the seq_cst increment in Sleep: either this load sees the sleeper, or the sleeper,
    // which looks again after its increment, sees what was written before this fence.
#if defined(__SANITIZE_THREAD__)
    if (sleepers.fetch_add(0) != 0) wake(most);  // the same, in terms that the sanitizer knows
#else
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_relaxed) != 0) wake(most);
#endif
  }
  void wake(int most = INT_MAX);

  // Sleep until the next ring, `seen` having been read before the last look, or a signal.
  void sleep(uint32_t seen, Clock::duration longest);
};

constexpr auto kSlice = std::chrono::milliseconds(50);

// What a waiter does before it sleeps. Where every rank can have a core it spins, up to 200 us, and
// less while that has not paid; the least is what waking a sleeper costs, so that ranks which have
// slept find back to spinning. Where ranks outnumber cores it gives its core away, a few times
// over: to a peer, if one can run.
class Spin {
 public:
  static constexpr int kTurns = 32;
  explicit Spin(bool allowed) : budget_(allowed ? kMost : 0) {}
  std::chrono::nanoseconds budget() const {
    return std::chrono::nanoseconds(budget_.load(std::memory_order_relaxed));
  }
  // Hints that several threads may give at once: the last one counts.
  void paid() {
    budget_.store(std::min(2 * budget_.load(std::memory_order_relaxed), kMost),
                  std::memory_order_relaxed);
  }
  void wasted() {
    budget_.store(std::max(budget_.load(std::memory_order_relaxed) / 2, kLeast),
                  std::memory_order_relaxed);
  }

 private:
  static constexpr int64_t kMost = 200'000, kLeast = 10'000;
  std::atomic<int64_t> budget_;  // nanoseconds
};

inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Wait until ready() holds; true if it took a sleep. look(costly) is called between sleeps and
// throws to give up; costly says that a slice has passed, however busy, since the last such look:
// time to ask whether a peer is dead.
template <class Ready, class Look>
bool wait_until(Bell& bell, Spin& spin, const Deadline& deadline, Ready&& ready, Look&& look) {
  if (ready()) return false;
  if (auto budget = spin.budget(); budget.count() > 0) {
    for (auto until = Clock::now() + budget; Clock::now() < until;) {
      for (int i = 0; i < 16; ++i) {
        if (ready()) {
          spin.paid();
          return false;
        }
        pause_core();
      }
    }
    spin.wasted();
  } else {
    for (int i = 0; i < Spin::kTurns; ++i) {
      ::sched_yield();
      if (ready()) return false;
    }
  }
  auto next_look = Clock::now() + kSlice;
  bool costly = false;
  for (;;) {
    uint32_t seen = bell.rings.load(std::memory_order_acquire);
    struct Sleep {
      Bell& bell;
      Origin origin;
      explicit Sleep(Bell& bell) : bell(bell) {
        bell.sleepers.fetch_add(1);
#if !defined(__SANITIZE_THREAD__)
        std::atomic_thread_fence(std::memory_order_seq_cst);  // the other half of Bell::ring
#endif
      }
      ~Sleep() {
        if (origin.is_here()) bell.sleepers.fetch_sub(1);
      }
    };
    Sleep guard(bell);
    if (ready()) return true;
    look(costly);
    bell.sleep(seen, std::min(next_look, deadline.at()) - Clock::now());
    auto now = Clock::now();
    costly = now >= next_look || now >= deadline.at();
    if (costly) next_look = now + kSlice;
  }
}

std::string seconds_text(double seconds);  // "0.5 s"

// Cores that the calling thread may use.
cpu_set_t usable_cores();

// Called between the slices of waits made on a user's thread; throws when that thread was
// interrupted, and in a child that the interrupting signal handler has forked: it is not the one
// that waits, and on its way out it touches nothing that is shared.
using InterruptCheck = void (*)();
void set_interrupt_check(InterruptCheck check);
void check_interrupt();
// For a child, where it is to go no further on its parent's behalf.
[[noreturn]] void throw_forked();

}  // namespace phalanx
