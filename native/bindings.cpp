// The Python module of the core. Nothing below this file knows Python.
#include <nanobind/nanobind.h>

#include <exception>
#include <string_view>

#include "failure.hpp"

namespace nb = nanobind;

void bind_copies(nb::module_& m);
void bind_engine(nb::module_& m);
void bind_outside(nb::module_& m);
void bind_stores(nb::module_& m);
void bind_trace(nb::module_& m);
void bind_waiting(nb::module_& m);

namespace {

using phalanx::Failure;
using phalanx::Kind;

// The class in phalanx.errors, or among Python's own, that a kind of failure becomes.
nb::object exception_class(Kind kind) {
  auto error = [](const char* name) { return nb::module_::import_("phalanx.errors").attr(name); };
  switch (kind) {
    case Kind::Invalid:
      return nb::borrow(PyExc_ValueError);
    case Kind::Memory:
      return nb::borrow(PyExc_MemoryError);
    case Kind::Backend:
      return error("DistBackendError");
    case Kind::Mismatch:
      return error("CollectiveMismatch");
    case Kind::PeerFailed:
      return error("PeerFailed");
    case Kind::Deadlock:
      return error("Deadlock");
    case Kind::Timeout:
      return error("DistTimeout");
    case Kind::Network:
      return error("DistNetworkError");
    case Kind::Store:
      return error("DistStoreError");
    case Kind::StoreTimeout:
      return error("StoreTimeout");
    case Kind::QueueEmpty:
      return error("DistQueueEmptyError");
  }
  return nb::borrow(PyExc_RuntimeError);
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Failure& failure) {
    // Looked up when needed, so that the core can be loaded before the package.
    // A message may quote text that was cut in the middle of a character.
    std::string_view what = failure.what();
    nb::object text =
        nb::steal(PyUnicode_DecodeUTF8(what.data(), Py_ssize_t(what.size()), "replace"));
    // Made here and now: making it is what tells the debugger of the failure.
    nb::object type = exception_class(failure.kind);
    nb::object error = nb::steal(PyObject_CallOneArg(type.ptr(), text.ptr()));
    if (error.is_valid()) PyErr_SetObject(type.ptr(), error.ptr());
  }
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // what lives at exit is the process' to free
  nb::register_exception_translator(translate);
  bind_copies(m);
  bind_engine(m);
  bind_outside(m);
  bind_stores(m);
  bind_trace(m);
  bind_waiting(m);
}
