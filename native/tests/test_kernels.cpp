// Every cell of the kernel table, in every variant this machine runs, against a scalar reference
// that shares no code with the kernels.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check.hpp"
#include "failure.hpp"
#include "kernels.hpp"
#include "kernels_table.hpp"
#include "reference.hpp"

using namespace phalanx;

namespace {

constexpr auto num_dtypes = static_cast<int>(DType::Count);
constexpr auto num_ops = static_cast<int>(Reduce::Count);
using reference::brain;
using reference::Bytes;
using reference::Format;
using reference::get;
using reference::half;
using reference::put;

// --- Inputs and comparison -----------------------------------------------------------------------

template <class T, class Convert>
void fill(Bytes& bytes, std::minstd_rand& random, Convert convert) {
  static const double special[] = {0.0,   -0.0, 1.0,   -2.5, INFINITY, -INFINITY, NAN,  1e-40,
                                   -6e-8, 3e-5, 65504, 1e38, 5e-324,   1.7e308,   3e-39};
  for (size_t i = 0; i < bytes.size() / sizeof(T); ++i) {
    const auto kind = random() % 8;
    if (kind == 0) {
      put<T>(bytes, i, convert(special[random() % std::size(special)]));
    } else if (kind < 7) {  // the rest keep their random bits
      put<T>(bytes, i, convert((static_cast<double>(random() % 20001) - 10000) / 1024));
    }
  }
}

Bytes sample(DType dtype, size_t count, std::minstd_rand& random) {
  Bytes bytes(count * item_size(dtype));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random() >> 8);
  switch (dtype) {
    case DType::Bool:
      for (uint8_t& byte : bytes) byte = random() % 2 ? byte : 0;
      break;
    case DType::F16:
      fill<uint16_t>(bytes, random, [](double v) { return half.encode(v); });
      break;
    case DType::BF16:
      fill<uint16_t>(bytes, random, [](double v) { return brain.encode(v); });
      break;
    case DType::F32:
    case DType::C64:
      fill<float>(bytes, random, [](double v) {
        // A cast of what float cannot hold is undefined.
        return std::abs(v) > 3e38 && !std::isinf(v) ? 3e38f : static_cast<float>(v);
      });
      break;
    case DType::F64:
    case DType::C128:
      fill<double>(bytes, random, [](double v) { return v; });
      break;
    default:
      break;
  }
  return bytes;
}

template <class T, class IsNan>
size_t mismatches(const uint8_t* got, const Bytes& expected, IsNan is_nan) {
  size_t wrong = 0;
  for (size_t i = 0; i < expected.size() / sizeof(T); ++i) {
    T a;
    std::memcpy(&a, got + i * sizeof(T), sizeof(T));
    const T b = get<T>(expected, i);
    wrong += std::memcmp(&a, &b, sizeof(T)) != 0 && !(is_nan(a) && is_nan(b));
  }
  return wrong;
}

// How many elements differ in any bit, all NaNs being one value.
size_t mismatches(DType dtype, const uint8_t* got, const Bytes& expected) {
  const auto real = [](auto v) { return std::isnan(v); };
  switch (dtype) {
    case DType::F16:
      return mismatches<uint16_t>(got, expected, [](uint16_t v) { return (v & 0x7fff) > 0x7c00; });
    case DType::BF16:
      return mismatches<uint16_t>(got, expected, [](uint16_t v) { return (v & 0x7fff) > 0x7f80; });
    case DType::F32:
    case DType::C64:
      return mismatches<float>(got, expected, real);
    case DType::F64:
    case DType::C128:
      return mismatches<double>(got, expected, real);
    default:
      return std::memcmp(got, expected.data(), expected.size()) != 0;
  }
}

// Memory for one operand: `shift` elements past an aligned address, with guards around it.
struct Buffer {
  static constexpr size_t guard = 64;
  Bytes memory;
  size_t start, bytes;

  Buffer(const Bytes& content, size_t shift) : bytes(content.size()) {
    memory.assign(bytes + shift + 3 * guard, 0xa5);
    const auto address = reinterpret_cast<uintptr_t>(memory.data() + guard);
    start = guard + (-address % 64) + shift;
    std::copy(content.begin(), content.end(), memory.begin() + static_cast<std::ptrdiff_t>(start));
  }
  uint8_t* data() { return memory.data() + start; }
  bool intact() const {
    const auto untouched = [](uint8_t byte) { return byte == 0xa5; };
    const auto first = memory.begin() + static_cast<std::ptrdiff_t>(start);
    return std::all_of(memory.begin(), first, untouched) &&
           std::all_of(first + static_cast<std::ptrdiff_t>(bytes), memory.end(), untouched);
  }
};

