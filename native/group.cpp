#include "group.hpp"

#include <algorithm>
#include <cstring>

namespace phalanx {
namespace {

// Small enough for two of them to stay in a core's second-level cache; where ranks take turns on a
// core a meeting costs a context switch, so there the pieces are larger.
constexpr size_t kChunk = 256 << 10;
constexpr size_t kCrowdedChunk = 1 << 20;

constexpr int kWoken = 1;  // ranks that the last one to arrive at a crowded meeting wakes

int64_t nanoseconds(Clock::time_point at) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(at.time_since_epoch()).count();
}

}  // namespace

Group::Group(std::shared_ptr<Board> board, int rank, std::string name, double timeout)
    : timeout(timeout),
      board_(std::move(board)),
      rank_(rank),
      name_(std::move(name)),
      spin_{!board_->crowded()},
      chunk_(board_->crowded() ? kCrowdedChunk : kChunk),
      combine_{std::vector<const void*>(size()), std::vector<double>(size(), 1.0)} {}

Group::~Group() {
  if (stage_) board_->park(std::make_shared<Block>(std::move(stage_)));
}

void Group::run(Call& call) {
  board_->check_broken();
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

  Passage passage{call,
                  Deadline::after(start, call.timeout < 0 ? timeout : call.timeout),
                  sequence() + 1,
                  item,
                  {}};
  Posting& posting = passage.posting;
  posting.sequence = passage.sequence;
  posting.op = call.op;
  posting.dtype = call.dtype;
  posting.reduce = call.reduce;
  posting.root = call.root;
  posting.factor = call.factor;
  posting.detail = call.detail;
  posting.posted_ns = nanoseconds(start);
  posting.ndim = uint8_t(call.ndim);
  std::copy_n(call.shape, std::size(call.shape), posting.shape);
  std::memcpy(posting.site, call.site, sizeof posting.site);

  posted_ = false;
  try {
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
    if (failure.kind == Kind::Mismatch)
      call.lent = false;  // agreed by all: nobody touches anything
    else if (posted_)
      board_->break_up(failure.kind, failure.what());
    if (call.lent) board_->park(std::make_shared<decltype(call.scratch)>(std::move(call.scratch)));
    throw;
  } catch (...) {
    if (posted_)
      board_->break_up(Kind::PeerFailed,
                       headline(passage) + ": interrupted on rank " + std::to_string(rank_));
    if (call.lent) board_->park(std::make_shared<decltype(call.scratch)>(std::move(call.scratch)));
    throw;
  }
  Posting& shown = board_->posting(rank_, passage.sequence);
  shown.finished_ns = nanoseconds(Clock::now());
  shown.done = true;
  for (auto& [output, data] : strided_outputs) unpack(output.data, data, *output.layout, item);
}

void Group::meet(Passage& passage, Offer offer) {
  Posting& posting = passage.posting;
  posting.offer = offer;
  board_->posting(rank_, passage.sequence) = posting;
  sequence_.store(passage.sequence, std::memory_order_relaxed);
  posted_ = true;
  passage.call.lent = offer == Offer::Direct || offer == Offer::Remote;
  Line& line = board_->seat(rank_).lines[(clock_ + 1) & 1];
  line.digest = posting.digest();
  line.offer = offer;
  arrive(true);
  await(passage);
  board_->check_broken();  // the others may have given up before this rank came
  if (!agreed()) throw Failure(Kind::Mismatch, mismatch_report(*board_, name_, passage.sequence));
}

void Group::tick(const Passage& passage) {
  arrive(false);
  await(passage);
}

void Group::arrive(bool compare) {
  ++clock_;
  // Release: whoever sees the clock also sees the posting, the payload and all passes before it.
  board_->seat(rank_).lines[clock_ & 1].clock.store(clock_, std::memory_order_release);
  if (!board_->crowded()) {
    board_->bell().ring();
    return;
  }
  // Acquire and release: the last one to count has seen all lines, and shows them through the door.
  if (board_->arrived(clock_).fetch_add(1, std::memory_order_acq_rel) + 1 != uint32_t(size()))
    return;
  board_->arrived(clock_).store(0, std::memory_order_relaxed);
  if (compare)
    board_->mismatch().store(same_digests() ? clock_ - 1 : clock_, std::memory_order_relaxed);
  board_->door().store(clock_, std::memory_order_release);
  board_->bell().ring(kWoken);
}

