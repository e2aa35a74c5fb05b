// Memory made by one rank and opened by the others through a ticket, a short string that travels
// through the store. It is given back when the last rank that has it open lets go.
#pragma once

#include <unistd.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "heap.hpp"

namespace phalanx {

class Region {
 public:
  static std::shared_ptr<Region> create(size_t bytes, bool threads);
  static std::shared_ptr<Region> open(const std::string& ticket);
  ~Region();
  Region(const Region&) = delete;

  std::byte* data() const;
  bool threads() const { return threads_; }
  uint64_t id() const { return id_; }
  const std::string& ticket() const { return ticket_; }
  // Keep something of this rank's until all ranks have closed the region: they may still use it.
  void park(std::shared_ptr<void> lent);

 private:
  Region() : pid_(::getpid()) {}
  const int pid_;
  uint64_t id_ = 0;
  std::string ticket_;
  Block block_;                     // the creator's, and every thread's
  std::shared_ptr<HeapView> view_;  // in other processes than the creator's
  bool threads_ = false;
  std::mutex mutex_;
  std::vector<std::shared_ptr<void>> parked_;
  std::byte* base_ = nullptr;
};

}  // namespace phalanx
