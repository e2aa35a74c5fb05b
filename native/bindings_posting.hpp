// Postings as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <vector>

#include "kernels.hpp"
#include "layout.hpp"

namespace phalanx {

inline nanobind::dict as_dict(const Posting& posting) {
  namespace nb = nanobind;
  const bool message = posting.op == Op::Send || posting.op == Op::Recv;
  const bool reduces =
      posting.op == Op::AllReduce || posting.op == Op::Reduce || posting.op == Op::ReduceScatter;
  auto known = [](int32_t rank) {
    return rank < 0 ? nb::object(nb::none()) : nb::object(nb::int_(rank));
  };
  nb::list shape;
  uint64_t elements = 1;
  for (int i = 0; i < posting.ndim; ++i) {
    shape.append(posting.shape[i]);
    elements *= uint64_t(posting.shape[i]);
  }
  const bool barrier = posting.op == Op::Barrier;
  nb::dict entry;
  entry["kind"] = message ? "message" : "collective";
  entry["sequence"] = posting.sequence;
  entry["op"] = name(posting.op);
  entry["api"] = posting.api;
  entry["dtype"] = barrier ? "" : name(posting.dtype);
  entry["shape"] = shape;
  entry["reduce"] = reduces ? nb::object(nb::str(name(posting.reduce))) : nb::object(nb::none());
  entry["root"] = message ? nb::object(nb::none()) : known(posting.root);
  entry["peer"] = message ? known(posting.root) : nb::object(nb::none());
  entry["tag"] = message ? nb::object(nb::int_(posting.tag)) : nb::object(nb::none());
  entry["bytes"] = barrier ? 0 : elements * item_size(posting.dtype);
  entry["site"] = posting.site;
  entry["state"] = name(posting.stage_reached);
  entry["posted_ns"] = posting.posted_ns;
  entry["finished_ns"] = posting.finished_ns;
  return entry;
}

// What a seat remembers, oldest first. Another rank's seat may be written meanwhile, so each
// posting is copied, and left out if it is not what its place says.
inline std::vector<Posting> history_of(const Seat& seat) {
  std::vector<Posting> found;
  auto collect = [&](const Posting* ring, uint64_t newest) {
    for (uint64_t number = newest > kHistory ? newest - kHistory + 1 : 1; number <= newest;
         ++number)
      if (Posting copy = Posting::glance(ring[number % kHistory]); copy.sequence == number)
        found.push_back(copy);
  };
  collect(seat.history, seat.newest.load(std::memory_order_acquire));
  collect(seat.messages, seat.newest_message.load(std::memory_order_acquire));
  std::stable_sort(found.begin(), found.end(),
                   [](const Posting& a, const Posting& b) { return a.posted_ns < b.posted_ns; });
  return found;
}

inline nanobind::list as_list(const Seat& seat) {
  nanobind::list entries;
  for (const Posting& posting : history_of(seat)) entries.append(as_dict(posting));
  return entries;
}

}  // namespace phalanx
