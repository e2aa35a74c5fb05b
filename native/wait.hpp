// How a rank waits: spin for a moment where every rank can have a core of its own, then sleep on a
// futex in short slices, looking between slices for what ends a wait that will never be answered.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace phalanx {

using Clock = std::chrono::steady_clock;

class Deadline {
 public:
  static Deadline in(double seconds);  // a negative or huge number of seconds means never
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

  void ring() {
    // Pairs with the seq_cst increment in Sleep: either this load sees the sleeper, or the sleeper,
    // which looks again after its increment, sees what was written before this fence.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_relaxed) != 0) wake();
  }
  void wake();

  // Sleep until the next ring, `seen` having been read before the last look; false if none came
  // (time ran out, or a signal arrived).
  bool sleep(uint32_t seen, Clock::duration longest);
};

constexpr auto kSlice = std::chrono::milliseconds(50);
constexpr auto kSpin = std::chrono::microseconds(50);

inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Wait until ready() holds. look(quiet) is called between sleeps and throws to give up; quiet says
// that a slice went by with no ring, which is the time for costly looks (is a peer dead?).
template <class Ready, class Look>
void wait_until(Bell& bell, bool may_spin, const Deadline& deadline, Ready&& ready, Look&& look) {
  if (ready()) return;
  if (may_spin) {
    for (auto until = Clock::now() + kSpin; Clock::now() < until;) {
      for (int i = 0; i < 16; ++i) {
        if (ready()) return;
        pause_core();
      }
    }
  }
  bool quiet = false;
  for (;;) {
    uint32_t seen = bell.rings.load(std::memory_order_acquire);
    struct Sleep {
      Bell& bell;
      explicit Sleep(Bell& bell) : bell(bell) { bell.sleepers.fetch_add(1); }
      ~Sleep() { bell.sleepers.fetch_sub(1); }
    };
    {
      Sleep guard(bell);
      if (ready()) return;
      look(quiet);
      auto left = deadline.at() - Clock::now();
      quiet = left <= Clock::duration::zero() || !bell.sleep(seen, std::min<Clock::duration>(kSlice, left));
    }
  }
}

// Cores that this process may use.
int usable_cores();

// Called between the slices of waits made on a user's thread; throws when that thread was interrupted.
using InterruptCheck = void (*)();
void set_interrupt_check(InterruptCheck check);
void check_interrupt();

}  // namespace phalanx
