// Shared memory and what is told about it: what happens when there is none to be had.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <fstream>

#include "ranks.hpp"

using namespace phalanx;

namespace {

// Run a body in a process of its own, whose exit code tells whether its checks held.
void in_child(const std::function<void()>& body) {
  pid_t child = ::fork();
  if (child == 0) {
    check::failures = 0;
    try {
      body();
    } catch (const std::exception& error) {
      check::fail(__FILE__, __LINE__, error.what());
    }
    ::_exit(check::failures != 0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  CHECK_EQ(status, 0);
}

// Have a system call of this process fail from now on.
void deny(int call, int error) {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, uint32_t(call), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | uint32_t(error)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  sock_fprog filter{uint16_t(std::size(program)), program};
  REQUIRE(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
  REQUIRE(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0);
}

size_t count_descriptors() {
  std::filesystem::directory_iterator all("/proc/self/fd"), end;
  return size_t(std::distance(all, end));
}

size_t count_heaps() {
  size_t count = 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) count += line.find("phalanx-heap") != line.npos;
  return count;
}

}  // namespace

TEST(a_heap_that_cannot_be_made_leaves_nothing) {
  for (int call : {SYS_fallocate, SYS_getrandom})
    in_child([call] {
      const size_t heaps = count_heaps(), descriptors = count_descriptors();
      deny(call, ENOSPC);
      for (int attempt = 0; attempt < 3; ++attempt) CHECK_THROWS(Heap::mine(), Failure);
      CHECK_EQ(count_heaps(), heaps);
      CHECK_EQ(count_descriptors(), descriptors);
    });
}
