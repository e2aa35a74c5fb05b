// Operations that move data unchanged: broadcast, all_gather, gather, scatter, all_to_all. They are
// one algorithm: every rank offers what it has for the others, and each takes what is for it.
#include <algorithm>
#include <cstring>

#include "group.hpp"
#include "report.hpp"

namespace phalanx {
// How to offer memory that the others cannot map. Reading it through the system takes one copy; a
// stage takes two, but by two ranks at the same time, which wins for long one-way traffic if each
// rank has a core.
Offer Group::private_offer(Op op, uint64_t bytes) const {
  constexpr uint64_t kOneWay = 1 << 20, kBothWays = 16 << 20;
  bool both_ways = op == Op::AllGather || op == Op::AllToAll;
  if (!board_->roster().can_read()) return Offer::Staged;
  if (board_->crowded()) return Offer::Remote;
  return bytes <= (both_ways ? kBothWays : kOneWay) ? Offer::Remote : Offer::Staged;
}

void Group::exchange(Passage& passage) {
  Call& call = passage.call;
  const size_t item = passage.item;
  const int p = size();
  // An indexed operation has a part of its own for each other rank; else there is one part for all.
  const bool indexed = call.op == Op::Scatter || call.op == Op::AllToAll;
  auto give = [&](int to) -> const View* {
    switch (call.op) {
      case Op::Broadcast:
        return rank_ == call.root && to != rank_ ? &call.inputs[0] : nullptr;
      case Op::Gather:
        return to == call.root ? &call.inputs[0] : nullptr;
      case Op::Scatter:
        return rank_ == call.root ? &call.inputs[to] : nullptr;
      case Op::AllToAll:
        return &call.inputs[to];
      default:
        return &call.inputs[0];
    }
  };
  auto take = [&](int from) -> const View* {
    switch (call.op) {
      case Op::Broadcast:
        return from == call.root && from != rank_ ? &call.outputs[0] : nullptr;
      case Op::Gather:
        return rank_ == call.root ? &call.outputs[from] : nullptr;
      case Op::Scatter:
        return from == call.root ? &call.outputs[0] : nullptr;
      default:
        return &call.outputs[from];
    }
  };

  // Parts that this rank would overwrite while the others still read them are copied aside.
  for (View& input : call.inputs) {
    bool hit = false;
    for (int from = 0; from < p && !hit; ++from) {
      const View* output = take(from);
      // Its own part may stay where it is: nobody else reads it there.
      bool same = output && from == rank_ && &input == give(rank_) && output->data == input.data;
      hit = output && !same && overlap(input, *output, item);
    }
    if (!hit) continue;
    std::byte* aside = call.need(input.count * item);
    std::memcpy(aside, input.data, input.count * item);
    input.data = aside;
  }

  // The parts in the order in which they are offered. Starting with the next rank lets every rank
  // be served at the same time.
  struct Part {
    const View* view;
    int to;
    uint64_t start;
  };
  std::vector<Part> parts;
  uint64_t bytes = 0;
  for (int step = 1; step < p; ++step) {
    int to = (rank_ + step) % p;
    const View* view = give(to);
    const View* taken = call.op == Op::AllToAll ? take(to) : nullptr;
    if (indexed)
      board_->parcel(rank_, to, passage.sequence) = {bytes, view ? view->count * item : 0,
                                                     taken ? taken->count * item : 0};
    if (!view || view->count == 0) continue;
    parts.push_back({view, to, bytes});
    bytes += view->count * item;
    if (!indexed) break;
  }
  if (call.op == Op::AllGather)
    for (int from = 0; from < p; ++from) {
      passage.posting.detail = mix(passage.posting.detail, call.outputs[from].count);
      board_->parcel(rank_, from, passage.sequence).taken = call.outputs[from].count * item;
    }

  Offer offer = Offer::Nothing;
  if (bytes > 0 && bytes <= kSlot) {
    offer = Offer::Inline;
    std::byte* area = inline_area(rank_, clock_ + 1, passage.sequence, bytes);
    for (Part& part : parts)
      std::memcpy(area + part.start, part.view->data, part.view->count * item);
  } else if (bytes > 0) {
    offer = Offer::Direct;
    for (Part& part : parts)
      if (!board_->share(part.view->data, part.view->count * item))
        offer = private_offer(call.op, bytes);
  }

  auto fill = [&](uint64_t step) {
    uint64_t begin = step * chunk_, end = std::min<uint64_t>(begin + chunk_, bytes);
    for (Part& part : parts) {
      uint64_t from = std::max(begin, part.start),
               to = std::min<uint64_t>(end, part.start + part.view->count * item);
      if (from < to)
        std::memcpy(stage_.data() + place(turn_ + step) + (from - begin),
                    part.view->data + (from - part.start), to - from);
    }
  };
  if (offer == Offer::Direct || offer == Offer::Remote) {
    auto address = [&](const View& view) {
      return offer == Offer::Direct ? board_->share(view.data, 0)
                                    : reinterpret_cast<uint64_t>(view.data);
    };
    passage.posting.data = address(*parts[0].view);
    if (indexed)
      for (Part& part : parts)
        board_->parcel(rank_, part.to, passage.sequence).data = address(*part.view);
  } else if (offer == Offer::Staged) {
    passage.posting.stage = need_stage();
    fill(0);
  }
  passage.posting.bytes = bytes;
  meet(passage, offer);

  if (call.op == Op::AllToAll)
    for (int from = 0; from < p; ++from)
      for (int to = 0; to < p; ++to) {
        if (from == to) continue;
        uint64_t given = board_->parcel(from, to, passage.sequence).given;
        uint64_t taken = board_->parcel(to, from, passage.sequence).taken;
        if (given != taken)
          throw Failure(Kind::Mismatch, mismatch_report(*board_, passage.sequence));
      }

  uint64_t steps = 0;
  bool in_place = false;  // something is read where it is
  struct Source {
    int rank;
    uint64_t start;  // of this rank's part in what the source offers
    const View* view;
  };
  std::vector<Source> staged;
  for (int step = 1; step < p; ++step) {
    int from = (rank_ + p - step) % p;
    Offer theirs = offer_of(from);
    if (theirs == Offer::Nothing) continue;
    const Posting& posting = board_->posting(from, passage.sequence);
    if (theirs == Offer::Direct || theirs == Offer::Remote) in_place = true;
    if (theirs == Offer::Staged) steps = std::max(steps, (posting.bytes + chunk_ - 1) / chunk_);
    const View* view = take(from);
    if (!view || view->count == 0) continue;
    uint64_t length = view->count * item;
    uint64_t start = indexed ? board_->parcel(from, rank_, passage.sequence).data : 0;
    if (theirs == Offer::Inline) {
      uint64_t offered = indexed ? posting.bytes : length;
      std::memcpy(view->data, inline_area(from, clock_, passage.sequence, offered) + start, length);
    } else if (theirs == Offer::Direct) {
      phalanx::copy(view->data, board_->reach(from, indexed ? start : posting.data, length),
                    length);
    } else if (theirs == Offer::Remote) {
      board_->read(from, view->data, indexed ? start : posting.data, length);
    } else {
      staged.push_back({from, start, view});
    }
  }
  if (offer == Offer::Direct || offer == Offer::Remote) in_place = true;
  if (offer == Offer::Staged) steps = std::max(steps, (bytes + chunk_ - 1) / chunk_);

  // While the others take one piece, the next is filled.
  for (uint64_t step = 1; step <= steps; ++step) {
    if (offer == Offer::Staged && step * chunk_ < bytes) fill(step);
    uint64_t begin = (step - 1) * chunk_;
    for (Source& source : staged) {
      uint64_t length = source.view->count * item;
      uint64_t from = std::max(begin, source.start),
               to = std::min(begin + chunk_, source.start + length);
      if (from >= to) continue;
      std::byte* piece = stage(passage, source.rank, turn_ + step - 1);
      std::memcpy(source.view->data + (from - source.start), piece + (from - begin), to - from);
    }
    if (step < steps) tick(passage);
  }
  turn_ += steps;
  if (const View *to = take(rank_), *from = give(rank_); to && from && to->data != from->data)
    phalanx::copy(to->data, from->data, to->count * item);
  if (in_place) tick(passage);  // what the others read must not change before they are done
}

}  // namespace phalanx
