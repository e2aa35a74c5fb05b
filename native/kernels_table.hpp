// What each instruction set variant of the kernels provides; private to kernels*.cpp and the tests.
#pragma once

#include <cstddef>
#include <span>

#include "types.hpp"

namespace phalanx {

// One call of `reduce`, erased. A raw struct: the variants use no library templates, whose shared
// instantiations could otherwise be compiled for an instruction set this machine lacks.
struct Operands {
  void* const* dsts;
  size_t num_dsts;
  const void* const* srcs;
  size_t num_srcs;
  size_t count;
  const double* factors;
};

using Kernel = void (*)(const Operands&);
using Measure = double (*)(const void* data, size_t count);

struct Table {
  const char* isa;
  Kernel cells[static_cast<size_t>(DType::Count)][static_cast<size_t>(Reduce::Count)];
  void (*stream)(void* dst, const void* src, size_t bytes);  // copy around the caches
  Measure squares[static_cast<size_t>(DType::Count)];

  constexpr Kernel& at(DType dtype, Reduce op) {
    return cells[static_cast<size_t>(dtype)][static_cast<size_t>(op)];
  }
  constexpr Kernel at(DType dtype, Reduce op) const {
    return cells[static_cast<size_t>(dtype)][static_cast<size_t>(op)];
  }
  constexpr Measure& squares_of(DType dtype) { return squares[static_cast<size_t>(dtype)]; }
  constexpr Measure squares_of(DType dtype) const { return squares[static_cast<size_t>(dtype)]; }
};

// The variants need per-function targets, which only GCC can set for a whole file from within it. A
// build may do without them: that of the sanitizers does, which take ten times as long to compile.
#if defined(PHALANX_ONE_VARIANT)
#define PHALANX_X86_VARIANTS 0
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define PHALANX_X86_VARIANTS 1
#else
#define PHALANX_X86_VARIANTS 0
#endif

namespace baseline {
extern const Table table;
}
#if PHALANX_X86_VARIANTS
namespace avx2 {
extern const Table table;
}
namespace avx512 {
extern const Table table;
}
#endif

// The variants this machine can run, the fastest first.
std::span<const Table* const> tables();

}  // namespace phalanx
