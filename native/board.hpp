// The board of a group: one seat per rank, where a rank says what it is about to do before it does
// it. Everything else, from synchronisation to diagnosis, is reading what the others have posted.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "failure.hpp"
#include "layout.hpp"
#include "roster.hpp"

namespace phalanx {

class Board {
 public:
  // `members` are world ranks; one rank creates and the others open.
  static std::shared_ptr<Board> create(std::shared_ptr<Roster> roster, std::vector<int> members,
                                       const std::string& name, const std::string& site);
  static std::shared_ptr<Board> open(std::shared_ptr<Roster> roster, std::vector<int> members,
                                     const std::string& ticket, int rank, const std::string& site);

  // Say that a rank has opened the board. The creator returns when all have, so that the board they
  // are told of exists.
  void attend(int rank, bool creator, const std::string& site, double timeout);

  const std::string& ticket() const { return region_->ticket(); }
  uint64_t id() const { return region_->id(); }  // the same on all ranks, and no other's
  std::string name() const { return header().name; }
  // " on group 'world', rank 2, at train.py:88 in step", for what is told to a rank of its call
  std::string caption(int rank, const std::string& site) const;
  std::string title() const;  // "group '1' (ranks 1-3)", with ranks of the world
  int size() const { return int(members_.size()); }
  bool threads() const { return roster_->threads(); }
  bool crowded() const { return crowded_; }  // more ranks than cores: never spin
  int world_rank(int rank) const { return members_[rank]; }
  // The rank of the group, which came from Python. Throws unless it is one.
  int checked(int rank) const;
  std::string world_ranks(std::span<const int> ranks) const;  // "ranks 1-3"
  Roster& roster() const { return *roster_; }

  Seat& seat(int rank) const { return seats_[rank]; }
  // A rank's last operation of this group, collective or message.
  std::optional<Posting> last_posting(int rank) const;
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
  enum class Arrival { Early, Last, TooLate };
  Arrival count_arrival(uint64_t clock) const;
  std::atomic<uint32_t>& mismatch() const;  // clock of the last meeting that did not agree
  std::atomic<uint32_t>& door() const;      // clock of the last meeting that all have reached

  // Whether a rank has come to a meeting or tick.
  bool reached(int rank, uint64_t clock) const {
    auto& line = seats_[rank].lines[clock & 1];
    return int32_t(line.clock.load(std::memory_order_acquire) - uint32_t(clock)) >= 0;
  }

  // Give up a meeting that not all have reached: then all raise, whenever they come to it, and the
  // group goes on. `how`, shown in the posting, says why. False if all have arrived after all.
  bool give_up(int rank, uint64_t clock, Posting& posting, Progress how) const;
  // Asked by a rank that has seen all the others arrive, or not yet. Clocks have 64 bits here, so
  // that none comes twice.
  bool is_given_up(uint64_t clock) const;
  // Those that have made fewer collectives than this one.
  std::vector<int> ranks_behind(int rank) const;

  // Make the group unusable: every wait on it, now or later, raises this. The first caller's word
  // counts.
  void break_up(Kind kind, const std::string& why, bool seen = false);
  std::optional<Failure> broken() const;
  std::optional<Failure> broken_for(Op op) const;  // if that keeps such an operation from ending
  std::optional<Failure> decided() const;          // if no end of a rank shows it
  void check_broken() const;                       // throws what broke it, if anything did
  // The same, for calls that come later.
  void check_usable(Op op, int rank, const std::string& site) const;

  // Memory that all ranks of the group can reach, and how to name and find it.
  Block allocate(size_t bytes) const {
    return threads() ? Block::plain(bytes) : Block::shared(bytes);
  }
  // Keep something that the others may still use until they have closed the group.
  void park(std::shared_ptr<void> lent) const { region_->park(std::move(lent)); }
  uint64_t share(const void* data, size_t bytes) const;  // 0 if the others cannot reach it
  std::byte* reach(int rank, uint64_t shared, uint64_t bytes) const {
    return roster_->reach(members_[rank], shared, bytes);
  }

  void read(int rank, void* into, uint64_t address, size_t bytes) const {
    roster_->read(members_[rank], into, address, bytes);
  }

  // Say that a rank has closed its end.
  void leave(int rank);
  // "" while the rank takes part, otherwise how it ended and what it did last.
  std::string obituary(int rank, bool ask_system) const;
  // The obituary of the first of these to have ended; and if it only left, of one that died, which
  // may be why.
  std::string first_obituary(std::span<const int> ranks, bool ask_system) const;
  void wake_all() const;  // every waiter looks around

 private:
  Board(std::shared_ptr<Roster> roster, std::vector<int> members, std::shared_ptr<Region> region);
  BoardHeader& header() const { return *reinterpret_cast<BoardHeader*>(region_->data()); }
  bool in_row_given_up(uint64_t clock) const;
  void publish_given_up(uint64_t clock, Posting& posting, Progress how) const;
  void mark_given_up(uint64_t clock) const;

  std::shared_ptr<Roster> roster_;
  std::vector<int> members_;
  const Origin origin_;
  std::shared_ptr<Region> region_;
  bool crowded_ = false;
  Seat* seats_ = nullptr;
  std::byte* slots_ = nullptr;
  Parcel* parcels_ = nullptr;
  std::byte* cells_ = nullptr;
};

}  // namespace phalanx
