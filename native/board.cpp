#include "board.hpp"

#include <sched.h>

#include <algorithm>
#include <cstring>

#include "deadlock.hpp"
#include "report.hpp"

namespace phalanx {
namespace {

// The word by which crowded ranks count: the clock of the meeting in its upper half, in the lower
// one how many have come, or that it was given up.
constexpr uint32_t kGivenUp = UINT32_MAX;
uint64_t tally(uint64_t clock, uint32_t count) { return clock << 32 | count; }
uint32_t count_in(uint64_t word) { return uint32_t(word); }
// How far the word's meeting is ahead of this one.
int32_t ahead(uint64_t word, uint64_t clock) {
  return int32_t(uint32_t(word >> 32) - uint32_t(clock));
}

void check_members(const Roster& roster, const std::vector<int>& members) {
  if (members.empty()) throw Failure(Kind::Invalid, "a group has at least one rank");
  std::vector<bool> seen(size_t(roster.size()));
  for (int rank : members) {
    if (seen[size_t(roster.checked(rank))])
      throw Failure(Kind::Invalid, "a group has rank " + std::to_string(rank) + " twice");
    seen[size_t(rank)] = true;
  }
}

}  // namespace

Board::Board(std::shared_ptr<Roster> roster, std::vector<int> members,
             std::shared_ptr<Region> region)
    : roster_(std::move(roster)), members_(std::move(members)), region_(std::move(region)) {
  BoardLayout layout(members_.size());
  std::byte* base = region_->data();
  seats_ = reinterpret_cast<Seat*>(base + layout.seats);
  slots_ = base + layout.slots;
  parcels_ = reinterpret_cast<Parcel*>(base + layout.parcels);
  cells_ = base + layout.cells;
  crowded_ = header().crowded != 0;
}

std::shared_ptr<Board> Board::create(std::shared_ptr<Roster> roster, std::vector<int> members,
                                     const std::string& name, const std::string& site) {
  check_members(*roster, members);
  BoardLayout layout(members.size());
  auto region = Region::create(layout.end, roster->threads(), Content::Board);
  auto& header = *reinterpret_cast<BoardHeader*>(region->data());
  header.roster = roster->id();
  header.size = uint32_t(members.size());
  header.crowded = int(members.size()) > roster->cores(members);
  name.copy(header.name, sizeof header.name - 1);
  site.copy(header.site, sizeof header.site - 1);
  auto* shown = reinterpret_cast<int32_t*>(region->data() + layout.members);
  std::copy(members.begin(), members.end(), shown);
  return std::shared_ptr<Board>(new Board(std::move(roster), std::move(members), std::move(region)),
                                DeleteHere());
}

std::shared_ptr<Board> Board::open(std::shared_ptr<Roster> roster, std::vector<int> members,
                                   const std::string& ticket, int rank, const std::string& site) {
  check_members(*roster, members);
  auto region = Region::open(ticket, Content::Board);
  auto& header = *reinterpret_cast<BoardHeader*>(region->data());
  if (region->bytes() < sizeof header || header.size < 1 ||
      header.size > uint32_t(roster->size()) || region->bytes() < BoardLayout(header.size).end)
    throw Failure(Kind::Backend, "the ticket '" + ticket + "' stands for something damaged");
  auto* shown = reinterpret_cast<int32_t*>(region->data() + BoardLayout(header.size).members);
  std::vector<int> theirs(shown, shown + header.size);
  check_members(*roster, theirs);
  std::shared_ptr<Board> board(new Board(std::move(roster), theirs, std::move(region)),
                               DeleteHere());
  if (theirs == members) return board;
  std::string text =
      "the making of group '" + board->name() + "' does not match across ranks\n  rank " +
      std::to_string(theirs[0]) + " makes it of " + rank_list(theirs) + "  " + header.site +
      "\n  rank " + std::to_string(members.at(size_t(rank))) + " makes it of " +
      rank_list(members) + "  " + site +
      "\nsome ranks have skipped a call: every rank of the world must call new_group "
      "in one order, also for groups that it is not in (or only the members, with "
      "use_local_synchronization=True)";
  board->break_up(Kind::Mismatch, text);
  throw Failure(Kind::Mismatch, text);
}

int Board::checked(int rank) const {
  if (rank < 0 || rank >= size())
    throw Failure(Kind::Invalid, "rank " + std::to_string(rank) + " is not in " + title() + " of " +
                                     std::to_string(size()));
  return rank;
}

std::string Board::title() const {
  std::string text = "group '" + name() + "'";
  return size() == roster_->size() ? text : text + " (" + rank_list(members_) + ")";
}

std::string Board::caption(int rank, const std::string& site) const {
  return " on " + title() + ", rank " + std::to_string(world_rank(rank)) + ", at " + site;
}

std::string Board::world_ranks(std::span<const int> ranks) const {
  std::vector<int> translated;
  for (int rank : ranks) translated.push_back(members_[rank]);
  std::sort(translated.begin(), translated.end());
  return rank_list(translated);
}

void Board::attend(int rank, bool creator, const std::string& site, double timeout) {
  const Deadline deadline = Deadline::in(timeout);
  check_broken();  // the creator has given up
  seat(rank).present = true;
  bell().ring();
  if (!creator) return;
  auto missing = [&] {
    std::vector<int> ranks;
    for (int peer = 0; peer < size(); ++peer)
      if (!seat(peer).present) ranks.push_back(peer);
    return ranks;
  };
  const std::string what = "the making of " + title();
  const int64_t started = now_ns();
  Waiter waiter(*roster_, world_rank(rank));
  Spin spin(false);
  auto look = [&](bool costly) {
    check_broken();
    WaitFacts facts = wait_facts(Op::Barrier, name(), what, site.c_str(), started);
    facts.making = true;
    std::vector<int> absent = missing();
    std::string end = first_obituary(absent, costly);
    // After who has ended: a peer that fails over a deadlock does so when all have a verdict.
    auto deadlock = waiter.verdict();
    if (!deadlock && !end.empty() && missing() == absent)
      throw Failure(Kind::PeerFailed, what + " at " + site + ": " + end);
    if (!costly && !deadlock) return;
    for (int peer : absent) facts.needs.add(world_rank(peer));
    facts.blocked = !absent.empty() && !ends_by_itself(timeout, false);
    if (!deadlock) deadlock = waiter.update(facts);
    if (deadlock) throw Failure(Kind::Deadlock, *deadlock);
    if (deadline.passed())
      throw Failure(Kind::Timeout, what + " at " + site + ": timed out after " +
                                       seconds_text(timeout) + "; not called by " +
                                       world_ranks(absent) + describe_absent(*this, absent));
    check_interrupt();
  };
  try {
    wait_until(bell(), spin, deadline, [&] { return missing().empty(); }, look);
  } catch (const Failure& failure) {
    if (!origin_.is_here()) throw;
    break_up(failure.kind, failure.what());  // who comes later learns of it
    throw;
  } catch (...) {
    if (!origin_.is_here()) throw;
    break_up(Kind::PeerFailed, what + " at " + site + " was interrupted");
    throw;
  }
}

Cell* Board::cells(int from, int to) const {
  return reinterpret_cast<Cell*>(cells_) + (size_t(to) * size() + from) * kCells;
}

Bell& Board::bell() const { return header().bell; }
std::atomic<uint32_t>& Board::mismatch() const { return header().mismatch; }
std::atomic<uint32_t>& Board::door() const { return header().door; }

Board::Arrival Board::count_arrival(uint64_t clock) const {
  uint64_t word = header().arrived.load(std::memory_order_relaxed), next;
  do {
    if (ahead(word, clock) > 0 || (ahead(word, clock) == 0 && count_in(word) == kGivenUp)) {
      mark_given_up(clock);  // in place of who gave it up, and may not have come to say so yet
      return Arrival::TooLate;
    }
    next = ahead(word, clock) == 0 ? word + 1 : tally(clock, 1);
    // Acquire and release: the last one to count has seen all that the others wrote before.
  } while (!header().arrived.compare_exchange_weak(word, next, std::memory_order_acq_rel,
                                                   std::memory_order_relaxed));
  return count_in(next) == uint32_t(size()) ? Arrival::Last : Arrival::Early;
}

bool Board::give_up(int rank, uint64_t clock, Posting& posting, Progress how) const {
  if (crowded_) {
    posting.reach(how, now_ns());  // before anybody can ask why
    uint64_t word = header().arrived.load();
    while (ahead(word, clock) == 0 && count_in(word) < uint32_t(size()))
      if (header().arrived.compare_exchange_weak(word, tally(clock, kGivenUp))) break;
    bool complete = ahead(word, clock) == 0 ? count_in(word) == uint32_t(size())
                                            : int32_t(door().load() - uint32_t(clock)) >= 0;
    if (complete) {
      posting.reach(Progress::Waiting, 0);
      return false;
    }
    publish_given_up(clock, posting, how);  // also for one that may have died before it did
    return true;
  }
  // One at a time, or one that is giving up would count as absent for another.
  for (uint32_t holder = 0; !header().doubt.compare_exchange_weak(holder, uint32_t(rank + 1));) {
    if (std::string end = holder ? obituary(int(holder) - 1, true) : ""; !end.empty())
      throw Failure(Kind::PeerFailed, end);
    holder = 0;
    ::sched_yield();
  }
  // Pairs with the fence in is_given_up: if a rank is seen absent here, whoever sees it arrive
  // later also sees the doubt, or what came of it.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  bool already = in_row_given_up(clock), incomplete = false;
  for (int peer = 0; peer < size(); ++peer) incomplete |= !reached(peer, clock);
  if (!already && incomplete) publish_given_up(clock, posting, how);
  header().doubt.store(0, std::memory_order_release);
  return already || incomplete;
}

void Board::publish_given_up(uint64_t clock, Posting& posting, Progress how) const {
  posting.reach(how, now_ns());
  mark_given_up(clock);
}

// Called by a rank that has not come past this meeting: so no later one has taken place, and those
// that others may have given up meanwhile belong to one row with this one. At crowded boards
// several ranks may do so at once, for meetings that follow each other.
void Board::mark_given_up(uint64_t clock) const {
  auto &first = header().given_up_first, &last = header().given_up_last;
  uint64_t newest = last.load();
  // Meetings that are given up before all have come to the first of them form a row.
  if (newest + 1 < clock) first.store(clock);
  uint64_t oldest = first.load();
  while (oldest > clock && !first.compare_exchange_weak(oldest, clock)) continue;
  while (newest < clock && !last.compare_exchange_weak(newest, clock)) continue;
  if (newest < clock || oldest > clock) wake_all();
}

bool Board::is_given_up(uint64_t clock) const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  while (uint32_t holder = header().doubt.load(std::memory_order_acquire)) {
    check_broken();
    if (std::string end = obituary(int(holder) - 1, true); !end.empty())
      throw Failure(Kind::PeerFailed, end);
    ::sched_yield();
  }
  return in_row_given_up(clock);
}

