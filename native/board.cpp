#include "board.hpp"

#include <algorithm>
#include <cstring>

#include "kernels.hpp"
#include "mailbox.hpp"

namespace phalanx {

struct Board::Header {
  uint32_t crowded;
  Bell bell;
  alignas(64) std::atomic<uint32_t> arrived[2];
  alignas(64) std::atomic<uint32_t> mismatch;
  std::atomic<uint32_t> door;
  alignas(64) std::atomic<uint32_t> broken;  // 0 no, 1 being written, 2 yes
  Kind kind;
  uint32_t why_length;
  char why[6000];
};

namespace {

size_t lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

uint64_t mix(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15ull + (hash << 6) + (hash >> 2);
  hash *= 0xff51afd7ed558ccdull;
  return hash ^ (hash >> 32);
}

const char* name(Op op) {
  static constexpr const char* names[] = {"barrier",    "broadcast", "all_reduce", "reduce",
                                          "all_gather", "gather",    "scatter",    "reduce_scatter",
                                          "all_to_all", "send",      "recv"};
  return names[static_cast<size_t>(op)];
}

uint64_t Posting::digest() const {
  uint64_t hash =
      uint64_t(op) | uint64_t(dtype) << 8 | uint64_t(reduce) << 16 | uint64_t(uint32_t(root)) << 32;
  hash = mix(sequence, hash);
  bool own_shape = op == Op::AllGather || op == Op::ReduceScatter || op == Op::AllToAll;
  for (int i = 0; i < ndim && !own_shape; ++i) hash = mix(hash, uint64_t(shape[i]) * 2 + 1);
  return mix(hash, detail);
}

std::string Posting::describe() const {
  std::string text = std::string(name(op)) + "(";
  if (op == Op::Barrier) return text + ")";
  text += phalanx::name(dtype);
  text += "[";
  for (int i = 0; i < ndim; ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  text += "]";
  bool reduces = op == Op::AllReduce || op == Op::Reduce || op == Op::ReduceScatter;
  if (reduces) text += std::string(", ") + phalanx::name(reduce);
  if (root >= 0)
    text += (op == Op::Broadcast || op == Op::Scatter ? ", src=" : ", dst=") + std::to_string(root);
  return text + ")";
}

size_t Board::bytes_for(int size) {
  size_t p = size_t(size);
  return lines(sizeof(Header)) + p * lines(sizeof(Seat)) + p * 2 * kSlot +
         lines(p * 2 * p * sizeof(Parcel)) + p * p * kCells * sizeof(Cell);
}

Board::Board(std::shared_ptr<Roster> roster, std::vector<int> members,
             std::shared_ptr<Region> region)
    : roster_(std::move(roster)), members_(std::move(members)), region_(std::move(region)) {
  size_t p = members_.size();
  std::byte* at = region_->data() + lines(sizeof(Header));
  seats_ = reinterpret_cast<Seat*>(at);
  slots_ = (at += p * lines(sizeof(Seat)));
  parcels_ = reinterpret_cast<Parcel*>(at += p * 2 * kSlot);
  cells_ = at + lines(p * 2 * p * sizeof(Parcel));
  crowded_ = header().crowded != 0;
}

std::shared_ptr<Board> Board::create(std::shared_ptr<Roster> roster, std::vector<int> members) {
  int size = int(members.size());
  auto region = Region::create(bytes_for(size), roster->threads());
  reinterpret_cast<Header*>(region->data())->crowded = size > roster->cores(members);
  return std::shared_ptr<Board>(
      new Board(std::move(roster), std::move(members), std::move(region)));
}

std::shared_ptr<Board> Board::open(std::shared_ptr<Roster> roster, std::vector<int> members,
                                   const std::string& ticket) {
  return std::shared_ptr<Board>(
      new Board(std::move(roster), std::move(members), Region::open(ticket)));
}

void Board::attend(int rank, bool creator, const std::string& group, const Deadline& deadline) {
  seat(rank).present = true;
  bell().ring();
  if (!creator) return;
  auto missing = [&] {
    std::vector<int> ranks;
    for (int peer = 0; peer < size(); ++peer)
      if (!seat(peer).present) ranks.push_back(peer);
    return ranks;
  };
  Spin spin(false);
  wait_until(
      bell(), spin, deadline, [&] { return missing().empty(); },
      [&](bool costly) {
        check_broken();
        for (int peer : missing())
          if (std::string end = obituary(peer, costly); !end.empty() && !seat(peer).present)
            throw Failure(Kind::PeerFailed, "group '" + group + "' cannot be made: " + end);
        if (!costly) return;
        if (deadline.passed())
          throw Failure(Kind::Timeout, "group '" + group +
                                           "' cannot be made: timed out waiting for " +
                                           rank_list(missing()) + " of the group to call as well");
        check_interrupt();
      });
}

Cell* Board::cells(int from, int to) const {
  return reinterpret_cast<Cell*>(cells_) + (size_t(to) * size() + from) * kCells;
}

Bell& Board::bell() const { return header().bell; }
std::atomic<uint32_t>& Board::arrived(uint32_t clock) const { return header().arrived[clock & 1]; }
std::atomic<uint32_t>& Board::mismatch() const { return header().mismatch; }
std::atomic<uint32_t>& Board::door() const { return header().door; }

void Board::break_up(Kind kind, const std::string& why) {
  uint32_t whole = 0;
  if (!header().broken.compare_exchange_strong(whole, 1)) return;
  header().kind = kind;
  header().why_length = uint32_t(std::min(why.size(), sizeof header().why));
  std::memcpy(header().why, why.data(), header().why_length);
  header().broken.store(2);
  wake_all();
}

void Board::wake_all() const {
  header().bell.wake();
  for (int rank = 0; rank < size(); ++rank) seat(rank).mail.wake();
}

void Board::leave(int rank) {
  seat(rank).left = true;
  wake_all();
}

void Board::check_broken() const {
  if (header().broken.load(std::memory_order_acquire) == 2)
    throw Failure(header().kind, std::string(header().why, header().why_length));
}

uint64_t Board::share(const void* data, size_t bytes) const {
  if (threads()) return reinterpret_cast<uint64_t>(data);
  auto heap = Heap::mine();
  return heap->contains(data, bytes) ? heap->offset(data) : 0;
}

std::string Board::obituary(int rank, bool ask_system) const {
  // Its own word first: the system only knows that it is gone.
  std::string end = roster_->obituary(members_[rank], false);
  if (!end.empty()) return end;
  if (seat(rank).left.load(std::memory_order_acquire))
    return roster_->title(members_[rank]) + " has destroyed this group";
  return ask_system ? roster_->obituary(members_[rank], true) : "";
}

std::string rank_list(std::span<const int> ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size();) {
    size_t end = i;
    while (end + 1 < ranks.size() && ranks[end + 1] == ranks[end] + 1) ++end;
    text += (i ? ", " : "") + std::to_string(ranks[i]);
    if (end > i) text += (end == i + 1 ? ", " : "-") + std::to_string(ranks[end]);
    i = end + 1;
  }
  return text;
}

std::string mismatch_report(const Board& board, const std::string& group, uint64_t sequence) {
  struct Kind {
    std::vector<int> ranks;
    std::string what, site;
  };
  std::vector<Kind> kinds;
  for (int rank = 0; rank < board.size(); ++rank) {
    const Posting& posting = board.posting(rank, sequence);
    std::string what = posting.describe(), site = posting.site;
    auto same = std::find_if(kinds.begin(), kinds.end(),
                             [&](Kind& k) { return k.what == what && k.site == site; });
    if (same == kinds.end()) same = kinds.insert(kinds.end(), Kind{{}, what, site});
    same->ranks.push_back(rank);
  }
  size_t rank_width = 0, what_width = 0;
  for (auto& kind : kinds) {
    rank_width = std::max(rank_width, rank_list(kind.ranks).size());
    what_width = std::max(what_width, kind.what.size());
  }
  std::string text = std::string(name(board.posting(0, sequence).op)) + " #" +
                     std::to_string(sequence) + " on group '" + group +
                     "' does not match across ranks";
  for (auto& kind : kinds) {
    std::string ranks = rank_list(kind.ranks);
    text += "\n  " + ranks + std::string(rank_width - ranks.size() + 2, ' ') + kind.what +
            std::string(what_width - kind.what.size() + 2, ' ') + kind.site;
  }
  return text;
}

}  // namespace phalanx
