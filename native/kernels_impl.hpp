// The kernels of one variant, as templates over element and operation, and the table of them.
// Included once per variant, inside its target. Loops are plain and left to the vectoriser.
#pragma once

#include <cstring>

#include "kernels_elements.hpp"
#include "kernels_squares.hpp"
#include "kernels_table.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Iterations are independent: a dst is either the same as a src or disjoint from it.
#if defined(__clang__)
#define PHALANX_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#pragma clang diagnostic ignored "-Wpass-failed"  // where elements are vectors already
#else
#define PHALANX_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace phalanx::PHALANX_ISA {

// --- Operations: how a source enters (lift), joins (combine) and leaves (finish) ----------------

struct Identity {
  template <class V>
  V operator()(V v) const {
    return v;
  }
};

template <class S>
struct Times {
  S factor;
  template <class V>
  V operator()(V v) const {
    return v * factor;
  }
};

template <class S>
struct Over {
  S divisor;
  template <class V>
  V operator()(V v) const {
    return v / divisor;
  }
};

template <class S>
struct Bare {
  static Identity lift(const Operands&, size_t) { return {}; }
  static Identity finish(const Operands&) { return {}; }
};

template <class S>
struct Sum : Bare<S> {
  template <class V>
  static V combine(V a, V b) {
    return static_cast<V>(a + b);
  }
};

template <class S>
struct Premul : Sum<S> {
  static Times<S> lift(const Operands& job, size_t k) { return {static_cast<S>(job.factors[k])}; }
};

template <class S>
struct Mean : Sum<S> {
  static Over<S> finish(const Operands& job) { return {static_cast<S>(job.num_srcs)}; }
};

// For a power of two the reciprocal is exact, so the product has the bits of the quotient.
template <class S>
struct ExactMean : Sum<S> {
  static Times<S> finish(const Operands& job) { return {S{1} / static_cast<S>(job.num_srcs)}; }
};

// A product that stays one: GCC 12 forms 512-bit fmaddsub in spite of -ffp-contract=off.
template <class T>
T rounded(T product) {
#if __has_builtin(__builtin_assoc_barrier)
  return __builtin_assoc_barrier(product);
#else
  return product;
#endif
}

template <class S>
struct Product : Bare<S> {
  template <class V>
  static V combine(V a, V b) {
    return a * b;
  }
  // Narrow integers would be promoted to int, whose overflow is undefined.
  static uint8_t combine(uint8_t a, uint8_t b) { return static_cast<uint8_t>(1u * a * b); }
  static uint16_t combine(uint16_t a, uint16_t b) { return static_cast<uint16_t>(1u * a * b); }
  template <class T>
  static ComplexValue<T> combine(ComplexValue<T> a, ComplexValue<T> b) {
    return {rounded(a.re * b.re) - rounded(a.im * b.im),
            rounded(a.re * b.im) + rounded(a.im * b.re)};
  }
};

template <class S>
struct Min : Bare<S> {
  template <class V>
  static V combine(V a, V b) {
    const V least = a < b ? a : b;  // b where either is NaN
    return a != a ? a : least;
  }
};

template <class S>
struct Max : Bare<S> {
  template <class V>
  static V combine(V a, V b) {
    const V most = a > b ? a : b;
    return a != a ? a : most;
  }
};

template <class S>
struct And : Bare<S> {
  static S combine(S a, S b) { return a & b; }
};

template <class S>
struct Or : Bare<S> {
  static S combine(S a, S b) { return a | b; }
};

template <class S>
struct Xor : Bare<S> {
  static S combine(S a, S b) { return a ^ b; }
};

// The same for the two halves of a pair.
template <class F, class V>
V apply(F f, V v) {
  return f(v);
}

template <class F>
Pair apply(F f, Pair v) {
  return {f(v.low), f(v.high)};
}

template <class Op, class V>
V combine(V a, V b) {
  return Op::combine(a, b);
}

template <class Op>
Pair combine(Pair a, Pair b) {
  return {Op::combine(a.low, b.low), Op::combine(a.high, b.high)};
}

// --- Loops ---------------------------------------------------------------------------------------

// The accumulators of a block, for three sources and more: they stay in L1 with what they add up.
inline constexpr size_t block_bytes = 4096;

template <class Element, template <class> class Operation>
struct Reducer {
  using Op = Operation<typename Element::Scalar>;
  using Storage = typename Element::Storage;
  using Value = typename Element::Value;
  static constexpr size_t width = Element::width;
  static constexpr size_t block = block_bytes / sizeof(Value) * width;

  const Operands& job;

  Storage* dst(size_t d) const { return static_cast<Storage*>(job.dsts[d]); }
  const Storage* src(size_t k) const { return static_cast<const Storage*>(job.srcs[k]); }

