// Open files that close themselves and that a forked child does not keep alive.
#pragma once

#include <utility>

#include "fork.hpp"

namespace phalanx::store {

// After fork() the child's copies are closed at once. Else a data-loading worker would keep the
// connections of a dead rank open, so that its peers never learn of the death, and would keep the
// lock on a file that its parent released.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd);
  ~Descriptor() { close(); }
  Descriptor(Descriptor&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), origin_(other.origin_) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    close();
    fd_ = std::exchange(other.fd_, -1);
    origin_ = other.origin_;
    return *this;
  }

  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  // Whether this process opened it, and not the parent that it was forked from.
  bool ours() const;
  void close();

 private:
  int fd_ = -1;
  Origin origin_;
};

}  // namespace phalanx::store
