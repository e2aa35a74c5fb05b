// Python's view of copies of many tensors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <string>

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

}  // namespace

void bind_copies(nb::module_& m) {
  m.def("copy_all", &copy_tensors, nb::arg("dsts"), nb::arg("srcs"), nb::arg("measure"),
        "Copy each source to its destination, and return the sums of squares if asked to.");
  m.def("instructions", &instructions,
        "Name the vector instructions that reductions use on this machine.");
}