bool Board::in_row_given_up(uint64_t clock) const {
  // The last first: whoever sees a row's end sees its beginning.
  return header().given_up_last.load(std::memory_order_acquire) >= clock &&
         header().given_up_first.load(std::memory_order_acquire) <= clock;
}

std::vector<int> Board::ranks_behind(int rank) const {
  std::vector<int> behind;
  for (int peer = 0; peer < size(); ++peer)
    if (seat(peer).newest.load() < seat(rank).newest.load()) behind.push_back(peer);
  return behind;
}

void Board::break_up(Kind kind, const std::string& why, bool seen) {
  uint32_t whole = 0;
  if (!header().broken.compare_exchange_strong(whole, 1)) return;
  header().kind = uint32_t(kind);
  header().seen = seen;
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
  seat(rank).left_ns = now_ns();
  seat(rank).left = true;
  wake_all();
}

std::optional<Failure> Board::broken() const {
  if (header().broken.load(std::memory_order_acquire) != 2) return {};
  return Failure(Kind(header().kind), std::string(header().why, header().why_length));
}

std::optional<Failure> Board::decided() const {
  auto failure = broken();
  if (failure && failure->kind == Kind::PeerFailed && header().seen) return {};
  return failure;
}

void Board::check_broken() const {
  if (auto failure = broken()) throw *failure;
}

