// What can be learnt about another process of this machine: whether it lives, and how it ended.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace phalanx {

constexpr uint64_t kUnknownStart = UINT64_MAX;

// What tells a process from others that get its number, and from a program that takes its place.
struct ProcessFacts {
  // In clock ticks since boot; 0 if it is gone or a zombie, kUnknownStart if the system does not
  // tell.
  uint64_t start_time = 0;
  // Address at which its stack starts, which the system chooses anew at every exec; 0 if it does
  // not tell.
  uint64_t stack = 0;
};
ProcessFacts facts_of(int32_t pid);

std::string program_name(int32_t pid);  // "python3"; "" if it is gone

// 'R' running, 'S' sleeping, 'T' stopped, ...; 0 if it is gone.
char process_state(int32_t pid);

// A hold on a process that outlasts its life: newer systems tell through it how it ended.
class ProcessHandle {
 public:
  explicit ProcessHandle(int32_t pid);
  ~ProcessHandle();
  ProcessHandle(ProcessHandle&& other) noexcept;
  ProcessHandle(const ProcessHandle&) = delete;
  // As waitpid() reports it, or -1 if that cannot be known.
  int status() const;

 private:
  int32_t pid_;
  int fd_;
};

std::string signal_name(int number);  // "SIGSEGV"
std::string host_name();
int64_t count_oom_kills();  // by the system since it was started; -1 if unknown

// Have the fatal signals of this process written down here before they do their work.
void note_fatal_signals(std::atomic<int32_t>* place);
void forget_fatal_signals(std::atomic<int32_t>* place);

}  // namespace phalanx
