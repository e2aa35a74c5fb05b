// Sums of squares, in double. Included once per variant, inside its target.
//
// Element i is added to lane i % 32 and the lanes are added in one fixed order, so that the bits of
// a sum do not depend on the instruction set.
#pragma once

#include "kernels_elements.hpp"

namespace phalanx::PHALANX_ISA {

using Doubles = double __attribute__((vector_size(PHALANX_VECTOR)));

inline Doubles load_doubles(const double* p) {
  Doubles wide;
  std::memcpy(&wide, p, sizeof(wide));
  return wide;
}

inline Doubles load_doubles(const float* p) {
#if PHALANX_VECTOR == 64
  return _mm512_maskz_cvtps_pd(0xff, _mm256_loadu_ps(p));  // as for halves: a false warning
#elif PHALANX_VECTOR == 32
  return _mm256_cvtps_pd(_mm_loadu_ps(p));
#elif defined(__x86_64__)
  return _mm_cvtps_pd(_mm_castsi128_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return Doubles{p[0], p[1]};
#endif
}

template <class T>
class Squares {
 public:
  void add(const T* data, size_t count) {
    size_t i = 0;
    for (; count - i >= lanes; i += lanes) {
      for (size_t r = 0; r < registers; ++r) {
        const Doubles wide = load_doubles(data + i + r * width);
        sums_[r] += wide * wide;
      }
    }
    double rest[lanes] = {};
    for (size_t k = 0; i < count; ++i, ++k) rest[k] = static_cast<double>(data[i]);
    for (size_t r = 0; r < registers; ++r) {
      const Doubles wide = load_doubles(rest + r * width);
      sums_[r] += wide * wide;
    }
  }

  double total() const {
    double sums[lanes];
    std::memcpy(sums, sums_, sizeof(sums));
    for (size_t half = lanes / 2; half > 0; half /= 2) {
      for (size_t k = 0; k < half; ++k) sums[k] += sums[k + half];
    }
    return sums[0];
  }

 private:
  static constexpr size_t lanes = 32;
  static constexpr size_t width = sizeof(Doubles) / sizeof(double);
  static constexpr size_t registers = lanes / width;

  Doubles sums_[registers] = {};
};

template <class T>
double squares(const void* data, size_t count) {
  Squares<T> sum;
  sum.add(static_cast<const T*>(data), count);
  return sum.total();
}

// Complex numbers: |z|^2 is what its two parts add.
template <class T>
double squares_of_parts(const void* data, size_t count) {
  return squares<T>(data, 2 * count);
}

template <class Element>
void widen(float* wide, const uint16_t* data, size_t count) {
  size_t i = 0;
  if constexpr (__is_same(typename Element::Value, Floats)) {
    for (; count - i >= Element::width; i += Element::width) {
      const Floats floats = Element::load(data + i);
      std::memcpy(wide + i, &floats, sizeof(floats));
    }
  }
  for (; i < count; ++i) wide[i] = Element::Single::load(data + i);
}

template <class Element>
double squares_of_small(const void* data, size_t count) {
  constexpr size_t block = 1024;  // a multiple of the lanes: each block begins with the first
  alignas(64) float wide[block];
  const auto* halves = static_cast<const uint16_t*>(data);
  Squares<float> sum;
  for (size_t begin = 0, size; begin < count; begin += size) {
    size = count - begin < block ? count - begin : block;
    widen<Element>(wide, halves + begin, size);
    sum.add(wide, size);
  }
  return sum.total();
}

}  // namespace phalanx::PHALANX_ISA
