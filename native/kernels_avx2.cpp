// The variant for x86-64 with AVX2 and F16C.
#include "kernels_table.hpp"

#if PHALANX_X86_VARIANTS

// Headers of the library come before the target, so that their inline functions stay portable.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#pragma GCC target("avx2,f16c")
#define PHALANX_ISA avx2
#define PHALANX_VECTOR 32
#include "kernels_impl.hpp"

namespace phalanx::avx2 {
constinit const Table table = make_table("avx2");
}

#endif
