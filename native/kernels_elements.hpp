// How elements are read and written, per instruction set. Included once per variant, inside the
// target of that variant; PHALANX_ISA is its namespace.
//
// An element type has Storage (in memory), Value (what is computed with; a whole vector if width >
// 1), Scalar (the type of factors), and Single, its version of width 1, for what is left at the
// end.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace phalanx::PHALANX_ISA {

template <class T>
struct Plain {
  using Storage = T;
  using Value = T;
  using Scalar = T;
  using Single = Plain;
  static constexpr size_t width = 1;
  static Value load(const T* p) { return *p; }
  static void store(T* p, Value v) { *p = v; }
};

struct Boolean : Plain<uint8_t> {
  static Value load(const uint8_t* p) { return *p != 0; }
};

template <class T>
struct ComplexValue {
  T re, im;
};

template <class T>
struct Complex : Plain<ComplexValue<T>> {
  using Scalar = T;
};

// What bfloat16 and float16 have in common: 16 bits in memory, float in registers.
struct Rounded {
  using Storage = uint16_t;
  using Value = float;
  using Scalar = float;
  static constexpr size_t width = 1;
};

struct BFloat : Rounded {
  using Single = BFloat;
  static float load(const uint16_t* p) {
    return __builtin_bit_cast(float, static_cast<uint32_t>(*p) << 16);
  }
  static void store(uint16_t* p, float v) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, v);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    *p = static_cast<uint16_t>(v != v ? 0x7fc0 : rounded);
  }
};

#if defined(__F16C__)

struct HalfSingle : Rounded {
  using Single = HalfSingle;
  static float load(const uint16_t* p) { return _cvtsh_ss(*p); }
  static void store(uint16_t* p, float v) { *p = _cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT); }
};

struct Half : Rounded {
  using Single = HalfSingle;
#if defined(__AVX512F__)
  using Value = __m512;
  static constexpr size_t width = 16;
  static Value load(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void store(uint16_t* p, Value v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
#else
  using Value = __m256;
  static constexpr size_t width = 8;
  static Value load(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store(uint16_t* p, Value v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
#endif
};

#elif defined(__aarch64__)

struct Half : Rounded {
  using Single = Half;
  static float load(const uint16_t* p) { return __builtin_bit_cast(__fp16, *p); }
  static void store(uint16_t* p, float v) {
    *p = __builtin_bit_cast(uint16_t, static_cast<__fp16>(v));
  }
};

#else

// In software, as selections instead of branches so that the loops vectorise. No subnormal float
// is ever an operand: a thread that flushes them gets the same bits as F16C gives.
struct Half : Rounded {
  using Single = Half;

  static float load(const uint16_t* p) {
    const uint32_t half = *p;
    const uint32_t sign = (half & 0x8000) << 16;
    const uint32_t shifted = (half & 0x7fff) << 13;
    const uint32_t exponent = shifted & 0x0f800000;
    // Subnormal: give it an implicit one, then subtract that one again.
    const uint32_t subnormal =
        __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, shifted + 0x38800000) - 0x1p-14f);
    const uint32_t quiet = (shifted & 0x007fffff) != 0 ? 0x00400000 : 0;
    const uint32_t special = (shifted + 0x70000000) | quiet;
    const uint32_t normal = shifted + 0x38000000;
    const uint32_t magnitude =
        exponent == 0x0f800000 ? special : (exponent == 0 ? subnormal : normal);
    return __builtin_bit_cast(float, magnitude | sign);
  }

  static void store(uint16_t* p, float v) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, v);
    const uint32_t sign = (bits >> 16) & 0x8000;
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t normal = (magnitude - 0x38000000 + 0x0fff + ((magnitude >> 13) & 1)) >> 13;
    // Subnormal: adding 0.5 makes the FPU round at the last place that float16 has there.
    const uint32_t subnormal =
        __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, magnitude) + 0.5f) - 0x3f000000;
    const uint32_t nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
    const uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;
    const uint32_t large = magnitude > 0x7f800000 ? nan : 0x7c00;
    *p = static_cast<uint16_t>((magnitude < 0x477ff000 ? finite : large) | sign);
  }
};

#endif

}  // namespace phalanx::PHALANX_ISA