// That time ran out concerns the collectives: messages are each for itself.
std::optional<Failure> Board::broken_for(Op op) const {
  auto failure = broken();
  if (failure && failure->kind == Kind::Timeout && is_message(op)) return {};
  return failure;
}

void Board::check_usable(Op op, int rank, const std::string& site) const {
  if (auto failure = broken_for(op))
    throw Failure(
        failure->kind,
        phalanx::name(op) + caption(rank, site) +
            ": the group cannot be used any more since an earlier failure; make a new "
            "one of the ranks that are left (new_group, shrink_group). The failure was:\n" +
            failure->what());
}

uint64_t Board::share(const void* data, size_t bytes) const {
  if (threads()) return reinterpret_cast<uint64_t>(data);
  auto heap = Heap::mine();
  return heap->contains(data, bytes) ? heap->offset(data) : 0;
}

std::optional<Posting> Board::last_posting(int rank) const {
  const Seat& seat = this->seat(rank);
  std::optional<Posting> last;
  if (uint64_t newest = seat.newest.load(std::memory_order_acquire))
    last = Posting::glance(seat.history[newest % kHistory]);
  if (uint64_t newest = seat.newest_message.load(std::memory_order_acquire)) {
    Posting message = Posting::glance(seat.messages[newest % kHistory]);
    if (!last || message.posted_ns > last->posted_ns) last = message;
  }
  return last;
}

