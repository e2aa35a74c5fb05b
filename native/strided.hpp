// Copies between a dense, row-major buffer and strided memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace phalanx {

// The shape of a tensor and its strides, in elements. Strides may be zero (expanded) or negative.
struct Layout {
  static constexpr int max_ndim = 64;
  int ndim = 0;
  int64_t shape[max_ndim];
  int64_t stride[max_ndim];
};

// A tensor as the core sees it: dense unless a layout is given.
struct View {
  std::byte* data = nullptr;
  size_t count = 0;
  std::shared_ptr<const Layout> layout;
};

// `item` is the size of an element: 1, 2, 4, 8 or 16 bytes. `strided` points at the element with
// all indices zero. The two buffers do not overlap.
void pack(void* dense, const void* strided, const Layout& layout, size_t item);

// Where strides make elements share memory, one of the values written there remains.
void unpack(void* strided, const void* dense, const Layout& layout, size_t item);

}  // namespace phalanx
