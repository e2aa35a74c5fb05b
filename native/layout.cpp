#include "layout.hpp"

#include <algorithm>

#include "kernels.hpp"

namespace phalanx {

uint64_t mix(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15ull + (hash << 6) + (hash >> 2);
  hash *= 0xff51afd7ed558ccdull;
  return hash ^ (hash >> 32);
}

namespace {

template <size_t size>
void terminate(char (&text)[size]) {
  text[size - 1] = 0;
}

}  // namespace

bool make_sound(Posting& posting) {
  terminate(posting.site);
  terminate(posting.api);
  terminate(posting.whole);
  return posting.op <= Op::Recv && posting.dtype < DType::Count && posting.reduce < Reduce::Count &&
         posting.ndim <= std::size(posting.shape) && posting.progress <= Progress::Failed;
}

bool make_sound(WaitFacts& facts) {
  for (bool* flag : {&facts.blocked, &facts.lane, &facts.own, &facts.making, &facts.any})
    *flag = is_set(*flag);
  terminate(facts.group);
  terminate(facts.what);
  terminate(facts.site);
  return facts.op <= Op::Recv;
}

const char* name(Op op) {
  static constexpr const char* names[] = {"barrier",    "broadcast", "all_reduce", "reduce",
                                          "all_gather", "gather",    "scatter",    "reduce_scatter",
                                          "all_to_all", "send",      "recv"};
  return names[static_cast<size_t>(op)];
}

const char* name(Progress how) {
  static constexpr const char* names[] = {"waiting",  "done",        "timed out", "mismatch",
                                          "deadlock", "interrupted", "failed"};
  return names[static_cast<size_t>(how)];
}

uint64_t Posting::digest() const {
  uint64_t hash = uint64_t(op) | uint64_t(dtype) << 8 | uint64_t(reduce) << 16 |
                  uint64_t(measured) << 24 | uint64_t(uint32_t(root)) << 32;
  hash = mix(sequence, hash);
  if (parts) hash = mix(hash, uint64_t(part) << 16 | parts);
  if (!may_differ_in_size(op)) hash = mix(hash, count);
  return mix(hash, detail);
}

bool Posting::is_shaped_like(const Posting& other) const {
  // A step of a larger operation is about that one's tensors, which its words show.
  if (whole[0] || other.whole[0]) return std::strncmp(whole, other.whole, sizeof whole) == 0;
  return may_differ_in_size(op) || (ndim == other.ndim && more_shape == other.more_shape &&
                                    std::equal(shape, shape + ndim, other.shape));
}

std::string Posting::kind() const {
  const std::string_view text(whole);
  return std::string(text.empty() ? name(op) : text.substr(0, text.find('(')));
}

std::string Posting::title() const { return kind() + " #" + std::to_string(number()); }

std::string Posting::describe() const {
  if (whole[0]) return whole;
  std::string text = std::string(name(op)) + "(";
  if (op != Op::Barrier) {
    text += std::string(phalanx::name(dtype)) + "[";
    for (int i = 0; i < ndim; ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
    text += more_shape ? ", ...] of " + std::to_string(count) + " elements" : "]";
  }
  const bool message = is_message(op);
  if (is_reduction(op)) text += std::string(", ") + phalanx::name(reduce);
  if (measured) text += ", squares";
  if (root >= 0 && !message)
    text += (op == Op::Broadcast || op == Op::Scatter ? ", src=" : ", dst=") + std::to_string(root);
  if (message) text += ", tag=" + std::to_string(tag);
  text += ")";
  if (message)
    text += (op == Op::Send ? " to " : " from ") +
            (root < 0 ? "any rank" : "rank " + std::to_string(root));
  if (parts) text += " [" + std::to_string(part) + " of " + std::to_string(parts) + "]";
  if (api[0] && std::strcmp(api, name(op)) != 0) text += std::string(" for ") + api;
  return text;
}

std::vector<Posting> history_of(const Seat& seat) {
  std::vector<Posting> found;
  auto collect = [&](const Posting* ring, uint64_t newest) {
    for (uint64_t back = std::min<uint64_t>(newest, kHistory); back-- > 0;) {
      Posting copy = Posting::glance(ring[(newest - back) % kHistory]);
      if (copy.sequence == newest - back) found.push_back(copy);
    }
  };
  collect(seat.history, seat.newest.load(std::memory_order_acquire));
  collect(seat.messages, seat.newest_message.load(std::memory_order_acquire));
  std::stable_sort(found.begin(), found.end(),
                   [](const Posting& a, const Posting& b) { return a.posted_ns < b.posted_ns; });
  return found;
}

}  // namespace phalanx
