#include "wait.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cstdio>

#include "failure.hpp"

namespace phalanx {
namespace {

std::atomic<InterruptCheck> interrupt_check{nullptr};

// Not FUTEX_PRIVATE: the word may be shared between processes.
long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  return ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout,
                   nullptr, 0);
}

}  // namespace

Deadline Deadline::after(Clock::time_point start, double seconds) {
  constexpr double kForever = 1e9;
  if (!(seconds >= 0) || seconds > kForever) seconds = kForever;
  return Deadline(
      start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)));
}

void Bell::wake(int most) {
  rings.fetch_add(1);
  futex(rings, FUTEX_WAKE, uint32_t(most), nullptr);
}

void Bell::sleep(uint32_t seen, Clock::duration longest) {
  auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(longest).count();
  if (nanoseconds <= 0) return;
  timespec timeout{time_t(nanoseconds / 1'000'000'000), long(nanoseconds % 1'000'000'000)};
  futex(rings, FUTEX_WAIT, seen, &timeout);
}

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", seconds);
  return text;
}

cpu_set_t usable_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  // The call fails on machines with more cores than the set can name: then all that it can.
  if (::sched_getaffinity(0, sizeof cores, &cores) != 0)
    for (int core = 0; core < CPU_SETSIZE; ++core) CPU_SET(core, &cores);
  return cores;
}

void set_interrupt_check(InterruptCheck check) { interrupt_check.store(check); }

void check_interrupt() {
  const Origin origin;
  if (auto check = interrupt_check.load(std::memory_order_acquire)) check();
  if (!origin.is_here()) throw_forked();
}

void throw_forked() {
  throw Failure(Kind::Backend,
                "this process was forked in the middle of an operation of its parent (by a signal "
                "handler): it is no rank, and the operation is the parent's to finish; let a child "
                "that a handler forks end there");
}

}  // namespace phalanx
