#include "process.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>

#include "fork.hpp"

namespace phalanx {
namespace {

// Reads a small file of /proc; -1 if it cannot be opened, with errno.
ssize_t slurp(const char* path, char* text, size_t room) {
  int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return -1;
  ssize_t got = ::read(fd, text, room - 1);
  ::close(fd);
  text[got > 0 ? got : 0] = 0;
  return got > 0 ? got : 0;
}

// The fields of /proc/<pid>/stat, counted as in proc(5). The command name stands in parentheses and
// may hold anything: the third field follows the last ')'.
class Stat {
 public:
  explicit Stat(int32_t pid) {
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
    ssize_t got = slurp(path, text_, sizeof text_);
    // Out of descriptors, say, is no proof of anybody's death.
    unknown_ = got < 0 && errno != ENOENT && errno != ESRCH;
    const char* end = got > 0 ? std::strrchr(text_, ')') : nullptr;
    if (end && end[1]) third_ = end + 2;
  }
  bool unknown() const { return unknown_; }
  std::string name() const {
    const char* start = third_ ? std::strchr(text_, '(') : nullptr;
    return start ? std::string(start + 1, third_ - 2) : "";
  }
  const char* field(int number) const {
    const char* at = third_;
    for (int i = 3; at && i < number; ++i)
      if ((at = std::strchr(at, ' '))) ++at;
    return at;
  }

 private:
  char text_[1024];
  bool unknown_;
  const char* third_ = nullptr;
};

bool is_dead(char state) { return state == 'Z' || state == 'X'; }

// From linux/pidfd.h, which may be older than the system.
struct PidfdInfo {
  uint64_t mask, cgroup;
  uint32_t ids[11];
  int32_t exit_code;
};
constexpr uint64_t kPidfdInfoExit = 1 << 3;
constexpr unsigned long kPidfdGetInfo = _IOWR(0xFF, 11, PidfdInfo);

constexpr std::array kFatal = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTERM, SIGHUP};
constexpr int kPlaces = 64;
std::atomic<std::atomic<int32_t>*> places[kPlaces];
std::atomic<int32_t> noting_process;
struct sigaction before[kFatal.size()];

void note_and_die(int number, siginfo_t* info, void*) {
  // A forked child has its parent's handlers, but does not speak for it.
  if (::getpid() == noting_process.load(std::memory_order_relaxed))
    for (auto& place : places)
      if (auto* word = place.load(std::memory_order_acquire)) word->store(number);
  for (size_t i = 0; i < kFatal.size(); ++i)
    if (kFatal[i] == number) ::sigaction(number, &before[i], nullptr);
  // A fault happens again when this returns, and shows the former handler where; what was sent is
  // sent once more.
  bool fault = info->si_code > 0 && number != SIGABRT && number != SIGTERM && number != SIGHUP;
  if (!fault) ::raise(number);
}

}  // namespace

ProcessFacts facts_of(int32_t pid) {
  Stat stat(pid);
  if (stat.unknown()) return {kUnknownStart, 0};
  const char *state = stat.field(3), *start = stat.field(22), *stack = stat.field(28);
  if (!state || is_dead(*state) || !start) return {};
  return {std::strtoull(start, nullptr, 10), stack ? std::strtoull(stack, nullptr, 10) : 0};
}

std::string program_name(int32_t pid) { return Stat(pid).name(); }

char process_state(int32_t pid) {
  Stat stat(pid);
  const char* state = stat.field(3);
  return state ? *state : 0;
}

ProcessHandle::ProcessHandle(int32_t pid) : pid_(pid), fd_(-1) {
#ifdef SYS_pidfd_open
  fd_ = int(::syscall(SYS_pidfd_open, pid, 0));
#endif
}

ProcessHandle::ProcessHandle(ProcessHandle&& other) noexcept
    : pid_(other.pid_), fd_(std::exchange(other.fd_, -1)) {}

ProcessHandle::~ProcessHandle() {
  if (fd_ >= 0) ::close(fd_);
}

int ProcessHandle::status() const {
  // Until its parent has taken notice, the process table knows; afterwards, the handle may.
  Stat stat(pid_);
  const char *state = stat.field(3), *code = stat.field(52);
  if (state && is_dead(*state) && code) return int(std::strtol(code, nullptr, 10));
  PidfdInfo info{};
  info.mask = kPidfdInfoExit;
  if (fd_ >= 0 && ::ioctl(fd_, kPidfdGetInfo, &info) == 0 && (info.mask & kPidfdInfoExit))
    return info.exit_code;
  return -1;
}

std::string signal_name(int number) {
  static constexpr std::pair<int, const char*> names[] = {
      {SIGHUP, "SIGHUP"},   {SIGINT, "SIGINT"},   {SIGQUIT, "SIGQUIT"}, {SIGILL, "SIGILL"},
      {SIGTRAP, "SIGTRAP"}, {SIGABRT, "SIGABRT"}, {SIGBUS, "SIGBUS"},   {SIGFPE, "SIGFPE"},
      {SIGKILL, "SIGKILL"}, {SIGUSR1, "SIGUSR1"}, {SIGSEGV, "SIGSEGV"}, {SIGUSR2, "SIGUSR2"},
      {SIGPIPE, "SIGPIPE"}, {SIGALRM, "SIGALRM"}, {SIGTERM, "SIGTERM"}, {SIGXCPU, "SIGXCPU"},
      {SIGXFSZ, "SIGXFSZ"}, {SIGSYS, "SIGSYS"},
  };
  for (auto& [known, name] : names)
    if (known == number) return name;
  return "signal " + std::to_string(number);
}

std::string host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "?";
}

int64_t count_oom_kills() {
  char text[16 << 10];
  if (slurp("/proc/vmstat", text, sizeof text) <= 0) return -1;
  const char* found = std::strstr(text, "\noom_kill ");
  return found ? std::strtoll(found + 10, nullptr, 10) : -1;
}

void note_fatal_signals(std::atomic<int32_t>* place) {
  static auto& mutex = *new PerProcess<std::mutex>;
  std::lock_guard lock(mutex.here());
  if (noting_process.exchange(::getpid()) != ::getpid()) {
    for (auto& place : places) place = nullptr;  // a parent's, in a forked child
    for (size_t i = 0; i < kFatal.size(); ++i) {
      struct sigaction now{};
      ::sigaction(kFatal[i], nullptr, &now);
      bool asked = kFatal[i] == SIGTERM || kFatal[i] == SIGHUP;
      // What the user handles or ignores is not fatal; the handler may be inherited from a parent.
      if ((asked && now.sa_handler != SIG_DFL) || now.sa_sigaction == note_and_die) continue;
      before[i] = now;
      now = {};
      now.sa_sigaction = note_and_die;
      now.sa_flags = SA_ONSTACK | SA_SIGINFO;
      ::sigaction(kFatal[i], &now, nullptr);
    }
  }
  for (auto& free : places) {
    std::atomic<int32_t>* nobody = nullptr;
    if (free.compare_exchange_strong(nobody, place)) return;
  }
}

void forget_fatal_signals(std::atomic<int32_t>* place) {
  for (auto& taken : places) {
    std::atomic<int32_t>* expected = place;
    taken.compare_exchange_strong(expected, nullptr);
  }
}

}  // namespace phalanx