bool Group::reached(int rank) const {
  return int32_t(board_->seat(rank).lines[clock_ & 1].clock.load(std::memory_order_acquire) -
                 clock_) >= 0;
}

void Group::await(const Passage& passage) {
  int next = 0;
  auto everybody = [&] {
    while (next < size() && (next == rank_ || reached(next))) ++next;
    return next == size();
  };
  auto door = [&] { return int32_t(board_->door().load(std::memory_order_acquire) - clock_) >= 0; };
  auto on_look = [&](bool costly) { look(passage, costly); };
  if (board_->crowded()) {
    // Woken all at once, ranks would only fight for the few cores (and threads for the
    // interpreter): each that wakes lets the next one in. Sleepers wake in the order in which they
    // lay down, so none is passed over.
    if (wait_until(board_->bell(), spin_, passage.deadline, door, on_look)) board_->bell().ring(1);
  } else {
    wait_until(board_->bell(), spin_, passage.deadline, everybody, on_look);
  }
}

bool Group::same_digests() const {
  uint64_t mine = board_->seat(rank_).lines[clock_ & 1].digest;
  for (int rank = 0; rank < size(); ++rank)
    if (board_->seat(rank).lines[clock_ & 1].digest != mine) return false;
  return true;
}

bool Group::agreed() const {
  if (board_->crowded()) return board_->mismatch().load(std::memory_order_relaxed) != clock_;
  return same_digests();
}

std::string Group::headline(const Passage& passage) const {
  return std::string(phalanx::name(passage.call.op)) + " #" + std::to_string(passage.sequence) +
         " on group '" + name_ + "'";
}

void Group::look(const Passage& passage, bool costly) {
  board_->check_broken();
  if (!costly) return;
  std::vector<int> missing;
  for (int rank = 0; rank < size(); ++rank) {
    if (rank == rank_ || reached(rank)) continue;
    std::string end = board_->obituary(rank, true);
    // Looked at again: it may have arrived here as its last deed.
    if (!end.empty() && !reached(rank))
      throw Failure(Kind::PeerFailed, headline(passage) + ": " + end);
    missing.push_back(rank);
  }
  // All have arrived and yet the door is shut: the last one ended on its threshold.
  if (missing.empty())
    for (int rank = 0; rank < size(); ++rank)
      if (std::string end = board_->obituary(rank, true); !end.empty())
        throw Failure(Kind::PeerFailed, headline(passage) + ": " + end);
  if (passage.deadline.passed()) {
    double seconds = passage.call.timeout < 0 ? timeout : passage.call.timeout;
    std::string text = headline(passage) + ": rank " + std::to_string(rank_) +
                       " reached its timeout of " + seconds_text(seconds) + " at " +
                       passage.call.site + "; not arrived: " + rank_list(missing);
    for (int rank : missing) {
      const Posting& last = board_->posting(rank, passage.sequence - 1);
      text += "\n  rank " + std::to_string(rank);
      if (last.sequence == passage.sequence - 1 && last.sequence > 0)
        text += " last did " + last.describe() + " #" + std::to_string(last.sequence) + "  " +
                last.site;
      else
        text += " has not come this far";
    }
    throw Failure(Kind::Timeout, text);
  }
  check_interrupt();
}

std::byte* Group::inline_area(int rank, uint32_t clock, uint64_t sequence, size_t bytes) const {
  return bytes <= kLinePayload ? board_->seat(rank).lines[clock & 1].payload
                               : board_->slot(rank, sequence);
}

uint64_t Group::need_stage() {
  if (!stage_) stage_ = board_->allocate(kTurns * chunk_);
  return board_->share(stage_.data(), stage_.size());
}

std::byte* Group::stage(const Passage& passage, int rank, uint64_t turn) const {
  return board_->reach(rank, board_->posting(rank, passage.sequence).stage) + place(turn);
}

}  // namespace phalanx