  template <class Lift>
  static Value load(Lift lift, const Storage* p) {
    return apply(lift, Element::load(p));
  }

  void one(size_t begin, size_t end) const {
    const auto lift = Op::lift(job, 0);
    const auto finish = Op::finish(job);
    const Storage* a = src(0);
    Storage* out = dst(0);
    PHALANX_INDEPENDENT
    for (size_t i = begin; i < end; i += width) {
      Element::store(out + i, apply(finish, load(lift, a + i)));
    }
  }

  // Two sources, the case that matters most: nothing but registers between memory and memory.
  template <bool twice>
  void two(size_t begin, size_t end) const {
    const auto lift_a = Op::lift(job, 0);
    const auto lift_b = Op::lift(job, 1);
    const auto finish = Op::finish(job);
    const Storage* a = src(0);
    const Storage* b = src(1);
    Storage* out = dst(0);
    Storage* also = twice ? dst(1) : nullptr;
    PHALANX_INDEPENDENT
    for (size_t i = begin; i < end; i += width) {
      const Value v = apply(finish, combine<Op>(load(lift_a, a + i), load(lift_b, b + i)));
      Element::store(out + i, v);
      if constexpr (twice) Element::store(also + i, v);
    }
  }

  // Not inlined: GCC would make the loop over sources the inner one, and scalar.
  [[gnu::noinline]] void accumulate(Value* sums, size_t k, size_t begin, size_t steps) const {
    const auto lift = Op::lift(job, k);
    const Storage* a = src(k) + begin;
    PHALANX_INDEPENDENT
    for (size_t i = 0; i < steps; ++i) {
      sums[i] = combine<Op>(sums[i], load(lift, a + i * width));
    }
  }

  // Three sources and more, for one block.
  void many(size_t begin, size_t end) const {
    alignas(64) Value sums[block / width];
    const size_t steps = (end - begin) / width;
    const size_t last = job.num_srcs - 1;
    {
      const auto lift_a = Op::lift(job, 0);
      const auto lift_b = Op::lift(job, 1);
      const Storage* a = src(0) + begin;
      const Storage* b = src(1) + begin;
      PHALANX_INDEPENDENT
      for (size_t i = 0; i < steps; ++i) {
        sums[i] = combine<Op>(load(lift_a, a + i * width), load(lift_b, b + i * width));
      }
    }
    for (size_t k = 2; k < last; ++k) accumulate(sums, k, begin, steps);
    const auto lift = Op::lift(job, last);
    const auto finish = Op::finish(job);
    const Storage* a = src(last) + begin;
    Storage* out = dst(0) + begin;
    PHALANX_INDEPENDENT
    for (size_t i = 0; i < steps; ++i) {
      const Value sum = combine<Op>(sums[i], load(lift, a + i * width));
      Element::store(out + i * width, apply(finish, sum));
    }
  }

  // Every source of a block is read before its first dst is written, as a dst may be a source.
  void run(size_t begin, size_t end) const {
    if (job.num_srcs == 2 && job.num_dsts == 1) return two<false>(begin, end);
    if (job.num_srcs == 2 && job.num_dsts == 2) return two<true>(begin, end);
    for (size_t next; begin < end; begin = next) {
      next = end - begin < block ? end : begin + block;
      size_t written = 1;
      if (job.num_srcs == 1) {
        one(begin, next);
      } else if (job.num_srcs > 2) {
        many(begin, next);
      } else {
        two<true>(begin, next);
        written = 2;
      }
      for (size_t d = written; d < job.num_dsts; ++d) {
        if (dst(d) == dst(0)) continue;
        std::memcpy(dst(d) + begin, dst(0) + begin, (next - begin) * sizeof(Storage));
      }
    }
  }
};

template <class Element, template <class> class Operation>
void kernel(const Operands& job) {
  const size_t whole = job.count - job.count % Element::width;
  Reducer<Element, Operation>{job}.run(0, whole);
  if constexpr (Element::width > 1) {
    Reducer<typename Element::Single, Operation>{job}.run(whole, job.count);
  }
}

template <class Element>
void mean(const Operands& job) {
  const bool power_of_two = (job.num_srcs & (job.num_srcs - 1)) == 0;
  return power_of_two ? kernel<Element, ExactMean>(job) : kernel<Element, Mean>(job);
}

// Complex numbers whose operation treats the real and the imaginary part alike.
template <Kernel parts>
void by_parts(const Operands& job) {
  Operands twice = job;
  twice.count *= 2;
  parts(twice);
}

// --- Copies around the caches
// ----------------------------------------------------------------------

inline constexpr size_t line = 64;

// `to` is aligned to a line; `from` need not be.
inline void stream_line([[maybe_unused]] void* to, [[maybe_unused]] const void* from) {
#if PHALANX_VECTOR == 64
  _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_loadu_si512(from));
