// The variant for x86-64 with AVX-512 as of Skylake-X.
#include "kernels_table.hpp"

#if PHALANX_X86_VARIANTS

// Headers of the library come before the target, so that their inline functions stay portable.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")
#define PHALANX_ISA avx512
#define PHALANX_VECTOR 64
#include "kernels_impl.hpp"

namespace phalanx::avx512 {
constinit const Table table = make_table("avx512");
}

#endif
