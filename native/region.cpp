#include "region.hpp"

#include <sys/random.h>

#include <atomic>
#include <charconv>
#include <list>
#include <map>
#include <mutex>
#include <string_view>

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
  static auto& processes = *new PerProcess<Registry>;
  return processes.here();
}

constexpr std::string_view kThreads = "threads", kProcesses = "processes";

// The next of the numbers that a text consists of, each after one space.
template <class Number>
bool take(std::string_view& text, Number& number) {
  if (text.empty() || text[0] != ' ') return false;
  const auto [end, error] = std::from_chars(text.data() + 1, text.data() + text.size(), number);
  if (error != std::errc()) return false;
  text.remove_prefix(size_t(end - text.data()));
  return true;
}

}  // namespace

std::string Ticket::text() const {
  std::string text(threads ? kThreads : kProcesses);
  auto add = [&](auto number) { text += ' ' + std::to_string(number); };
  add(id);
  if (threads) return text;
  add(heap.pid);
  add(heap.fd);
  add(heap.nonce);
  add(heap.size);
  add(offset);
  return text;
}

Ticket Ticket::parse(const std::string& text) {
  Ticket ticket;
  std::string_view rest = text;
  ticket.threads = rest.starts_with(kThreads);
  rest.remove_prefix(ticket.threads                 ? kThreads.size()
                     : rest.starts_with(kProcesses) ? kProcesses.size()
                                                    : 0);
  HeapAddress& heap = ticket.heap;
  const bool whole =
      take(rest, ticket.id) &&
      (ticket.threads || (take(rest, heap.pid) && take(rest, heap.fd) && take(rest, heap.nonce) &&
                          take(rest, heap.size) && take(rest, ticket.offset))) &&
      ticket.text() == text;
  // A region starts at a page.
  if (!whole || ticket.offset % kRegionHead || (!ticket.threads && (heap.pid <= 0 || heap.fd < 0)))
    throw Failure(Kind::Backend, "not a region's ticket: '" + text + "'");
  return ticket;
}

std::shared_ptr<Region> Region::create(size_t bytes, bool threads, Content content) {
  std::shared_ptr<Region> region(new Region, DeleteHere());
  region->threads_ = threads;
  // Threads may make very many small worlds, and use little of them.
  region->block_ = Block::shared(kRegionHead + bytes, !threads);
  region->id_ = new_id();
  std::lock_guard lock(registry().mutex);
  registry().sweep();
  auto heap = Heap::mine();
  const uint64_t offset = heap->offset(region->block_.data());
  Ticket ticket{threads, region->id_, threads ? HeapAddress{} : heap->address(),
                threads ? 0 : offset};
  if (threads) registry().threads[region->id_] = region->block_;
  region->ticket_ = ticket.text();
  region->base_ = region->block_.data();
  head(region->base_).users = 1;
  head(region->base_).bytes = bytes;
  head(region->base_).content = content;
  head(region->base_).place =
      heap->header().list(region->id_, content, offset, kRegionHead + bytes);
  head(region->base_).id = region->id_;
  return region;
}

std::shared_ptr<Region> Region::open(const std::string& text, Content content) {
  const Ticket ticket = Ticket::parse(text);
  std::shared_ptr<Region> region(new Region, DeleteHere());
  region->id_ = ticket.id;
  region->threads_ = ticket.threads;
  std::byte* base = nullptr;
  if (ticket.threads) {
    std::lock_guard lock(registry().mutex);
    auto found = registry().threads.find(region->id_);
    if (found != registry().threads.end()) region->block_ = found->second;
    base = region->block_.data();
  } else {
    region->view_ = HeapView::open(ticket.heap, true);
    base = region->view_->at(ticket.offset, kRegionHead);
  }
  // Counted in only while somebody has it open: a region that has ended is not brought back.
  uint32_t users = base && head(base).id == region->id_ ? head(base).users.load() : 0;
  while (users > 0 && !head(base).users.compare_exchange_weak(users, users + 1)) continue;
  if (users == 0)
    throw Failure(Kind::Backend, "what the ticket '" + text + "' stood for has ended");
  region->base_ = base;
  region->ticket_ = text;
  // From here on the region's destructor counts this rank out again.
  if (head(base).content != content)
    throw Failure(Kind::Backend, "the ticket '" + text + "' stands for something else");
  if (region->view_) region->view_->at(ticket.offset + kRegionHead, head(base).bytes);
  return region;
}

Region::~Region() {
  if (!base_) return;
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
uint64_t Region::bytes() const { return head(base_).bytes; }

}  // namespace phalanx
