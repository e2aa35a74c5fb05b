// Shared memory of one process: a single memfd whose whole range is reserved once. Blocks are
// filled with fallocate (lack of memory is an exception, not SIGBUS) and punched out when freed.
// It has no name anywhere, so it ends with the last process that maps it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "fork.hpp"

namespace phalanx {

// What another process needs to map a heap: it opens /proc/<pid>/fd/<fd> and compares the nonce.
struct HeapAddress {
  int32_t pid = 0;
  int32_t fd = -1;
  uint64_t start_time = 0;  // of the process, so that a reused pid is not mistaken for it
  uint64_t nonce = 0;
  uint64_t size = 0;
  uint64_t stack = 0;  // where its stack starts, so that a program put in its place is not either
};

// What a region of a heap holds, as the heap's directory says.
enum class Content : uint32_t { Nothing, Roster, Board };

struct DirectoryEntry {
  std::atomic<uint64_t> id;  // of the region; 0 while the entry is free
  uint64_t offset, bytes;    // of the region in the heap
  Content content;
};

// The beginning of every heap: a peer makes sure by it of what it has mapped, and a tool finds by
// it what there is to see.
struct HeapHeader {
  static constexpr uint32_t kEntries = 1000;
  char magic[8];
  uint64_t layout;  // of all that is shared: see layout.hpp
  HeapAddress address;
  std::atomic<uint32_t> unlisted;  // regions that found no free entry, so far
  DirectoryEntry entries[kEntries];

  bool is_valid() const;
  // Put a region into the directory; returns its place, kEntries if there is none free. Only the
  // heap's own process calls it, one thread at a time.
  uint32_t list(uint64_t id, Content content, uint64_t offset, uint64_t bytes);
  void unlist(uint32_t place);
};

class Heap {
 public:
  // This process' heap. A forked child gets one of its own; what it inherited stays mapped. Where
  // addresses are limited it is made small enough for so many ranks to map each other's.
  static std::shared_ptr<Heap> mine(int ranks = 1);
  ~Heap();
  Heap(const Heap&) = delete;

  // Zeroed, page aligned. Where `filled` is false, pages get memory when they are first used: cheap
  // where few will be, but a lack of memory is then no exception.
  std::byte* allocate(size_t bytes, bool filled = true);
  void release(std::byte* block);
  bool contains(const void* data, size_t bytes) const;
  uint64_t offset(const void* data) const { return static_cast<const std::byte*>(data) - base_; }
  std::byte* at(uint64_t offset) const { return base_ + offset; }
  const HeapAddress& address() const { return address_; }
  HeapHeader& header() const { return *reinterpret_cast<HeapHeader*>(base_); }
  size_t used() const;

 private:
  explicit Heap(int ranks);
  explicit Heap(std::nullptr_t);  // that holds nothing yet
  [[noreturn]] void throw_full(size_t bytes) const;
  std::byte* base_ = nullptr;
  const Origin origin_;
  HeapAddress address_;
  mutable std::mutex mutex_;
  std::map<uint64_t, uint64_t> free_;  // offset -> length, coalesced
  std::map<uint64_t, uint64_t> used_;
};

// Another process' heap, mapped whole. Mapping one's own address gives the same memory.
class HeapView {
 public:
  // `show` keeps it among the open files of this process, so that it can be looked at from outside
  // also when its owner is gone.
  static std::shared_ptr<HeapView> open(const HeapAddress& address, bool show = false);
  ~HeapView();
  HeapView(const HeapView&) = delete;
  // Something at an offset that its owner has told. Throws unless it lies within the heap.
  std::byte* at(uint64_t offset, uint64_t bytes) const;
  HeapHeader& header() const { return *reinterpret_cast<HeapHeader*>(base_); }

 private:
  HeapView(std::byte* base, size_t size, int fd) : base_(base), size_(size), fd_(fd) {}
  std::byte* base_;
  size_t size_;
  int fd_;  // -1 unless it is shown
};

// A piece of memory that the ranks of one world can reach: from the heap where they are processes;
// plain memory where they are threads, unless it is to be seen from outside.
class Block {
 public:
  Block() = default;
  static Block shared(size_t bytes, bool filled = true);
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
