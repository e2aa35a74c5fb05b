// Shared memory of one process: a single memfd whose whole range is reserved once. Blocks are
// filled with fallocate (lack of memory is an exception, not SIGBUS) and punched out when freed.
// It has no name anywhere, so it ends with the last process that maps it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace phalanx {

// What another process needs to map a heap: it opens /proc/<pid>/fd/<fd> and compares the nonce.
struct HeapAddress {
  int32_t pid = 0;
  int32_t fd = -1;
  uint64_t start_time = 0;  // of the process, so that a reused pid is not mistaken for it
  uint64_t nonce = 0;
  uint64_t size = 0;
};

class Heap {
 public:
  // This process' heap. A forked child gets one of its own; what it inherited stays mapped.
  static std::shared_ptr<Heap> mine();
  ~Heap();
  Heap(const Heap&) = delete;

  std::byte* allocate(size_t bytes);  // zeroed, page aligned
  void release(std::byte* block);
  bool contains(const void* data, size_t bytes) const;
  uint64_t offset(const void* data) const { return static_cast<const std::byte*>(data) - base_; }
  std::byte* at(uint64_t offset) const { return base_ + offset; }
  const HeapAddress& address() const { return address_; }
  size_t used() const;

 private:
  Heap();
  std::byte* base_ = nullptr;
  HeapAddress address_;
  mutable std::mutex mutex_;
  std::map<uint64_t, uint64_t> free_;  // offset -> length, coalesced
  std::map<uint64_t, uint64_t> used_;
};

// Another process' heap, mapped whole. Mapping one's own address gives the same memory.
class HeapView {
 public:
  static std::shared_ptr<HeapView> open(const HeapAddress& address);
  ~HeapView();
  HeapView(const HeapView&) = delete;
  std::byte* at(uint64_t offset) const { return base_ + offset; }

 private:
  HeapView(std::byte* base, size_t size) : base_(base), size_(size) {}
  std::byte* base_;
  size_t size_;
};

// A piece of memory that the ranks of one world can reach: from the heap where they are processes,
// plain memory where they are threads.
class Block {
 public:
  Block() = default;
  static Block shared(size_t bytes);
  static Block plain(size_t bytes);
  std::byte* data() const { return data_.get(); }
  size_t size() const { return size_; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  Block(std::shared_ptr<std::byte> data, size_t size) : data_(std::move(data)), size_(size) {}
  std::shared_ptr<std::byte> data_;
  size_t size_ = 0;
};

}  // namespace phalanx
