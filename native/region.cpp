#include "region.hpp"

#include <atomic>
#include <list>
#include <map>
#include <mutex>
#include <sstream>

#include "failure.hpp"

namespace phalanx {
namespace {

// Every region starts with the number of ranks that have it open.
using Users = std::atomic<uint32_t>;
constexpr size_t kHead = 64;

Users& users(std::byte* base) { return *reinterpret_cast<Users*>(base); }

// What a rank held of a region that it has closed before the others.
struct Remains {
  std::byte* base;
  std::shared_ptr<HeapView> view;
  std::vector<Block> blocks;
};

// Regions of this process: those open to its threads, by number, and the remains of closed ones.
struct Registry {
  std::mutex mutex;
  uint64_t next = 1;
  std::map<uint64_t, Block> plain;
  std::list<Remains> closed;

  void sweep() {
    closed.remove_if([](Remains& remains) { return users(remains.base) == 0; });
  }
};

Registry& registry() {
  static auto& instance = *new Registry;
  return instance;
}

}  // namespace

std::shared_ptr<Region> Region::create(size_t bytes, bool threads) {
  std::shared_ptr<Region> region(new Region);
  region->threads_ = threads;
  region->block_ = threads ? Block::plain(kHead + bytes) : Block::shared(kHead + bytes);
  region->base_ = region->block_.data();
  users(region->base_) = 1;
  std::lock_guard lock(registry().mutex);
  registry().sweep();
  std::ostringstream ticket;
  if (threads) {
    uint64_t number = registry().next++;
    registry().plain[number] = region->block_;
    ticket << "threads " << number;
  } else {
    const HeapAddress& heap = Heap::mine()->address();
    ticket << "processes " << heap.pid << ' ' << heap.fd << ' ' << heap.start_time << ' '
           << heap.nonce << ' ' << heap.size << ' ' << Heap::mine()->offset(region->base_);
  }
  region->ticket_ = ticket.str();
  return region;
}

std::shared_ptr<Region> Region::open(const std::string& ticket) {
  std::shared_ptr<Region> region(new Region);
  std::istringstream fields(ticket);
  std::string kind;
  fields >> kind;
  if (kind == "threads") {
    uint64_t number = 0;
    fields >> number;
    std::lock_guard lock(registry().mutex);
    auto found = registry().plain.find(number);
    if (!fields || found == registry().plain.end())
      throw Failure(Kind::Backend,
                    "no region '" + ticket + "' in this process (its world has ended)");
    region->threads_ = true;
    region->block_ = found->second;
    region->base_ = region->block_.data();
    users(region->base_) += 1;
  } else {
    HeapAddress heap;
    uint64_t offset = 0;
    fields >> heap.pid >> heap.fd >> heap.start_time >> heap.nonce >> heap.size >> offset;
    if (kind != "processes" || !fields)
      throw Failure(Kind::Backend, "not a region's ticket: '" + ticket + "'");
    region->view_ = HeapView::open(heap);
    region->base_ = region->view_->at(offset);
    users(region->base_) += 1;
  }
  region->ticket_ = ticket;
  return region;
}

Region::~Region() {
  if (!base_) return;
  std::lock_guard lock(registry().mutex);
  uint32_t left = --users(base_);
  if (threads_ && left == 0) registry().plain.erase(std::stoull(ticket_.substr(8)));
  if (left > 0 && (block_ || !parked_.empty())) {
    if (block_) parked_.push_back(std::move(block_));
    registry().closed.push_back({base_, std::move(view_), std::move(parked_)});
  }
  registry().sweep();
}

void Region::park(Block block) {
  std::lock_guard lock(mutex_);
  parked_.push_back(std::move(block));
}

std::byte* Region::data() const { return base_ + kHead; }

}  // namespace phalanx