enum class Alias { None, First, Last, All };

// One call in one variant (the public function if there is none), checked in full.
void verify(const Table* table, DType dtype, Reduce op, const std::vector<Bytes>& inputs,
            const Bytes& expected, const double* factors, size_t num_dsts, Alias alias,
            size_t shift) {
  const size_t item = item_size(dtype);
  const size_t count = expected.size() / item;
  std::vector<Buffer> sources, targets;
  for (size_t k = 0; k < inputs.size(); ++k)
    sources.emplace_back(inputs[k], (k + 1) * shift * item);
  for (size_t d = 0; d < num_dsts; ++d) {
    targets.emplace_back(Bytes(expected.size()), (d + 2) * shift * item);
  }
  std::vector<const void*> srcs;
  std::vector<void*> dsts;
  for (Buffer& source : sources) srcs.push_back(source.data());
  for (Buffer& target : targets) dsts.push_back(target.data());
  if (alias == Alias::First) dsts[0] = sources[0].data();
  if (alias == Alias::Last) dsts.back() = sources.back().data();
  if (alias == Alias::All) {
    for (size_t d = 0; d < num_dsts; ++d) dsts[d] = sources[d % sources.size()].data();
  }

  if (table != nullptr) {
    table->at(dtype,
              op)(Operands{dsts.data(), dsts.size(), srcs.data(), srcs.size(), count, factors});
  } else {
    reduce({dtype, op, factors}, dsts, srcs, count);
  }

  for (size_t d = 0; d < num_dsts; ++d) {
    const size_t wrong = mismatches(dtype, static_cast<uint8_t*>(dsts[d]), expected);
    if (wrong != 0) {
      check::fail(table != nullptr ? table->isa : "reduce", static_cast<int>(d),
                  std::string(name(dtype)) + " " + name(op) + ", " + std::to_string(inputs.size()) +
                      " sources, " + std::to_string(count) + " elements: " + std::to_string(wrong) +
                      " wrong");
    }
  }
  for (size_t k = 0; k < sources.size(); ++k) {
    CHECK(sources[k].intact());
    if (std::find(dsts.begin(), dsts.end(), srcs[k]) == dsts.end()) {
      CHECK(std::memcmp(srcs[k], inputs[k].data(), inputs[k].size()) == 0);
    }
  }
  for (Buffer& target : targets) CHECK(target.intact());
}

template <class Body>
void for_each_cell(Body body) {
  for (int d = 0; d < num_dtypes; ++d) {
    for (int r = 0; r < num_ops; ++r) {
      const auto dtype = static_cast<DType>(d);
      const auto op = static_cast<Reduce>(r);
      if (reducible(dtype, op)) body(dtype, op);
    }
  }
}

const double factors[] = {0.5, -1.7, 3.1, 0.1, 2.0};

}  // namespace

// --- Cases
// -----------------------------------------------------------------------------------------

TEST(reducible_matrix) {
  using enum DType;
  const auto among = [](auto v, std::initializer_list<decltype(v)> list) {
    return std::find(list.begin(), list.end(), v) != list.end();
  };
  for (int d = 0; d < num_dtypes; ++d) {
    for (int r = 0; r < num_ops; ++r) {
      const auto dtype = static_cast<DType>(d);
      const auto op = static_cast<Reduce>(r);
      bool expected = false;
      if (among(dtype, {Bool, U8, I8, U16, I16, U32, I32, U64, I64})) {
        expected = op != Reduce::Avg && op != Reduce::PremulSum;
      } else if (among(dtype, {F16, BF16, F32, F64})) {
        expected = !among(op, {Reduce::Band, Reduce::Bor, Reduce::Bxor});
      } else if (among(dtype, {C64, C128})) {
        expected = among(op, {Reduce::Sum, Reduce::Avg, Reduce::Product, Reduce::PremulSum});
      }
      CHECK_EQ(reducible(dtype, op), expected);
      for (const Table* table : tables()) CHECK_EQ(table->at(dtype, op) != nullptr, expected);
    }
  }
  CHECK(!reducible(Count, Reduce::Sum));
  CHECK(!reducible(F32, Reduce::Count));
}

