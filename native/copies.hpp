// Many tensors copied in one call, and measured on the way.
#pragma once

#include <span>

#include "strided.hpp"
#include "types.hpp"

namespace phalanx {

// One tensor and where it goes: as many elements of one dtype on both sides. The two are one and
// the same memory or do not overlap.
struct Transfer {
  DType dtype;
  View to, from;
};

// Copy every tensor to its place, in row-major order of the elements. Where `squares` is given it
// has room for one number per transfer, the sum of squares of what was copied.
void copy_all(std::span<const Transfer> transfers, double* squares);

}  // namespace phalanx
