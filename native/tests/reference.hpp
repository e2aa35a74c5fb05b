// What the kernels have to compute, by definition: scalar, slow, and sharing no code with them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include "types.hpp"

namespace phalanx::reference {

using Bytes = std::vector<uint8_t>;

// A small binary format, decoded and encoded with arithmetic on doubles only.
struct Format {
  int mantissa_bits, bias;

  double decode(uint16_t bits) const {
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const int exponent = (bits & 0x7fff) >> mantissa_bits;
    const int top = 0x7fff >> mantissa_bits;
    double v;
    if (exponent == top) {
      v = mantissa != 0 ? NAN : INFINITY;
    } else if (exponent == 0) {
      v = std::ldexp(mantissa, 1 - bias - mantissa_bits);
    } else {
      v = std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
    }
    return std::copysign(v, bits & 0x8000 ? -1.0 : 1.0);
  }

  uint16_t encode(double v) const {
    const uint16_t sign = std::signbit(v) ? 0x8000 : 0;
    const int top = 0x7fff >> mantissa_bits;
    const uint16_t infinity = static_cast<uint16_t>(top << mantissa_bits);
    if (std::isnan(v)) return infinity | 1;
    v = std::abs(v);
    if (std::isinf(v)) return sign | infinity;
    if (v == 0) return sign;
    const int exponent = std::max(std::ilogb(v), 1 - bias);
    // In units of the last place; nearbyint rounds to nearest, ties to even.
    const auto units =
        static_cast<int64_t>(std::nearbyint(std::ldexp(v, mantissa_bits - exponent)));
    const int64_t bits = (static_cast<int64_t>(exponent + bias - 1) << mantissa_bits) + units;
    return sign | static_cast<uint16_t>(std::min<int64_t>(bits, infinity));
  }
};

inline constexpr Format half{10, 15};
inline constexpr Format brain{7, 127};

struct C64 {
  float re, im;
};
struct C128 {
  double re, im;
};

template <class T>
T get(const Bytes& bytes, size_t i) {
  T v;
  std::memcpy(&v, bytes.data() + i * sizeof(T), sizeof(T));
  return v;
}

template <class T>
void put(Bytes& bytes, size_t i, T v) {
  std::memcpy(bytes.data() + i * sizeof(T), &v, sizeof(T));
}

template <class T>
T fold_float(Reduce op, const std::vector<T>& v, const double* factors) {
  T acc = op == Reduce::PremulSum ? static_cast<T>(v[0] * static_cast<T>(factors[0])) : v[0];
  for (size_t k = 1; k < v.size(); ++k) {
    if (op == Reduce::Sum || op == Reduce::Avg) {
      acc = acc + v[k];
    } else if (op == Reduce::PremulSum) {
      const T product = v[k] * static_cast<T>(factors[k]);
      acc = acc + product;
    } else if (op == Reduce::Product) {
      acc = acc * v[k];
    } else if (std::isnan(acc) || std::isnan(v[k])) {
      acc = std::numeric_limits<T>::quiet_NaN();
    } else if (op == Reduce::Min) {
      acc = acc < v[k] ? acc : v[k];
    } else {
      acc = acc > v[k] ? acc : v[k];
    }
  }
  return op == Reduce::Avg ? acc / static_cast<T>(v.size()) : acc;
}

// Arithmetic modulo 2^64 and a truncation is arithmetic modulo any smaller power of two.
template <class T>
T fold_integer(Reduce op, const std::vector<T>& v) {
  T acc = v[0];
  for (size_t k = 1; k < v.size(); ++k) {
    const auto a = static_cast<uint64_t>(acc), b = static_cast<uint64_t>(v[k]);
    switch (op) {
      case Reduce::Sum:
        acc = static_cast<T>(a + b);
        break;
      case Reduce::Product:
        acc = static_cast<T>(a * b);
        break;
      case Reduce::Band:
        acc = static_cast<T>(a & b);
        break;
      case Reduce::Bor:
        acc = static_cast<T>(a | b);
        break;
      case Reduce::Bxor:
        acc = static_cast<T>(a ^ b);
        break;
      case Reduce::Min:
        acc = std::min(acc, v[k]);
        break;
      default:
        acc = std::max(acc, v[k]);
    }
  }
  return acc;
}

inline bool fold_bool(Reduce op, const std::vector<uint8_t>& v) {
  const auto set = std::count_if(v.begin(), v.end(), [](uint8_t b) { return b != 0; });
  if (op == Reduce::Bxor) return set % 2 == 1;
  const bool any = op == Reduce::Sum || op == Reduce::Max || op == Reduce::Bor;
  return any ? set > 0 : set == static_cast<std::ptrdiff_t>(v.size());
}

template <class C, class T>
C fold_complex(Reduce op, const std::vector<C>& v, const double* factors) {
  std::vector<T> re, im;
  for (C c : v) re.push_back(c.re), im.push_back(c.im);
  if (op != Reduce::Product) return {fold_float(op, re, factors), fold_float(op, im, factors)};
  C acc = v[0];
  for (size_t k = 1; k < v.size(); ++k) {
    const T ac = acc.re * v[k].re, bd = acc.im * v[k].im;
    const T ad = acc.re * v[k].im, bc = acc.im * v[k].re;
    acc = {ac - bd, ad + bc};
  }
  return acc;
}

template <class T, class Fold>
Bytes each(const std::vector<Bytes>& srcs, size_t count, Fold fold) {
  Bytes out(count * sizeof(T));
  for (size_t i = 0; i < count; ++i) {
    std::vector<T> values;
    for (const Bytes& src : srcs) values.push_back(get<T>(src, i));
    put<T>(out, i, fold(values));
  }
  return out;
}

// The elements that `reduce` has to write.
inline Bytes reduce(DType dtype, Reduce op, const double* factors, const std::vector<Bytes>& srcs,
                    size_t count) {
  const auto integers = [&]<class T>(T) {
    return each<T>(srcs, count, [&](const auto& v) { return fold_integer<T>(op, v); });
  };
  const auto small = [&](Format format) {
    return each<uint16_t>(srcs, count, [&](const std::vector<uint16_t>& v) {
      std::vector<float> wide;
      for (uint16_t bits : v) wide.push_back(static_cast<float>(format.decode(bits)));
      return format.encode(fold_float<float>(op, wide, factors));
    });
  };
  switch (dtype) {
    case DType::Bool:
      return each<uint8_t>(srcs, count, [&](const auto& v) { return uint8_t{fold_bool(op, v)}; });
    case DType::U8:
      return integers(uint8_t{});
    case DType::I8:
      return integers(int8_t{});
    case DType::U16:
      return integers(uint16_t{});
    case DType::I16:
      return integers(int16_t{});
    case DType::U32:
      return integers(uint32_t{});
    case DType::I32:
      return integers(int32_t{});
    case DType::U64:
      return integers(uint64_t{});
    case DType::I64:
      return integers(int64_t{});
    case DType::F16:
      return small(half);
    case DType::BF16:
      return small(brain);
    case DType::F32:
      return each<float>(srcs, count, [&](const auto& v) { return fold_float(op, v, factors); });
    case DType::F64:
      return each<double>(srcs, count, [&](const auto& v) { return fold_float(op, v, factors); });
    case DType::C64:
      return each<C64>(srcs, count,
                       [&](const auto& v) { return fold_complex<C64, float>(op, v, factors); });
    case DType::C128:
      return each<C128>(srcs, count,
                        [&](const auto& v) { return fold_complex<C128, double>(op, v, factors); });
    default:
      throw std::logic_error("no reference for this dtype");
  }
}

}  // namespace phalanx::reference
