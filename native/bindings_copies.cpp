// Python's view of copies of many tensors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <utility>

#include "bindings_tensor.hpp"
#include "bindings_unlocked.hpp"
#include "copies.hpp"
#include "kernels.hpp"

namespace nb = nanobind;
using namespace phalanx;

namespace {

std::string describe(const Look& look) {
  std::string text = std::string(name(look.dtype)) + "[";
  for (int i = 0; i < look.shown.ndim; ++i)
    text += (i ? ", " : "") + std::to_string(look.shown.shape[i]);
  return text + "]";
}

bool same_shape(const Look& a, const Look& b) {
  return a.shown.ndim == b.shown.ndim &&
         std::equal(a.shown.shape, a.shown.shape + a.shown.ndim, b.shown.shape);
}

// Whether two tensors of one shape, neither of them row-major, fill their memory without gaps and
// in the same order: their bytes can be copied as they lie.
bool same_filled_layout(const Look& a, const Look& b) {
  if (a.shown.ndim > Layout::max_ndim) return false;
  std::pair<int64_t, int64_t> dims[Layout::max_ndim];  // stride and size
  int ndim = 0;
  for (int i = 0; i < a.shown.ndim; ++i) {
    if (a.shown.shape[i] == 1) continue;
    if (a.shown.strides[i] != b.shown.strides[i]) return false;
    dims[ndim++] = {a.shown.strides[i], a.shown.shape[i]};
  }
  std::sort(dims, dims + ndim);
  int64_t next = 1;
  for (int i = 0; i < ndim; next *= dims[i++].second)
    if (dims[i].first != next) return false;
  return true;
}

std::string position(size_t i) { return "copy_all, position " + std::to_string(i) + ": "; }

Transfer transfer(size_t i, nb::handle dst, nb::handle src, bool measure) {
  const Look to(dst), from(src);
  if (const char* fault = to.fault ? to.fault : from.fault)
    throw Failure(Kind::Invalid, position(i) + fault);
  if (to.dtype != from.dtype || !same_shape(to, from))
    throw Failure(Kind::Invalid, position(i) + describe(from) + " cannot be copied to " +
                                     describe(to) + ": dtype and shape must be the same");
  if (measure && !measurable(to.dtype))
    throw Failure(Kind::Invalid,
                  position(i) + "a sum of squares is not defined for " + name(to.dtype));
  if (to.dense || from.dense || !same_filled_layout(to, from))
    return {to.dtype, to.view(), from.view()};
  auto memory = [](const Look& look) {
    return View{static_cast<std::byte*>(look.shown.data) + look.shown.byte_offset, look.count, {}};
  };
  return {to.dtype, memory(to), memory(from)};
}

std::vector<double> copy_tensors(nb::handle dsts, nb::handle srcs, bool measure) {
  // Held as they are now: another thread may change the lists meanwhile.
  auto held = [](nb::handle tensors) {
    PyObject* tuple = PySequence_Tuple(tensors.ptr());
    if (!tuple) throw nb::python_error();
    return nb::steal<nb::tuple>(tuple);
  };
  const nb::tuple to = held(dsts), from = held(srcs);
  const size_t count = to.size();
  if (from.size() != count)
    throw Failure(Kind::Invalid, "copy_all: " + std::to_string(count) + " destinations and " +
                                     std::to_string(from.size()) + " sources do not make pairs");
  std::vector<Transfer> transfers;
  transfers.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const auto at = Py_ssize_t(i);
    transfers.push_back(
        transfer(i, PyTuple_GET_ITEM(to.ptr(), at), PyTuple_GET_ITEM(from.ptr(), at), measure));
  }
  std::vector<double> squares(measure ? count : 0);
  {
    Unlocked unlock;
    copy_all(transfers, measure ? squares.data() : nullptr);
  }
  return squares;
}

// The memory between the first and the last element of a tensor of one call of a batch.
struct Extent {
  const std::byte *begin = nullptr, *end = nullptr;
  size_t call = 0;
};

Extent extent_of(const Look& look, size_t call) {
  const size_t item = item_size(look.dtype);
  auto* data = static_cast<const std::byte*>(look.shown.data) + look.shown.byte_offset;
  if (look.dense) return {data, data + look.count * item, call};
  int64_t below = 0, above = 0;  // in elements
  for (int i = 0; i < look.shown.ndim; ++i) {
    const int64_t reach = (look.shown.shape[i] - 1) * look.shown.strides[i];
    (reach < 0 ? below : above) += reach;
  }
  return {data + below * int64_t(item), data + (above + 1) * int64_t(item), call};
}

void add_extents(std::vector<Extent>& extents, nb::handle given, size_t call) {
  if (PyList_Check(given.ptr()) || PyTuple_Check(given.ptr())) {
    for (nb::handle each : given) add_extents(extents, each, call);
  } else if (PyObject_TypeCheck(given.ptr(), torch().tensor)) {
    // What cannot be exchanged as it is, such as tensors on other devices, is not looked into.
    if (Look look(given); !look.fault && look.count) extents.push_back(extent_of(look, call));
  }
}

// Which calls of a batch, as (name, arguments), have a tensor whose extent overlaps one of another
// call. The extents are swept in the order of their beginnings. Of those that have begun it is
// enough to know the two of different calls that reach furthest: whatever else a later extent
// meets overlaps one of these two as well, and so has been noted before.
std::vector<size_t> overlapping_calls(nb::sequence calls) {
  std::vector<Extent> extents;
  const size_t count = nb::len(calls);
  extents.reserve(2 * count);
  for (size_t call = 0; call < count; ++call) {
    nb::object args = nb::borrow<nb::sequence>(calls[call])[1];
    add_extents(extents, args, call);
  }
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  std::vector<bool> noted(count);
  Extent furthest, second;  // of different calls
  for (const Extent& extent : extents) {
    for (const Extent& other : {furthest, second}) {
      if (other.end <= extent.begin || other.call == extent.call) continue;
      noted[other.call] = noted[extent.call] = true;
    }
    if (extent.call == furthest.call) {
      if (extent.end > furthest.end) furthest = extent;
    } else if (extent.end > furthest.end) {
      second = std::exchange(furthest, extent);
    } else if (extent.end > second.end) {
      second = extent;
    }
  }
  std::vector<size_t> result;
  for (size_t call = 0; call < count; ++call)
    if (noted[call]) result.push_back(call);
  return result;
}

}  // namespace

void bind_copies(nb::module_& m) {
  m.def("copy_all", &copy_tensors, nb::arg("dsts"), nb::arg("srcs"), nb::arg("measure"),
        "Copy each source to its destination, and return the sums of squares if asked to.");
  m.def("overlapping_calls", &overlapping_calls, nb::arg("calls"),
        "Return which calls of a batch have a tensor that shares memory with one of another call.");
  m.def("instructions", &instructions,
        "Name the vector instructions that reductions use on this machine.");
}
