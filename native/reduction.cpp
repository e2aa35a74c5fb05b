// Operations that combine data: all_reduce, reduce, reduce_scatter. The vector is cut into one
// piece per rank; each rank combines its piece from all ranks, always in rank order, so that
// results are the same bits on every rank, in every run, and whichever of the three ways below is
// taken.
#include <algorithm>
#include <cstring>

#include "group.hpp"

namespace phalanx {
namespace {

// Up to here every rank combines the whole vector by itself, which saves a tick. That is worth more
// where a tick costs a context switch, and less where there is nothing to copy.
size_t inline_limit(const Board& board) {
  constexpr size_t kThreads = 2 << 10, kProcesses = 8 << 10, kCrowdedTotal = 128 << 10;
  if (board.crowded()) return std::min(kSlot, kCrowdedTotal / board.size());
  return board.threads() ? kThreads : kProcesses;
}

// Results that are combined and then measured while they are in the cache.
constexpr size_t kMeasured = 16 << 10;

}  // namespace

void Combine::into(const Call& call, std::span<void* const> dsts, size_t count) {
  const Reduction reduction{call.dtype, call.reduce, factors.data()};
  if (!call.squares) return phalanx::reduce(reduction, dsts, sources, count);
  const size_t item = item_size(call.dtype), block = kMeasured / item;
  std::vector<void*> places(dsts.begin(), dsts.end());
  for (size_t begin = 0; begin < count; begin += block) {
    const size_t size = std::min(block, count - begin);
    phalanx::reduce(reduction, places, sources, size);
    squares += sum_of_squares(call.dtype, places[0], size);
    for (void*& place : places) place = static_cast<std::byte*>(place) + size * item;
    for (const void*& source : sources)
      source = static_cast<const std::byte*>(source) + size * item;
  }
}

// The part of the vector that a rank combines, as this rank holds it.
View Group::piece(const Call& call, size_t item, int rank) const {
  if (call.op == Op::ReduceScatter) return call.inputs[rank];
  const View& whole = call.inputs[0];
  size_t unit = std::max<size_t>(64 / item, 1);
  size_t share = ((whole.count + size() - 1) / size() + unit - 1) / unit * unit;
  size_t begin = std::min(whole.count, share * rank), end = std::min(whole.count, begin + share);
  return {whole.data + begin * item, end - begin, nullptr};
}

void Group::reduce(Passage& passage) {
  Call& call = passage.call;
  const int p = size();
  const size_t item = passage.item;
  const bool scatters = call.op == Op::ReduceScatter;
  if (!reducible(call.dtype, call.reduce))
    throw Failure(Kind::Invalid, std::string(phalanx::name(call.op)) + ": " +
                                     phalanx::name(call.reduce) + " is not defined for " +
                                     phalanx::name(call.dtype));
  combine_.squares = 0;
  size_t bytes = 0;
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    const View& input = call.inputs[i];
    bytes += input.count * item;
    if (!scatters) continue;
    passage.posting.detail = mix(passage.posting.detail, input.count);
    board_->parcel(rank_, int(i), passage.sequence).given = input.count * item;
  }
  passage.posting.bytes = bytes;
  if (p == 1) {
    meet(passage, Offer::Nothing);
    combine_.sources[0] = call.inputs[0].data;
    void* result = call.outputs[0].data;
    combine_.factors[0] = call.factor;
    combine_.into(call, {&result, 1}, call.outputs[0].count);
    if (call.squares) *call.squares = combine_.squares;
    return;
  }
  if (bytes <= inline_limit(*board_)) {
    reduce_inline(passage, bytes);
    if (call.squares) *call.squares = combine_.squares;  // each rank has combined the whole
    return;
  }

  // An output that lies across inputs which the others have yet to read is written at the end.
  std::byte* aside = nullptr;
  View result = scatters ? call.outputs[0] : View{};
  for (int rank = 0; scatters && !aside && rank < p; ++rank) {
    const View& input = call.inputs[rank];
    bool in_place = rank == rank_ && input.data == result.data;
    if (!in_place && overlap(input, result, item)) aside = call.need(result.count * item);
  }
  if (aside) call.outputs[0].data = aside;