TEST(every_cell_by_sources_and_destinations) {
  std::minstd_rand random(11);
  for_each_cell([&](DType dtype, Reduce op) {
    for (size_t num_srcs = 1; num_srcs <= 5; ++num_srcs) {
      for (size_t count : {1, 7, 67, 261}) {
        std::vector<Bytes> inputs;
        for (size_t k = 0; k < num_srcs; ++k) inputs.push_back(sample(dtype, count, random));
        const Bytes expected = reference::reduce(dtype, op, factors, inputs, count);
        for (size_t num_dsts = 1; num_dsts <= 3; ++num_dsts) {
          for (Alias alias : {Alias::None, Alias::First, Alias::Last, Alias::All}) {
            const size_t shift = random() % 4;
            verify(nullptr, dtype, op, inputs, expected, factors, num_dsts, alias, shift);
            for (const Table* table : tables()) {
              verify(table, dtype, op, inputs, expected, factors, num_dsts, alias, shift);
            }
          }
        }
      }
    }
  });
}

TEST(every_cell_beyond_one_block) {
  std::minstd_rand random(12);
  const size_t count = 20011;
  for_each_cell([&](DType dtype, Reduce op) {
    for (size_t num_srcs : {1, 2, 3, 4}) {
      std::vector<Bytes> inputs;
      for (size_t k = 0; k < num_srcs; ++k) inputs.push_back(sample(dtype, count, random));
      const Bytes expected = reference::reduce(dtype, op, factors, inputs, count);
      for (const Table* table : tables()) {
        verify(table, dtype, op, inputs, expected, factors, 3, Alias::First, 1);
      }
    }
  });
}

TEST(a_range_may_be_cut_anywhere) {
  std::minstd_rand random(13);
  const size_t count = 333;
  for_each_cell([&](DType dtype, Reduce op) {
    std::vector<Bytes> inputs{sample(dtype, count, random), sample(dtype, count, random),
                              sample(dtype, count, random)};
    const size_t item = item_size(dtype);
    Bytes whole(count * item), pieces(count * item);
    const std::vector<const void*> srcs{inputs[0].data(), inputs[1].data(), inputs[2].data()};
    void* dsts[] = {whole.data()};
    reduce({dtype, op, factors}, dsts, srcs, count);
    for (size_t begin = 0, size; begin < count; begin += size) {
      size = std::min<size_t>(count - begin, 1 + random() % 90);
      std::vector<const void*> parts;
      for (const Bytes& input : inputs) parts.push_back(input.data() + begin * item);
      void* to[] = {pieces.data() + begin * item};
      reduce({dtype, op, factors}, to, parts, size);
    }
    CHECK_EQ(mismatches(dtype, pieces.data(), whole), size_t{0});
  });
}

// Multiplying by one leaves a value as it is: all 65536 halves pass through float and come back.
TEST(halves_survive_the_way_through_float) {
  std::vector<uint16_t> all(1 << 16);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  const double one = 1;
  for (const Table* table : tables()) {
    for (DType dtype : {DType::F16, DType::BF16}) {
      const uint16_t infinity = dtype == DType::F16 ? 0x7c00 : 0x7f80;
      std::vector<uint16_t> out(all.size());
      void* dst = out.data();
      const void* src = all.data();
      table->at(dtype, Reduce::PremulSum)(Operands{&dst, 1, &src, 1, all.size(), &one});
      for (size_t i = 0; i < all.size(); ++i) {
        const bool nan = (i & 0x7fff) > infinity;
        CHECK(nan ? (out[i] & 0x7fff) > infinity : out[i] == i);
      }
    }
  }
}

// Rounding, for floats between all neighbouring halves: half * factor is exact in float, so this
// hits the middle of each gap and a little to either side of it.
TEST(halves_round_to_nearest_even) {
  std::vector<uint16_t> all(1 << 16);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  for (const Table* table : tables()) {
    for (DType dtype : {DType::F16, DType::BF16}) {
      const Format format = dtype == DType::F16 ? half : brain;
      const double last = std::ldexp(1, -format.mantissa_bits - 1);
      const double steps[] = {1 + last,
                              1 + last * 1.0625,
                              1 + last * 0.9375,
                              1 - last / 2,
                              1 + last * 3,
                              0.5,
                              0.75,
                              0x1p-9,
                              0x1.8p-12,
                              0x1p10,
                              1.25,
                              0x1.fp-7};
      for (double factor : steps) {
        std::vector<uint16_t> out(all.size());
        void* dst = out.data();
        const void* src = all.data();
        table->at(dtype, Reduce::PremulSum)(Operands{&dst, 1, &src, 1, all.size(), &factor});
        Bytes expected(all.size() * 2);
        for (size_t i = 0; i < all.size(); ++i) {
          const auto wide = static_cast<float>(format.decode(all[i]));
          put<uint16_t>(expected, i, format.encode(wide * static_cast<float>(factor)));
        }
        CHECK_EQ(mismatches(dtype, reinterpret_cast<uint8_t*>(out.data()), expected), size_t{0});
      }
    }
  }
}

