// Multi-source reductions and large copies: the only code that touches every byte of a tensor.
#pragma once

#include <cstddef>
#include <span>

#include "types.hpp"

namespace phalanx {

const char* name(DType dtype);  // as torch spells it: "float32"
const char* name(Reduce op);    // as a user spells it: "SUM"

// Sum, Product, Min, Max: integers, bool and real floats. Avg, PremulSum: floats, real and complex.
// Complex numbers also know Sum and Product. Band, Bor, Bxor: integers and bool. float8: nothing.
bool reducible(DType dtype, Reduce op);

struct Reduction {
  DType dtype;
  Reduce op;
  const double* factors = nullptr;  // PremulSum: one per source
};

// dst[d][i] = finish(((src[0][i] op src[1][i]) op src[2][i]) …) for every d. The order is fixed and
// elements are independent, so bits agree whoever computes them, on any CPU variant, however a
// range is cut (only the payload of a NaN is the hardware's choice).
//
// float16 and bfloat16 are accumulated in float and rounded once; Avg divides by the number of
// sources; PremulSum rounds each product before adding; integers wrap; Min and Max propagate NaN.
// Bool reads any non-zero byte as true and writes 0 or 1: Sum and Max are or, Product and Min are
// and.
//
// Pointers are aligned to the element. A dst is the same as a src or disjoint from it, never partly
// overlapping. Throws Failure(Kind::Invalid) if the pair is not reducible.
void reduce(const Reduction& reduction, std::span<void* const> dsts,
            std::span<const void* const> srcs, size_t count);

// Floats, real and complex.
bool measurable(DType dtype);

// The sum of the squares of all elements, |z|^2 where they are complex, in double. The order of
// summation depends on `count` alone. Throws Failure(Kind::Invalid) if they are not measurable.
double sum_of_squares(DType dtype, const void* data, size_t count);

// The instructions that the kernels use on this machine: "avx512", "avx2" or "baseline".
const char* instructions();

// From this many bytes on, `copy` writes around the caches. Measured against memcpy, one core, L2
// of 2 MB: a quarter to two thirds faster from 2 MB on if nobody reads the destination soon, but a
// tenth slower from 4 to 16 MB if it is read at once; at 64 MB it was faster either way.
inline constexpr size_t stream_threshold = size_t{32} << 20;

// memcpy, with streaming stores if there are `stream_from` bytes or more. Stores that follow are
// ordered behind the copy, as they are behind memcpy.
void copy(void* dst, const void* src, size_t bytes, size_t stream_from = stream_threshold);

}  // namespace phalanx
