// How elements are read and written, per instruction set. Included once per variant, inside its
// target. PHALANX_ISA is the variant's namespace and PHALANX_VECTOR the bytes of its vectors: GCC
// 12 does not define __AVX2__ and the like for a target that is set within a file.
//
// An element type has Storage (in memory), Value (what is computed with; whole vectors if width >
// 1), Scalar (the type of factors), and Single, its version of width 1, for what is left at the
// end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
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

// --- 16 bits in memory, float in registers ------------------------------------------------------
//
// A format keeps an element in the high half of a word: `decode` finds zeros in the low half, what
// `encode` leaves there is of no interest. Word and Float are scalars or vectors, so that loops and
// their ends come from one formula, free of branches.

using Words = uint32_t __attribute__((vector_size(PHALANX_VECTOR)));
using Floats = float __attribute__((vector_size(PHALANX_VECTOR)));

struct Bfloat16 {
  template <class Float, class Word>
  static Float decode(Word bits) {
    return __builtin_bit_cast(Float, bits);
  }

  template <class Word, class Float>
  static Word encode(Float v) {
    const Word bits = __builtin_bit_cast(Word, v);
    const Word rounded = bits + 0x7fff + ((bits >> 16) & 1);
    return v == v ? rounded : Word{} + 0x7fc00000;
  }
};

// Where the processor does not convert. No subnormal float is an operand here, so that a thread
// which flushes them still gets the bits that F16C gives.
struct Float16 {
  template <class Float, class Word>
  static Float decode(Word bits) {
    const Word sign = bits & 0x80000000;
    const Word shifted = (bits & 0x7fffffff) >> 3;
    const Word exponent = shifted & 0x0f800000;
    // Subnormal: give it an implicit one, then subtract that one again.
    const Word subnormal =
        __builtin_bit_cast(Word, __builtin_bit_cast(Float, shifted + 0x38800000) - 0x1p-14f);
    const Word normal = shifted + 0x38000000;
    const Word special = shifted + 0x70000000;
    const Word quiet = shifted > 0x0f800000 ? special | 0x00400000 : special;
    const Word finite = exponent == 0 ? subnormal : normal;
    return __builtin_bit_cast(Float, (exponent == 0x0f800000 ? quiet : finite) | sign);
  }

  template <class Word, class Float>
  static Word encode(Float v) {
    const Word bits = __builtin_bit_cast(Word, v);
    const Word sign = bits & 0x80000000;
    const Word magnitude = bits & 0x7fffffff;
    const Word normal = (magnitude - 0x38000000 + 0x0fff + ((magnitude >> 13) & 1)) << 3;
    // Subnormal: adding 0.5 makes the FPU round at the last place that float16 has there.
    const Word subnormal =
        (__builtin_bit_cast(Word, __builtin_bit_cast(Float, magnitude) + 0.5f) - 0x3f000000) << 16;
    const Word nan = (magnitude << 3) | 0x7e000000;
    const Word finite = magnitude < 0x38800000 ? subnormal : normal;
    const Word large = magnitude > 0x7f800000 ? nan & 0x7fffffff : Word{} + 0x7c000000;
    return (magnitude < 0x477ff000 ? finite : large) | sign;
  }
};

template <class Format>
struct Small {
  using Storage = uint16_t;
  using Value = float;
  using Scalar = float;
  using Single = Small;
  static constexpr size_t width = 1;
  static Value load(const uint16_t* p) {
    return Format::template decode<float>(uint32_t{*p} << 16);
  }
  static void store(uint16_t* p, Value v) {
    *p = static_cast<uint16_t>(Format::template encode<uint32_t>(v) >> 16);
  }
};

// A vector of words has one element in the low and one in the high half of each: two vectors of
// floats, without moving anything between lanes.
struct Pair {
  Floats low, high;
};

template <class Format>
struct SmallPairs : Small<Format> {
  using Value = Pair;
  static constexpr size_t width = PHALANX_VECTOR / sizeof(uint16_t);
  static Value load(const uint16_t* p) {
    Words words;
    std::memcpy(&words, p, sizeof(words));
    return {Format::template decode<Floats>(words << 16),
            Format::template decode<Floats>(words & 0xffff0000)};
  }
  static void store(uint16_t* p, Value v) {
    const Words low = Format::template encode<Words>(v.low);
    const Words high = Format::template encode<Words>(v.high);
    const Words words = (low >> 16) | (high & 0xffff0000);
    std::memcpy(p, &words, sizeof(words));
  }
};

using Brain = SmallPairs<Bfloat16>;

#if PHALANX_VECTOR >= 32

struct HalfSingle : Small<Float16> {
  using Single = HalfSingle;
  static Value load(const uint16_t* p) { return _cvtsh_ss(*p); }
  static void store(uint16_t* p, Value v) { *p = _cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT); }
};

struct Half : HalfSingle {
  using Value = Floats;
  static constexpr size_t width = PHALANX_VECTOR / sizeof(float);
#if PHALANX_VECTOR == 64
  // With a mask of ones: the plain intrinsics draw a false warning from GCC 12.
  static Value load(const uint16_t* p) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_maskz_cvtph_ps(0xffff, halves);
  }
  static void store(uint16_t* p, Value v) {
    const __m256i halves = _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), halves);
  }
#else
  static Value load(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store(uint16_t* p, Value v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
#endif
};

#elif defined(__aarch64__)

struct Half : Small<Float16> {
  using Single = Half;
  static Value load(const uint16_t* p) { return __builtin_bit_cast(__fp16, *p); }
  static void store(uint16_t* p, Value v) {
    *p = __builtin_bit_cast(uint16_t, static_cast<__fp16>(v));
  }
};

#else

using Half = SmallPairs<Float16>;

#endif

}  // namespace phalanx::PHALANX_ISA