// Any float at all: one times a factor is that factor, in the vector loop and in what it leaves.
TEST(floats_of_any_bits_round_to_halves) {
  std::mt19937 random(15);
  for (DType dtype : {DType::F16, DType::BF16}) {
    const Format format = dtype == DType::F16 ? half : brain;
    const std::vector<uint16_t> ones(17, format.encode(1));
    const void* src = ones.data();
    for (int round = 0; round < 100000; ++round) {
      // A float read as double and back keeps its bits, but for the payload of a NaN.
      auto value = std::bit_cast<float>(static_cast<uint32_t>(random()));
      if (round % 2 == 1) value = std::ldexp(1 + (random() >> 8) * 0x1p-24f, round % 42 - 26);
      const double factor = value;
      Bytes expected(ones.size() * 2);
      for (size_t i = 0; i < ones.size(); ++i) put<uint16_t>(expected, i, format.encode(value));
      for (const Table* table : tables()) {
        uint16_t out[17];
        void* dst = out;
        table->at(dtype, Reduce::PremulSum)(Operands{&dst, 1, &src, 1, ones.size(), &factor});
        CHECK_EQ(mismatches(dtype, reinterpret_cast<uint8_t*>(out), expected), size_t{0});
      }
    }
  }
}

TEST(nan_wins_minimum_and_maximum) {
  const float nan = NAN;
  const float a[] = {nan, 1, nan, -0.0f}, b[] = {1, nan, nan, 5};
  for (const Table* table : tables()) {
    for (Reduce op : {Reduce::Min, Reduce::Max}) {
      float out[4];
      void* dst = out;
      const void* srcs[] = {a, b};
      table->at(DType::F32, op)(Operands{&dst, 1, srcs, 2, 4, nullptr});
      CHECK(std::isnan(out[0]) && std::isnan(out[1]) && std::isnan(out[2]));
      CHECK_EQ(out[3], op == Reduce::Min ? 0.0f : 5.0f);
    }
  }
}

TEST(bad_requests_are_refused) {
  float value = 1;
  void* dsts[] = {&value};
  const void* srcs[] = {&value, &value};
  CHECK_THROWS(reduce({DType::F32, Reduce::Band}, dsts, srcs, 1), Failure);
  CHECK_THROWS(reduce({DType::F8E5M2, Reduce::Sum}, dsts, srcs, 1), Failure);
  CHECK_THROWS(reduce({DType::Count, Reduce::Sum}, dsts, srcs, 1), Failure);
  CHECK_THROWS(reduce({DType::F32, Reduce::PremulSum}, dsts, srcs, 1), Failure);
  CHECK_THROWS(reduce({DType::F32, Reduce::Sum}, dsts, {}, 1), Failure);
  CHECK_EQ(value, 1.0f);
}

TEST(nothing_to_reduce) {
  float value = 3;
  void* dsts[] = {&value};
  const void* srcs[] = {&value, &value};
  reduce({DType::F32, Reduce::Sum}, dsts, srcs, 0);
  reduce({DType::F32, Reduce::Sum}, {}, srcs, 1);
  CHECK_EQ(value, 3.0f);
}

TEST(copies_of_any_size_and_alignment) {
  std::minstd_rand random(14);
  for (size_t bytes : {0, 1, 3, 63, 64, 65, 127, 128, 1000, 4096, 70001}) {
    for (size_t shift : {0, 1, 8, 33}) {
      for (size_t stream_from : {size_t{0}, stream_threshold}) {
        Bytes from(bytes);
        for (uint8_t& byte : from) byte = static_cast<uint8_t>(random() >> 8);
        Buffer source(from, 5), target(Bytes(bytes), shift);
        copy(target.data(), source.data(), bytes, stream_from);
        CHECK(target.intact());
        CHECK(bytes == 0 || std::memcmp(target.data(), from.data(), bytes) == 0);
        for (const Table* table : tables()) {
          std::fill_n(target.data(), bytes, uint8_t{0});
          table->stream(target.data(), source.data(), bytes);
          CHECK(target.intact());
          CHECK(bytes == 0 || std::memcmp(target.data(), from.data(), bytes) == 0);
        }
      }
    }
  }
  copy(nullptr, nullptr, 0);
}

TEST(names) {
  CHECK_EQ(std::string(name(DType::BF16)), "bfloat16");
  CHECK_EQ(std::string(name(DType::C128)), "complex128");
  CHECK_EQ(std::string(name(DType::F8E8M0FNU)), "float8_e8m0fnu");
  CHECK_EQ(std::string(name(Reduce::PremulSum)), "PREMUL_SUM");
}
