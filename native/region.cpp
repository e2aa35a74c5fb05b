#include "region.hpp"

#include <sys/random.h>
#include <unistd.h>

#include <atomic>
#include <list>
#include <map>
#include <mutex>
#include <sstream>

#include "failure.hpp"

namespace phalanx {
namespace {

RegionHead& head(std::byte* base) { return *reinterpret_cast<RegionHead*>(base); }

uint64_t new_id() {
  uint64_t id = 0;
  while (id == 0)
    if (::getrandom(&id, sizeof id, 0) != ssize_t(sizeof id))
      throw Failure(Kind::Backend, "getrandom failed");
  return id;
}

// What a rank held of a region that it has closed before the others.
struct Remains {
  std::byte* base;
  uint64_t id;
  std::shared_ptr<HeapView> view;
  std::vector<std::shared_ptr<void>> parked;
};

// Regions of this process: those open to its threads, by number, and the remains of closed ones.
struct Registry {
  std::mutex mutex;
  std::map<uint64_t, Block> threads;
  std::list<Remains> closed;

  void sweep() {
    closed.remove_if([](Remains& remains) { return head(remains.base).id != remains.id; });
  }
};

Registry& registry() {
  static auto& instance = *new Registry;
  return instance;
}

}  // namespace

std::shared_ptr<Region> Region::create(size_t bytes, bool threads, Content content) {
  std::shared_ptr<Region> region(new Region);
  region->threads_ = threads;
  // Threads may make very many small worlds, and use little of them.
  region->block_ = Block::shared(kRegionHead + bytes, !threads);
  region->id_ = new_id();
  std::lock_guard lock(registry().mutex);
  registry().sweep();
  auto heap = Heap::mine();
  const uint64_t offset = heap->offset(region->block_.data());
  std::ostringstream ticket;
  if (threads) {
    registry().threads[region->id_] = region->block_;
    ticket << "threads " << region->id_;
  } else {
    const HeapAddress& address = heap->address();
    ticket << "processes " << region->id_ << ' ' << address.pid << ' ' << address.fd << ' '
           << address.nonce << ' ' << address.size << ' ' << offset;
  }
  region->ticket_ = ticket.str();
  region->base_ = region->block_.data();
  head(region->base_).users = 1;
  head(region->base_).place =
      heap->header().list(region->id_, content, offset, kRegionHead + bytes);
  head(region->base_).id = region->id_;
  return region;
}

std::shared_ptr<Region> Region::open(const std::string& ticket) {
  std::shared_ptr<Region> region(new Region);
  std::istringstream fields(ticket);
  std::string kind;
  fields >> kind >> region->id_;
  std::byte* base = nullptr;
  if (kind == "threads") {
    std::lock_guard lock(registry().mutex);
    auto found = registry().threads.find(region->id_);
    region->threads_ = true;
    if (found != registry().threads.end()) region->block_ = found->second;
    base = region->block_.data();
  } else {
    HeapAddress heap;
    uint64_t offset = 0;
    fields >> heap.pid >> heap.fd >> heap.nonce >> heap.size >> offset;
    if (kind != "processes" || !fields)
      throw Failure(Kind::Backend, "not a region's ticket: '" + ticket + "'");
    region->view_ = HeapView::open(heap, true);
    base = region->view_->at(offset);
  }
  // Counted in only while somebody has it open: a region that has ended is not brought back.
  uint32_t users = base && head(base).id == region->id_ ? head(base).users.load() : 0;
  while (users > 0 && !head(base).users.compare_exchange_weak(users, users + 1)) continue;
  if (users == 0)
    throw Failure(Kind::Backend, "what the ticket '" + ticket + "' stood for has ended");
  region->base_ = base;
  region->ticket_ = ticket;
  return region;
}

Region::~Region() {
  // A forked child has copies of its parent's regions and no say in them.
  if (!base_ || pid_ != ::getpid()) return;
  std::lock_guard lock(registry().mutex);
  if (--head(base_).users == 0) {
    (view_ ? view_->header() : Heap::mine()->header()).unlist(head(base_).place);
    head(base_).id = 0;
    if (threads_) registry().threads.erase(id_);
  } else if (block_ || !parked_.empty()) {
    if (block_) parked_.push_back(std::make_shared<Block>(std::move(block_)));
    registry().closed.push_back({base_, id_, std::move(view_), std::move(parked_)});
  }
  registry().sweep();
}

void Region::park(std::shared_ptr<void> lent) {
  std::lock_guard lock(mutex_);
  parked_.push_back(std::move(lent));
}

std::byte* Region::data() const { return base_ + kRegionHead; }

}  // namespace phalanx