  bool direct = true;
  for (int rank = 0; rank < int(call.inputs.size()); ++rank) {
    const View& input = call.inputs[rank];
    uint64_t shared = board_->share(input.data, input.count * item);
    if (!shared && input.count) direct = false;
    if (scatters)
      board_->parcel(rank_, rank, passage.sequence).data = shared;
    else
      passage.posting.data = shared;
  }
  // Threads reach everything. Processes keep a stage ready even for a Direct offer, for the case
  // that another rank's tensor is an ordinary one.
  if (!board_->threads()) passage.posting.stage = need_stage();
  // The first pieces are filled before the meeting, which then is their tick as well; that needs
  // nothing from the others and writes nothing of the user's.
  if (!direct) fill(passage, 0);
  meet(passage, direct ? Offer::Direct : Offer::Staged);
  int direct_ranks = 0;
  for (int rank = 0; rank < p; ++rank) direct_ranks += offer_of(rank) == Offer::Direct;
  if (direct_ranks == p)
    reduce_direct(passage);
  else
    reduce_staged(passage, direct_ranks == 0);
  if (aside) std::memcpy(result.data, aside, result.count * item);
}

// Every rank's whole vector is in its seat: one meeting and it is done.
void Group::reduce_inline(Passage& passage, size_t bytes) {
  Call& call = passage.call;
  std::byte* area = inline_area(rank_, clock_ + 1, passage.sequence, bytes);
  size_t start = 0, filled = 0;
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    if (i == size_t(rank_)) start = filled;
    size_t length = call.inputs[i].count * passage.item;
    if (length) std::memcpy(area + filled, call.inputs[i].data, length);
    filled += length;
  }
  if (call.op != Op::ReduceScatter) start = 0;
  meet(passage, Offer::Inline);
  if (call.outputs.empty() || call.outputs[0].count == 0) return;
  for (int rank = 0; rank < size(); ++rank) {
    combine_.sources[rank] = inline_area(rank, clock_, passage.sequence, bytes) + start;
    if (call.reduce == Reduce::PremulSum)
      combine_.factors[rank] = board_->posting(rank, passage.sequence).factor;
  }
  void* result = call.outputs[0].data;
  combine_.into(call, {&result, 1}, call.outputs[0].count);
}

// Every rank reads the others' vectors where they are and writes results where they belong.
void Group::reduce_direct(Passage& passage) {
  Call& call = passage.call;
  View mine = piece(call, passage.item, rank_);
  size_t begin = call.op == Op::ReduceScatter ? 0 : mine.data - call.inputs[0].data;
  const size_t bytes = mine.count * passage.item;
  std::vector<void*> results;
  for (int rank = 0; rank < size(); ++rank) {
    const Posting& posting = board_->posting(rank, passage.sequence);
    combine_.factors[rank] = posting.factor;
    if (call.op == Op::ReduceScatter) {
      combine_.sources[rank] =
          board_->reach(rank, board_->parcel(rank, rank_, passage.sequence).data, bytes);
    } else {
      std::byte* data = board_->reach(rank, posting.data, begin + bytes) + begin;
      combine_.sources[rank] = data;
      if (call.op == Op::AllReduce || rank == call.root) results.push_back(data);
    }
  }
  if (call.op == Op::ReduceScatter) results.push_back(call.outputs[0].data);
  if (mine.count) combine_.into(call, results, mine.count);
  show_squares(passage);
  tick(passage);
  add_squares(passage);
}

// Leave what this rank has measured where the others read it after the next tick.
void Group::show_squares(const Passage& passage) {
  if (!passage.call.squares) return;
  std::atomic_ref(board_->posting(rank_, passage.sequence).squares)
      .store(combine_.squares, std::memory_order_relaxed);
}