#elif PHALANX_VECTOR == 32
  for (int i = 0; i < 2; ++i) {
    _mm256_stream_si256(static_cast<__m256i*>(to) + i,
                        _mm256_loadu_si256(static_cast<const __m256i*>(from) + i));
  }
#elif defined(__x86_64__)
  for (int i = 0; i < 4; ++i) {
    _mm_stream_si128(static_cast<__m128i*>(to) + i,
                     _mm_loadu_si128(static_cast<const __m128i*>(from) + i));
  }
#else
  std::memcpy(to, from, line);
#endif
}

inline void stream(void* dst, const void* src, size_t bytes) {
  auto* to = static_cast<char*>(dst);
  auto* from = static_cast<const char*>(src);
  const size_t head = -reinterpret_cast<uintptr_t>(to) % line;
  if (bytes >= head + line) {
    std::memcpy(to, from, head);
    size_t done = head;
    for (; bytes - done >= line; done += line) stream_line(to + done, from + done);
    to += done;
    from += done;
    bytes -= done;
#if defined(__x86_64__)
    _mm_sfence();  // no later store overtakes: not the one either that tells others of this copy
#endif
  }
  std::memcpy(to, from, bytes);
}

// --- The table ----------------------------------------------------------------------------------

template <class Unsigned, class Signed>
constexpr void add_integers(Table& table, DType dtype, DType signed_dtype) {
  for (DType each : {dtype, signed_dtype}) {  // both wrap alike
    table.at(each, Reduce::Sum) = kernel<Plain<Unsigned>, Sum>;
    table.at(each, Reduce::Product) = kernel<Plain<Unsigned>, Product>;
    table.at(each, Reduce::Band) = kernel<Plain<Unsigned>, And>;
    table.at(each, Reduce::Bor) = kernel<Plain<Unsigned>, Or>;
    table.at(each, Reduce::Bxor) = kernel<Plain<Unsigned>, Xor>;
  }
  table.at(dtype, Reduce::Min) = kernel<Plain<Unsigned>, Min>;
  table.at(dtype, Reduce::Max) = kernel<Plain<Unsigned>, Max>;
  table.at(signed_dtype, Reduce::Min) = kernel<Plain<Signed>, Min>;
  table.at(signed_dtype, Reduce::Max) = kernel<Plain<Signed>, Max>;
}

template <class Element>
constexpr void add_floats(Table& table, DType dtype, Measure squares) {
  table.squares_of(dtype) = squares;
  table.at(dtype, Reduce::Sum) = kernel<Element, Sum>;
  table.at(dtype, Reduce::Avg) = mean<Element>;
  table.at(dtype, Reduce::Product) = kernel<Element, Product>;
  table.at(dtype, Reduce::Min) = kernel<Element, Min>;
  table.at(dtype, Reduce::Max) = kernel<Element, Max>;
  table.at(dtype, Reduce::PremulSum) = kernel<Element, Premul>;
}

template <class T>
constexpr void add_complex(Table& table, DType dtype) {
  table.squares_of(dtype) = squares_of_parts<T>;
  table.at(dtype, Reduce::Sum) = by_parts<kernel<Plain<T>, Sum>>;
  table.at(dtype, Reduce::Avg) = by_parts<mean<Plain<T>>>;
  table.at(dtype, Reduce::PremulSum) = by_parts<kernel<Plain<T>, Premul>>;
  table.at(dtype, Reduce::Product) = kernel<Complex<T>, Product>;
}

constexpr Table make_table(const char* isa) {
  Table table{isa, {}, stream, {}};
  for (Reduce any : {Reduce::Sum, Reduce::Max, Reduce::Bor}) {
    table.at(DType::Bool, any) = kernel<Boolean, Or>;
  }
  for (Reduce all : {Reduce::Product, Reduce::Min, Reduce::Band}) {
    table.at(DType::Bool, all) = kernel<Boolean, And>;
  }
  table.at(DType::Bool, Reduce::Bxor) = kernel<Boolean, Xor>;
  add_integers<uint8_t, int8_t>(table, DType::U8, DType::I8);
  add_integers<uint16_t, int16_t>(table, DType::U16, DType::I16);
  add_integers<uint32_t, int32_t>(table, DType::U32, DType::I32);
  add_integers<uint64_t, int64_t>(table, DType::U64, DType::I64);
  add_floats<Half>(table, DType::F16, squares_of_small<Half>);
  add_floats<Brain>(table, DType::BF16, squares_of_small<Brain>);
  add_floats<Plain<float>>(table, DType::F32, squares<float>);
  add_floats<Plain<double>>(table, DType::F64, squares<double>);
  add_complex<float>(table, DType::C64);
  add_complex<double>(table, DType::C128);
  return table;
}

}  // namespace phalanx::PHALANX_ISA