std::string Board::obituary(int rank, bool ask_system) const {
  // Its own word first: the system only knows that it is gone.
  std::string end = roster_->obituary(members_[rank], false);
  if (end.empty() && roster_->is_ending(members_[rank])) return "";
  if (end.empty() && seat(rank).left.load(std::memory_order_acquire))
    end = roster_->title(members_[rank]) +
          " has left this group (destroy_process_group, or the end of its program) and will not "
          "come";
  if (end.empty() && ask_system) end = roster_->obituary(members_[rank], true);
  if (end.empty()) return end;
  auto last = last_posting(rank);
  std::string note = "\n  " + (last ? "its last operation on this group: " + describe_posting(*last)
                                    : "it had made no operation on this group");
  // Before the traceback, if it left one.
  return end.insert(std::min(end.find('\n'), end.size()), note);
}

std::string Board::first_obituary(std::span<const int> ranks, bool ask_system) const {
  // When it was the last time to be counted on; 0 for those who could not say goodbye.
  auto when = [&](int rank) {
    const int64_t left = seat(rank).left ? seat(rank).left_ns.load() : 0;
    const int64_t ended = roster_->ended_ns(members_[rank]);
    return left && (!ended || left < ended) ? left : ended;
  };
  int first = -1;
  std::string text;
  for (int rank : ranks) {
    std::string end = obituary(rank, ask_system);
    if (end.empty() || (first >= 0 && when(rank) >= when(first))) continue;
    first = rank;
    text = end;
  }
  if (first < 0) return text;
  // Something did end, so the system may be asked about the others: only it knows of a SIGKILL.
  auto died = [&](int rank) {
    auto presence = roster_->member(members_[rank]).presence.load();
    return presence == Presence::Failed || (presence == Presence::Here && !seat(rank).left &&
                                            !roster_->obituary(members_[rank], true).empty());
  };
  if (died(first)) return text;
  for (int rank = 0; rank < size(); ++rank)
    if (when(rank) < when(first) && died(rank))
      return text + "\nprobably because " + obituary(rank, true);
  return text;
}

}  // namespace phalanx
