// Reading torch's tensors from C++ without torch's headers.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <map>

#include "group.hpp"

namespace phalanx {

namespace nb = nanobind;

// How torch shows its tensors to other libraries: DLPack's table of C functions, which hangs on the
// type. Reading a tensor this way costs a tenth of asking for its Python attributes.
struct DLPackExchange {
  struct {
    uint32_t major, minor;
  } version;
  void* previous;
  void *allocate, *to_managed, *from_managed;
  int (*look)(void* object, nb::dlpack::dltensor* out);  // what it points to belongs to the object
  void* current_stream;
};

struct Torch {
  PyTypeObject* tensor = nullptr;
  const DLPackExchange* dlpack = nullptr;
  PyObject* is_conj = PyUnicode_InternFromString("is_conj");
  PyObject* is_neg = PyUnicode_InternFromString("is_neg");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject *uint8 = nullptr, *int8 = nullptr;
};
inline Torch& torch() {
  static auto& instance = *new Torch;
  return instance;
}

inline bool ask(nb::handle tensor, PyObject* method) {
  PyObject* self = tensor.ptr();
  PyObject* answer =
      PyObject_VectorcallMethod(method, &self, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  if (!answer) throw nb::python_error();
  return nb::steal(answer).ptr() == Py_True;
}

// DLPack shows types of less than a byte (uint4, int2, ...), and torch.bit, as whole bytes.
inline bool is_whole_byte(nb::handle tensor, DType dtype) {
  nb::object actual = nb::steal(PyObject_GetAttr(tensor.ptr(), torch().dtype));
  if (!actual.is_valid()) throw nb::python_error();
  return actual.ptr() == (dtype == DType::U8 ? torch().uint8 : torch().int8);
}

inline DType from_dlpack(nb::dlpack::dtype dtype) {
  static const auto& known = *new std::map<std::pair<int, int>, DType>{
      {{6, 8}, DType::Bool},        {{1, 8}, DType::U8},          {{0, 8}, DType::I8},
      {{1, 16}, DType::U16},        {{0, 16}, DType::I16},        {{1, 32}, DType::U32},
      {{0, 32}, DType::I32},        {{1, 64}, DType::U64},        {{0, 64}, DType::I64},
      {{2, 16}, DType::F16},        {{4, 16}, DType::BF16},       {{2, 32}, DType::F32},
      {{2, 64}, DType::F64},        {{5, 64}, DType::C64},        {{5, 128}, DType::C128},
      {{10, 8}, DType::F8E4M3FN},   {{11, 8}, DType::F8E4M3FNUZ}, {{12, 8}, DType::F8E5M2},
      {{13, 8}, DType::F8E5M2FNUZ}, {{14, 8}, DType::F8E8M0FNU}};
  if (dtype.code == 2 && dtype.bits == 32) return DType::F32;
  auto found = known.find({dtype.code, dtype.bits});
  return dtype.lanes == 1 && found != known.end() ? found->second : DType::Count;
}

// A tensor as torch shows it. Valid while the tensor is.
struct Look {
  nb::dlpack::dltensor shown;
  DType dtype = DType::Count;
  size_t count = 1;
  bool dense = true;
  const char* fault = nullptr;  // why it cannot be exchanged

  explicit Look(nb::handle tensor) {
    if (!PyObject_TypeCheck(tensor.ptr(), torch().tensor)) {
      fault = "expected a tensor";
      return;
    }
    if (torch().dlpack->look(tensor.ptr(), &shown) != 0) {
      PyErr_Clear();
      fault = "the tensor is not a dense CPU tensor";
      return;
    }
    dtype = from_dlpack(shown.dtype);
    bool overflows = false;
    for (int i = shown.ndim - 1; i >= 0; --i) {
      if (shown.shape[i] != 1 && shown.strides && shown.strides[i] != int64_t(count)) dense = false;
      // An expanded tensor may have more elements than there are addresses.
      overflows |= __builtin_mul_overflow(count, size_t(shown.shape[i]), &count);
    }
    if (count == 0) dense = true;
    bool complex = dtype == DType::C64 || dtype == DType::C128;
    if (shown.device.device_type != nb::device::cpu::value)
      fault = "only CPU tensors can be exchanged";
    else if ((dtype == DType::U8 || dtype == DType::I8) && !is_whole_byte(tensor, dtype))
      fault = "elements of less than a byte cannot be exchanged; pass tensor.view(torch.uint8)";
    else if (dtype == DType::Count)
      fault = "elements of this type cannot be exchanged";
    else if (overflows || count > SIZE_MAX / 2 / item_size(dtype))
      fault = "the tensor has more bytes than there can be memory";
    else if (!shown.data && count > 0)
      fault = "the tensor has no memory";
    else if (complex && ask(tensor, torch().is_conj))
      fault = "a conjugated view cannot be exchanged; pass tensor.resolve_conj()";
    // Negated views come from complex tensors: they are strided or have a single element.
    else if ((!dense || count == 1) && ask(tensor, torch().is_neg))
      fault = "a negated view cannot be exchanged; pass tensor.resolve_neg()";
  }

  View view() const {
    if (fault) throw nb::value_error(fault);
    View view{static_cast<std::byte*>(shown.data) + shown.byte_offset, count, nullptr};
    if (dense) return view;
    if (shown.ndim > Layout::max_ndim)
      throw nb::value_error("a strided tensor may have at most 64 dimensions");
    auto layout = std::make_shared<Layout>();
    layout->ndim = shown.ndim;
    std::copy_n(shown.shape, shown.ndim, layout->shape);
    std::copy_n(shown.strides, shown.ndim, layout->stride);
    view.layout = std::move(layout);
    return view;
  }
};

}  // namespace phalanx