// In rank order, so that the sum has the same bits everywhere.
void Group::add_squares(const Passage& passage) {
  if (!passage.call.squares) return;
  double sum = 0;
  for (int rank = 0; rank < size(); ++rank)
    sum += std::atomic_ref(board_->posting(rank, passage.sequence).squares)
               .load(std::memory_order_relaxed);
  *passage.call.squares = sum;
}

// How many elements of each piece pass through a stage at a time.
size_t Group::stride(const Passage& passage) const {
  size_t unit = std::max<size_t>(64 / passage.item, 1);
  return std::max<size_t>(chunk_ / size() / passage.item / unit, 1) * unit;
}

// Copy the step'th part of every other rank's piece into this rank's stage.
void Group::fill(const Passage& passage, uint32_t step) {
  size_t elements = stride(passage);
  std::byte* at = stage_.data() + place(turn_ + step);
  for (int rank = 0; rank < size(); ++rank, at += elements * passage.item) {
    View other = piece(passage.call, passage.item, rank);
    size_t begin = step * elements;
    if (rank == rank_ || begin >= other.count) continue;
    std::memcpy(at, other.data + begin * passage.item,
                std::min(elements, other.count - begin) * passage.item);
  }
}

// A pipeline with one tick per step: while the parts of one step are filled, those of the step
// before are combined, and results of the one before that are copied out. A result is written over
// one of its sources, in the stage of the next rank: those cache lines have just been fetched,
// while a buffer for results would have to be fetched from the core that read it last.
void Group::reduce_staged(Passage& passage, bool filled) {
  Call& call = passage.call;
  const int p = size();
  const size_t item = passage.item, elements = stride(passage);
  const bool scatters = call.op == Op::ReduceScatter;
  const bool wants_all = call.op == Op::AllReduce || rank_ == call.root;

  size_t longest = 0;
  for (int rank = 0; rank < p; ++rank) longest = std::max(longest, piece(call, item, rank).count);
  const uint32_t steps = uint32_t((longest + elements - 1) / elements);
  const uint32_t last = scatters ? steps : steps + 1;
  View mine = piece(call, item, rank_);
  std::byte* result = scatters    ? call.outputs[0].data
                      : wants_all ? call.outputs[0].data + (mine.data - call.inputs[0].data)
                                  : nullptr;
  std::vector<std::byte*> stages(p);
  for (int rank = 0; rank < p; ++rank) {
    combine_.factors[rank] = board_->posting(rank, passage.sequence).factor;
    stages[rank] =
        board_->reach(rank, board_->posting(rank, passage.sequence).stage, kTurns * chunk_);
  }

  for (uint32_t step = filled ? 1 : 0; step <= last; ++step) {
    if (step < steps) fill(passage, step);
    if (size_t begin = (step - 1) * elements; step >= 1 && step <= steps && begin < mine.count) {
      size_t part = place(turn_ + step - 1) + size_t(rank_) * elements * item;
      size_t count = std::min(elements, mine.count - begin);
      for (int rank = 0; rank < p; ++rank)
        combine_.sources[rank] = rank == rank_ ? mine.data + begin * item : stages[rank] + part;
      void* dsts[2];
      size_t wanted = 0;
      if (result) dsts[wanted++] = result + begin * item;
      if (!scatters && !(call.op == Op::Reduce && rank_ == call.root))
        dsts[wanted++] = stages[(rank_ + 1) % p] + part;
      combine_.into(call, {dsts, wanted}, count);
    }
    if (step == steps) show_squares(passage);
    if (step >= 2 && !scatters && wants_all) {
      size_t begin = (step - 2) * elements;
      for (int turn = 1; turn < p; ++turn) {
        int rank = (rank_ + turn) % p;
        View other = piece(call, item, rank);
        if (begin >= other.count) continue;
        std::byte* target =
            call.outputs[0].data + (other.data - call.inputs[0].data) + begin * item;
        size_t part = place(turn_ + step - 2) + size_t(rank) * elements * item;
        std::memcpy(target, stages[(rank + 1) % p] + part,
                    std::min(elements, other.count - begin) * item);
      }
    }
    if (step < last) tick(passage);
  }
  turn_ += steps;
  add_squares(passage);
}

}  // namespace phalanx
