// The board of a group: one seat per rank, where a rank says what it is about to do before it does
// it. Everything else, from synchronisation to diagnosis, is reading what the others have posted.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "failure.hpp"
#include "roster.hpp"
#include "types.hpp"
#include "wait.hpp"

namespace phalanx {

enum class Op : uint8_t {
  Barrier,
  Broadcast,
  AllReduce,
  Reduce,
  AllGather,
  Gather,
  Scatter,
  ReduceScatter,
  AllToAll,
  Send,
  Recv,
};
const char* name(Op op);

// How a rank offers its data to the others.
enum class Offer : uint8_t {
  Nothing,
  Inline,  // copied into the seat before posting
  Direct,  // the others read it where it is, in memory that they share
  Remote,  // the others read it where it is, through the system
  Staged,  // passed through a buffer, piece by piece
};

// One operation as its rank announced it. Read by the others only after the seat's line says so.
struct Posting {
  uint64_t sequence;
  Op op;
  DType dtype;
  Reduce reduce;
  Offer offer;
  uint8_t ndim;
  bool done;
  int32_t root;  // or the peer, for send and recv; -1 for none
  int64_t shape[6];
  uint64_t detail;  // hash of what must agree beyond the fields above (lists of sizes)
  double factor;    // PREMUL_SUM
  uint64_t data;    // where a Direct offer starts, as the owner's heap offset or a thread's pointer
  uint64_t stage;   // the owner's staging buffer, likewise; 0 while it has none
  uint64_t bytes;   // how much is offered in all
  int64_t posted_ns, finished_ns;
  char site[80];  // "train.py:88 in step"

  // What every rank must have posted alike: equal digests mean equal operations. Where ranks may
  // rightly bring different shapes, `detail` stands for what they must agree on instead.
  uint64_t digest() const;
  std::string describe() const;  // "all_reduce(float32[1024], SUM)"
};

constexpr size_t kLinePayload = 48;
constexpr uint32_t kHistory = 64;  // postings kept per seat

// The cache line through which ranks meet. A seat has two and uses them in turn: a rank can be at
// most one tick ahead of another, so the line that a slow rank still reads is not written.
struct alignas(64) Line {
  std::atomic<uint32_t> clock;
  Offer offer;
  uint64_t digest;
  std::byte payload[kLinePayload];
};
static_assert(sizeof(Line) == 64);

struct Seat {
  Line lines[2];
  Bell mail;                  // rung when something arrives for, or leaves, this rank's mailbox
  std::atomic<bool> present;  // its rank has opened the board
  std::atomic<bool> left;     // and closed it again
  Posting history[kHistory];
};

// What one rank tells each other rank about the data it has for it.
struct Parcel {
  uint64_t data;   // where a Direct offer is; for other offers its place in what is offered
  uint64_t given;  // bytes that the owner has for the other
  uint64_t taken;  // bytes that the owner expects from the other
};

// One message slot of a mailbox; see mailbox.hpp.
struct Cell;

class Board {
 public:
  static constexpr size_t kSlot = 16 << 10;

  // `members` are world ranks; one rank creates and the others open.
  static std::shared_ptr<Board> create(std::shared_ptr<Roster> roster, std::vector<int> members);
  static std::shared_ptr<Board> open(std::shared_ptr<Roster> roster, std::vector<int> members,
                                     const std::string& ticket);

  // Say that a rank has opened the board. The creator returns when all have, so that the board they
  // are told of exists.
  void attend(int rank, bool creator, const std::string& group, const Deadline& deadline);

  const std::string& ticket() const { return region_->ticket(); }
  int size() const { return int(members_.size()); }
  bool threads() const { return roster_->threads(); }
  bool crowded() const { return crowded_; }  // more ranks than cores: never spin
  int world_rank(int rank) const { return members_[rank]; }
  Roster& roster() const { return *roster_; }

  Seat& seat(int rank) const { return seats_[rank]; }
  Posting& posting(int rank, uint64_t sequence) const {
    return seats_[rank].history[sequence % kHistory];
  }
  std::byte* slot(int rank, uint64_t sequence) const {
    return slots_ + (size_t(rank) * 2 + (sequence & 1)) * kSlot;
  }
  Parcel& parcel(int owner, int other, uint64_t sequence) const {
    return parcels_[(size_t(owner) * 2 + (sequence & 1)) * size() + other];
  }
  Cell* cells(int from, int to) const;

  Bell& bell() const;
  // Crowded boards meet by counting: the last to arrive compares the postings, leaves its verdict
  // and opens the door for all.
  std::atomic<uint32_t>& arrived(uint32_t clock) const;
  std::atomic<uint32_t>& mismatch() const;  // clock of the last meeting that did not agree
  std::atomic<uint32_t>& door() const;      // clock of the last meeting that all have reached

  // Make the group unusable: every wait on it, now or later, raises this. The first caller's word
  // counts.
  void break_up(Kind kind, const std::string& why);
  void check_broken() const;  // throws what broke it, if anything did

  // Memory that all ranks of the group can reach, and how to name and find it.
  Block allocate(size_t bytes) const {
    return threads() ? Block::plain(bytes) : Block::shared(bytes);
  }
  // Keep something that the others may still use until they have closed the group.
  void park(std::shared_ptr<void> lent) const { region_->park(std::move(lent)); }
  uint64_t share(const void* data, size_t bytes) const;  // 0 if the others cannot reach it
  std::byte* reach(int rank, uint64_t shared) const {
    return roster_->reach(members_[rank], shared);
  }

  void read(int rank, void* into, uint64_t address, size_t bytes) const {
    roster_->read(members_[rank], into, address, bytes);
  }

  // Say that a rank has closed its end.
  void leave(int rank);
  // "" while the rank takes part, otherwise how it ended.
  std::string obituary(int rank, bool ask_system) const;
  void wake_all() const;  // every waiter looks around

 private:
  struct Header;
  Board(std::shared_ptr<Roster> roster, std::vector<int> members, std::shared_ptr<Region> region);
  static size_t bytes_for(int size);
  Header& header() const { return *reinterpret_cast<Header*>(region_->data()); }

  std::shared_ptr<Roster> roster_;
  std::vector<int> members_;
  std::shared_ptr<Region> region_;
  bool crowded_ = false;
  Seat* seats_ = nullptr;
  std::byte* slots_ = nullptr;
  Parcel* parcels_ = nullptr;
  std::byte* cells_ = nullptr;
};

// "ranks 0-2, 5" of a list of ranks in rising order.
std::string rank_list(std::span<const int> ranks);

// The report of a meeting at which not all postings agree: one line per kind of posting.
std::string mismatch_report(const Board& board, const std::string& group, uint64_t sequence);

uint64_t mix(uint64_t hash, uint64_t value);

}  // namespace phalanx
