// Memory made by one rank and opened by the others through a ticket, a short string that travels
// through the store. It is given back when the last rank that has it open lets go.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "heap.hpp"

namespace phalanx {

// Every region starts with who it is and how many ranks have it open. The memory of a region that
// all have closed may be anything by now: then the id is another.
struct RegionHead {
  std::atomic<uint64_t> id;
  std::atomic<uint32_t> users;
  uint32_t place;  // in the heap's directory
  uint64_t bytes;  // of what follows this head
  Content content;
};
constexpr size_t kRegionHead = 64;
static_assert(sizeof(RegionHead) <= kRegionHead && std::is_standard_layout_v<RegionHead>);

// What a ticket says.
struct Ticket {
  bool threads = false;
  uint64_t id = 0;
  HeapAddress heap = {};  // of its creator; not if ranks are threads
  uint64_t offset = 0;    // of the region there
  std::string text() const;
  // Throws unless this is, to the letter, what text() gave.
  static Ticket parse(const std::string& text);
};

class Region {
 public:
  static std::shared_ptr<Region> create(size_t bytes, bool threads, Content content);
  // Throws if it is not a region of this kind.
  static std::shared_ptr<Region> open(const std::string& ticket, Content content);
  ~Region();
  Region(const Region&) = delete;

  std::byte* data() const;
  uint64_t bytes() const;  // of data
  bool threads() const { return threads_; }
  uint64_t id() const { return id_; }
  const std::string& ticket() const { return ticket_; }
  // Keep something of this rank's until all ranks have closed the region: they may still use it.
  void park(std::shared_ptr<void> lent);

 private:
  Region() = default;
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
