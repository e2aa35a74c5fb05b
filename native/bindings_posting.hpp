// Postings as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

#include <string_view>

#include "kernels.hpp"
#include "layout.hpp"

namespace phalanx {

// Text may have been cut in the middle of a character.
inline nanobind::object as_str(std::string_view text) {
  return nanobind::steal(PyUnicode_DecodeUTF8(text.data(), Py_ssize_t(text.size()), "replace"));
}

// Of the tensor that the operation was called with.
inline uint64_t byte_count(const Posting& posting) {
  return posting.op == Op::Barrier ? 0 : posting.count * item_size(posting.dtype);
}

inline nanobind::dict as_dict(const Posting& posting) {
  namespace nb = nanobind;
  const bool message = is_message(posting.op);
  auto known = [](int32_t rank) {
    return rank < 0 ? nb::object(nb::none()) : nb::object(nb::int_(rank));
  };
  nb::list shape;
  for (int i = 0; i < posting.ndim; ++i) shape.append(posting.shape[i]);
  nb::dict entry;
  entry["kind"] = message ? "message" : "collective";
  entry["sequence"] = posting.number();
  entry["op"] = name(posting.op);
  entry["api"] = as_str(posting.api);
  entry["dtype"] = posting.op == Op::Barrier ? "" : name(posting.dtype);
  entry["shape"] = shape;
  entry["reduce"] =
      is_reduction(posting.op) ? nb::object(nb::str(name(posting.reduce))) : nb::object(nb::none());
  entry["root"] = message ? nb::object(nb::none()) : known(posting.root);
  entry["peer"] = message ? known(posting.root) : nb::object(nb::none());
  entry["tag"] = message ? nb::object(nb::int_(posting.tag)) : nb::object(nb::none());
  entry["bytes"] = byte_count(posting);
  entry["site"] = as_str(posting.site);
  entry["state"] = name(posting.progress);
  entry["posted_ns"] = posting.posted_ns;
  entry["finished_ns"] = posting.finished_ns;
  return entry;
}

inline nanobind::list as_list(const Seat& seat) {
  nanobind::list entries;
  for (const Posting& posting : history_of(seat)) entries.append(as_dict(posting));
  return entries;
}

}  // namespace phalanx
