#include "store/descriptor.hpp"

#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace phalanx::store {
namespace {

// Every open descriptor below max_fd has its bit set, so that a child can close them without taking
// a lock that some other thread held when the process forked.
constexpr int max_fd = 1 << 16;
std::atomic<uint64_t> open_bits[max_fd / 64];

void close_in_child() {
  for (int word = 0; word < max_fd / 64; ++word)
    for (uint64_t bits = open_bits[word].exchange(0); bits; bits &= bits - 1)
      ::close(word * 64 + __builtin_ctzll(bits));
}

[[maybe_unused]] const bool registered = after_fork_in_child(close_in_child);

}  // namespace

Descriptor::Descriptor(int fd) : fd_(fd) {
  if (fd >= 0 && fd < max_fd) open_bits[fd / 64].fetch_or(uint64_t{1} << fd % 64);
}

bool Descriptor::ours() const { return fd_ >= 0 && origin_.is_here(); }

void Descriptor::close() {
  if (ours()) {
    if (fd_ < max_fd) open_bits[fd_ / 64].fetch_and(~(uint64_t{1} << fd_ % 64));
    ::close(fd_);
  }
  fd_ = -1;
}

}  // namespace phalanx::store
