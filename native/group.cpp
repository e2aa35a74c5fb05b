#include "group.hpp"

#include <algorithm>
#include <cstring>

#include "report.hpp"

namespace phalanx {
namespace {

// Small enough for two of them to stay in a core's second-level cache; where ranks take turns on a
// core a meeting costs a context switch, so there the pieces are larger.
constexpr size_t kChunk = 256 << 10;
constexpr size_t kCrowdedChunk = 1 << 20;

constexpr int kWoken = 1;  // ranks that the last one to arrive at a crowded meeting wakes

// The larger of what a call gives and what it gets.
uint64_t bytes_of(const Call& call) {
  uint64_t given = 0, taken = 0;
  for (const View& view : call.inputs) given += view.count;
  for (const View& view : call.outputs) taken += view.count;
  return std::max(given, taken) * item_size(call.dtype);
}

}  // namespace

Group::Group(std::shared_ptr<Board> board, int rank, std::string name, double timeout)
    : timeout(timeout),
      board_(std::move(board)),
      rank_(board_->checked(rank)),
      name_(std::move(name)),
      tap_(*board_, rank),
      spin_{!board_->crowded()},
      chunk_(board_->crowded() ? kCrowdedChunk : kChunk),
      combine_{std::vector<const void*>(size()), std::vector<double>(size(), 1.0), 0} {}

Group::~Group() {
  if (stage_) board_->park(std::make_shared<Block>(std::move(stage_)));
}

void Group::run(Call& call) {
  // Who has not heard of a peer's end learns of it in this call, as if it had come just before.
  if (heard_ || board_->decided()) board_->check_usable(call.op, rank_, call.site);
  const auto start = Clock::now();
  size_t item = item_size(call.dtype);

  // Strided tensors are packed into dense ones for the duration of the call.
  std::vector<std::pair<View, std::byte*>> strided_outputs;
  for (View& input : call.inputs) {
    if (!input.layout) continue;
    std::byte* dense = call.need(input.count * item);
    pack(dense, input.data, *input.layout, item);
    for (View& output : call.outputs) {
      if (output.data != input.data || output.layout != input.layout) continue;
      strided_outputs.emplace_back(output, dense);
      output = {dense, output.count, nullptr};
    }
    input = {dense, input.count, nullptr};
  }
  for (View& output : call.outputs) {
    if (!output.layout) continue;
    std::byte* dense = call.need(output.count * item);
    strided_outputs.emplace_back(output, dense);
    output = {dense, output.count, nullptr};
  }

  const double seconds = call.timeout < 0 ? timeout.load() : call.timeout;
  Passage passage{call,
                  seconds,
                  Deadline::after(start, seconds),
                  sequence() + 1,
                  item,
                  {},
                  start,
                  {board_->roster(), board_->world_rank(rank_), call.on_lane}};
  Posting& posting = passage.posting;
  posting.sequence = passage.sequence;
  posting.op = call.op;
  posting.dtype = call.dtype;
  posting.reduce = call.reduce;
  posting.root = call.root < 0 ? -1 : board_->world_rank(call.root);
  posting.factor = call.factor;
  posting.measured = call.squares != nullptr;
  posting.detail = call.detail;
  posting.posted_ns = nanoseconds(start);
  posting.ndim = uint8_t(call.ndim);
  std::copy_n(call.shape, std::size(call.shape), posting.shape);
  posting.more_shape = call.more_shape;
  posting.count = call.count;
  posting.part = call.part;
  posting.parts = call.parts;
  std::memcpy(posting.site, call.site, sizeof posting.site);
  std::memcpy(posting.api, call.api, sizeof posting.api);
  std::memcpy(posting.whole, call.whole, sizeof posting.whole);
  posting.whole_number = call.whole_number;
  if (trace::Tap::is_open())
    passage.event =
        tap_.begin(posting, bytes_of(call), call.issued_ns,
                   uint8_t((call.async ? trace::kAsync : 0) | (call.on_lane ? trace::kOnLane : 0)));

  posted_ = false;
  try {
    if (ahead_) await_readers(passage);
    switch (call.op) {
      case Op::Barrier:
        meet(passage, Offer::Nothing);
        break;
      case Op::AllReduce:
      case Op::Reduce:
      case Op::ReduceScatter:
        reduce(passage);
        break;
      default:
        exchange(passage);
    }
  } catch (const Failure& failure) {
    if (!origin_.is_here()) throw;
    heard_ |= board_->broken().has_value();
    // Others are told the same reason, each for its own call.
    conclude(passage, failure.kind == Kind::Mismatch ? Progress::Mismatch : Progress::Failed);
    if (failure.kind == Kind::Mismatch)
      call.lent = false;  // agreed by all: nobody touches anything
    else if (posted_)
      break_up(failure.kind, failure.what() + ("\n  found by " + headline(passage)), true);
    if (call.lent) board_->park(std::make_shared<decltype(call.scratch)>(std::move(call.scratch)));
    // What is one event for all reads the same on all.
    if (failure.kind == Kind::Mismatch || passage.titled) throw;
    throw Failure(failure.kind, headline(passage) + ": " + failure.what());
  } catch (...) {
    if (!origin_.is_here()) throw;
    conclude(passage, Progress::Interrupted);
    if (posted_)
      break_up(Kind::PeerFailed,
               board_->roster().title(board_->world_rank(rank_)) +
                   " was interrupted in the middle of " + passage.posting.describe() + " at " +
                   call.site,
               false);
    if (call.lent) board_->park(std::make_shared<decltype(call.scratch)>(std::move(call.scratch)));
    throw;
  }
  conclude(passage, Progress::Done);
  for (auto& [output, data] : strided_outputs) unpack(output.data, data, *output.layout, item);
  if (OnShapes tell = on_shapes.load(); tell && passage.tells_shapes)
    tell(board_->world_rank(rank_), call.site, shapes_report(*board_, passage.sequence));
}

void Group::break_up(Kind kind, const std::string& why, bool seen) {
  heard_ = true;
  board_->break_up(kind, why, seen);
}

// After a meeting that was given up this rank may be far ahead of one that slept through it, and
// must not write over what that one has yet to read: wait until all have done with the last
// operation that took place.
void Group::await_readers(Passage& passage) {
  std::vector<int> readers;
  auto read = [&] {
    readers.clear();
    for (int rank = 0; rank < size(); ++rank)
      if (board_->seat(rank).finished.load(std::memory_order_acquire) < met_)
        readers.push_back(rank);
    return readers.empty();
  };
  posted_ = true;  // without its number this rank cannot go on
  // They need but a moment, however short the time of this call: the group is not broken for less.
  constexpr double kMoment = 5;
  const Deadline moment = Deadline::in(kMoment);
  const Deadline& deadline = moment.at() > passage.deadline.at() ? moment : passage.deadline;
  wait_until(board_->bell(), spin_, deadline, read, [&](bool costly) {
    board_->check_broken();
    if (!costly) return;
    if (std::string end = board_->first_obituary(readers, true); !end.empty())
      throw Failure(Kind::PeerFailed, end);
    if (deadline.passed())
      throw Failure(Kind::Timeout,
                    "timed out: still in an earlier operation: " + board_->world_ranks(readers) +
                        describe_absent(*board_, readers));
    check_interrupt();
  });
  posted_ = false;
  ahead_ = false;
}

// Show how the operation ended, unless that has been shown already.
void Group::conclude(Passage& passage, Progress how) {
  // Release: the others may write over what this rank has read.
  board_->seat(rank_).finished.store(clock_, std::memory_order_release);
  if (how == Progress::Done || how == Progress::Mismatch) met_ = clock_;
  if (!records) return;
  const int64_t now = now_ns();
  Posting& shown = board_->posting(rank_, passage.sequence);
  if (sequence() == passage.sequence) {
    if (shown.progress == Progress::Waiting)
      shown.reach(how, now);
    else
      how = shown.progress;
  }
  passage.event.end(how, now, passage.call.awaited_ns ? passage.call.awaited_ns->load() : 0);
}

void Group::meet(Passage& passage, Offer offer) {
  Posting& posting = passage.posting;
  posting.offer = offer;
  if (records || offer > Offer::Inline) posting.show(board_->posting(rank_, passage.sequence));
  sequence_.store(passage.sequence, std::memory_order_relaxed);
  Seat& seat = board_->seat(rank_);
  seat.newest.store(passage.sequence, std::memory_order_release);
  posted_ = true;
  passage.call.lent = offer == Offer::Direct || offer == Offer::Remote;
  Line& line = seat.lines[(clock_ + 1) & 1];
  line.digest = compares ? posting.digest() : 0;
  line.offer = offer;
  // Shapes are compared in what is recorded. Relaxed: nothing else depends on the level.
  line.level = records ? debug_level.load(std::memory_order_relaxed) : DebugLevel::Off;
  passage.meeting = true;
  if (!arrive(true)) throw_given_up(passage);
  await(passage);
  if (board_->is_given_up(clock_)) throw_given_up(passage);
  passage.meeting = false;
  if (!agreed()) throw Failure(Kind::Mismatch, mismatch_report(*board_, passage.sequence));
  passage.tells_shapes = line.level != DebugLevel::Off && is_to_tell() && !same_shapes();
  board_->check_broken();  // somebody may have failed since
}

void Group::tick(Passage& passage) {
  arrive(false);
  await(passage);
}

// False if the others have given up on this meeting.
bool Group::arrive(bool compare) {
  ++clock_;
  // Release: whoever sees the clock also sees the posting, the payload and all passes before it.
  board_->seat(rank_).lines[clock_ & 1].clock.store(uint32_t(clock_), std::memory_order_release);
  if (!board_->crowded()) {
    board_->bell().ring();
    return true;
  }
  auto arrival = board_->count_arrival(clock_);
  if (arrival != Board::Arrival::Last) return arrival == Board::Arrival::Early;
  if (compare)
    board_->mismatch().store(uint32_t(clock_) - same_postings(), std::memory_order_relaxed);
  board_->door().store(uint32_t(clock_), std::memory_order_release);
  board_->bell().ring(kWoken);
  return true;
}

void Group::await(Passage& passage) {
  int next = 0;
  auto everybody = [&] {
    while (next < size() && (next == rank_ || reached(next))) ++next;
    return next == size();
  };
  auto open = [&] { return is_open(); };
  auto on_look = [&](bool costly) { look(passage, costly); };
  if (board_->crowded()) {
    // Woken all at once, ranks would only fight for the few cores (and threads for the
    // interpreter): each that wakes lets the next one in. Sleepers wake in the order in which they
    // lay down, so none is passed over.
    if (wait_until(board_->bell(), spin_, passage.deadline, open, on_look)) board_->bell().ring(1);
  } else {
    wait_until(board_->bell(), spin_, passage.deadline, everybody, on_look);
  }
}

bool Group::same_postings() const {
  uint64_t mine = board_->seat(rank_).lines[clock_ & 1].digest;
  bool strict = true;
  for (int rank = 0; rank < size(); ++rank) {
    const Line& line = board_->seat(rank).lines[clock_ & 1];
    if (line.digest != mine) return false;
    strict &= line.level == DebugLevel::Detail;
  }
  // Only if all ask for it: all must come to one verdict, and none be refused for another's wish.
  return !strict || same_shapes();
}

bool Group::same_shapes() const {
  const Posting& mine = board_->posting(rank_, sequence());
  for (int rank = 0; rank < size(); ++rank)
    if (!board_->posting(rank, sequence()).is_shaped_like(mine)) return false;
  return true;
}

// Whether this is the first of the ranks that want to be told.
bool Group::is_to_tell() const {
  for (int rank = 0; rank < rank_; ++rank)
    if (board_->seat(rank).lines[clock_ & 1].level != DebugLevel::Off) return false;
  return true;
}

bool Group::is_open() const {
  // Acquire: what all have written before they reached it can be read.
  return int32_t(board_->door().load(std::memory_order_acquire) - uint32_t(clock_)) >= 0;
}

bool Group::agreed() const {
  if (board_->crowded())
    return board_->mismatch().load(std::memory_order_relaxed) != uint32_t(clock_);
  return same_postings();
}

std::string Group::headline(const Passage& passage) const {
  return passage.posting.title() + board_->caption(rank_, passage.call.site);
}

void Group::look(Passage& passage, bool costly) {
  auto broken = board_->broken();
  if (passage.meeting) {
    check_deadlock(passage, passage.waiter.verdict());
    if (!broken && board_->is_given_up(clock_)) {
      check_deadlock(passage, passage.waiter.verdict());  // perhaps over one, told meanwhile
      throw_given_up(passage);
    }
  }
  if (auto decided = board_->decided()) throw *decided;  // whoever said so may be gone
  if (!costly && !broken) return;
  WaitFacts facts = wait_facts(passage.call.op, name_, passage.posting.describe(),
                               passage.call.site, nanoseconds(passage.start));
  std::vector<int> missing, gone;
  for (int rank = 0; rank < size(); ++rank)
    if (rank != rank_ && !reached(rank)) missing.push_back(rank);
  for (int rank : missing)
    // Looked at again: it may have arrived here as its last deed.
    if (!board_->obituary(rank, true).empty() && !reached(rank)) gone.push_back(rank);
  // All have arrived and yet the door is shut: the last one may have ended on its threshold.
  if (missing.empty()) {
    if (!board_->crowded()) return;  // all have come since the wait was looked at
    for (int rank = 0; rank < size(); ++rank)
      if (!board_->obituary(rank, true).empty()) gone.push_back(rank);
    if (is_open()) return;  // and was, perhaps, before they ended
  }
  if (!gone.empty()) {
    // Again: a peer that fails over a deadlock does so when all have a verdict.
    if (passage.meeting) check_deadlock(passage, passage.waiter.verdict());
    throw Failure(Kind::PeerFailed, board_->first_obituary(gone, true) + uneven(passage, gone));
  }
  if (broken) throw *broken;  // told by another, as this rank does not see it from here
  try {
    judge(passage, missing, facts);
    check_interrupt();
  } catch (const Failure&) {
    throw;
  } catch (...) {  // a signal handler's
    if (passage.meeting && origin_.is_here()) give_up(passage, Progress::Interrupted);
    throw;
  }
}

// Whether the wait has any hope.
void Group::judge(Passage& passage, std::span<const int> missing, WaitFacts& facts) {
  for (int rank : missing) facts.needs.add(board_->world_rank(rank));
  // A step of a larger operation is told how much time is left of that: it is not the user's wish.
  const bool has_own_timeout = passage.call.timeout >= 0 && !passage.call.whole[0];
  facts.blocked = passage.meeting && !missing.empty() && !ends_by_itself(timeout, has_own_timeout);
  auto verdict = passage.waiter.update(facts);
  if (passage.meeting) check_deadlock(passage, verdict);
  if (!passage.deadline.passed()) return;
  if (passage.meeting && !give_up(passage, Progress::TimedOut)) return;  // all have come after all
  std::vector<int> arrived;
  for (int rank = 0; rank < size(); ++rank)
    if (std::find(missing.begin(), missing.end(), rank) == missing.end()) arrived.push_back(rank);
  throw Failure(Kind::Timeout, "reached its timeout of " + seconds_text(passage.seconds) +
                                   "\n  arrived: " + board_->world_ranks(arrived) +
                                   "; not arrived: " + board_->world_ranks(missing) +
                                   describe_absent(*board_, missing) + "\nfind out what keeps " +
                                   board_->world_ranks(missing) +
                                   ", or give more time: init_process_group(timeout=...), "
                                   "new_group(timeout=...)");
}

// A word on ranks that left the group after fewer collectives than this one, unless some were
// killed.
std::string Group::uneven(const Passage& passage, std::span<const int> gone) const {
  std::string word;
  for (int rank : gone) {
    const uint64_t made = board_->seat(rank).newest;
    const auto presence = board_->roster().member(board_->world_rank(rank)).presence.load();
    const bool left = board_->seat(rank).left || presence == Presence::Left;
    if (!left && presence == Presence::Here) return "";
    if (left && word.empty() && made < passage.sequence)
      word = "\nrank " + std::to_string(board_->world_rank(rank)) + " left after " +
             std::to_string(made) + " collectives on this group and this is number " +
             std::to_string(passage.sequence) + ": look for uneven numbers of batches or steps";
  }
  return word;
}

void Group::check_deadlock(Passage& passage, const std::optional<std::string>& verdict) {
  if (!verdict) return;
  if (!give_up(passage, Progress::Deadlock)) return passage.waiter.drop_verdict();
  passage.titled = true;
  throw Failure(Kind::Deadlock, *verdict);
}

bool Group::give_up(Passage& passage, Progress how) {
  Posting& posting = board_->posting(rank_, passage.sequence);
  if (!board_->give_up(rank_, clock_, posting, how)) return false;
  posted_ = false;
  ahead_ = true;
  passage.call.lent = false;  // nobody will touch anything
  return true;
}

void Group::throw_given_up(Passage& passage) {
  posted_ = false;
  ahead_ = true;
  passage.call.lent = false;
  std::string who;
  std::string given_up = passage.posting.title();
  Progress how = Progress::TimedOut;
  for (int rank = 0; rank < size(); ++rank) {
    const Posting posting = Posting::glance(board_->posting(rank, passage.sequence));
    const bool gave_up = posting.progress == Progress::TimedOut ||
                         posting.progress == Progress::Deadlock ||
                         posting.progress == Progress::Interrupted;
    if (rank == rank_ || posting.sequence != passage.sequence || !gave_up) continue;
    given_up = posting.title();
    how = posting.progress;
    who += "\n  rank " + std::to_string(board_->world_rank(rank)) + " " + describe_posting(posting);
  }
  board_->posting(rank_, passage.sequence).reach(how, now_ns());
  const Kind kind = how == Progress::TimedOut   ? Kind::Timeout
                    : how == Progress::Deadlock ? Kind::Deadlock
                                                : Kind::PeerFailed;
  std::vector<int> missing;
  bool whole = true;
  for (int rank = 0; rank < size(); ++rank) {
    if (!reached(rank)) missing.push_back(rank);
    whole &= board_->obituary(rank, false).empty();
  }
  std::string absent = missing.empty() ? ""
                                       : "\n  not arrived: " + board_->world_ranks(missing) +
                                             describe_absent(*board_, missing);
  passage.titled = true;
  throw Failure(kind, given_up + " on " + board_->title() + " was given up; rank " +
                          std::to_string(board_->world_rank(rank_)) + " is in " +
                          passage.posting.describe() + " at " + passage.call.site + who + absent +
                          (whole ? "\nthe group can still be used" : ""));
}

std::byte* Group::inline_area(int rank, uint64_t clock, uint64_t sequence, size_t bytes) const {
  return bytes <= kLinePayload ? board_->seat(rank).lines[clock & 1].payload
                               : board_->slot(rank, sequence);
}

uint64_t Group::need_stage() {
  if (!stage_) stage_ = board_->allocate(kTurns * chunk_);
  return board_->share(stage_.data(), stage_.size());
}

std::byte* Group::stage(const Passage& passage, int rank, uint64_t turn) const {
  return board_->reach(rank, board_->posting(rank, passage.sequence).stage, kTurns * chunk_) +
         place(turn);
}

}  // namespace phalanx
