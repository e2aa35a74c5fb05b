#include "kernels.hpp"

#include <cstring>
#include <string>

#include "failure.hpp"
#include "kernels_table.hpp"

namespace phalanx {

namespace {

struct Available {
  const Table* tables[3];
  size_t count = 0;

  Available() {
#if PHALANX_X86_VARIANTS
    __builtin_cpu_init();  // may run before the constructor that does this
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      tables[count++] = &avx512::table;
    }
    if (has_avx2) tables[count++] = &avx2::table;
#endif
    tables[count++] = &baseline::table;
  }
};

const Available available;

bool known(DType dtype, Reduce op) { return dtype < DType::Count && op < Reduce::Count; }

// One source: what it is stays as it is, but for these.
bool normalises(DType dtype, Reduce op) { return dtype == DType::Bool || op == Reduce::PremulSum; }

}  // namespace

std::span<const Table* const> tables() { return {available.tables, available.count}; }

const char* instructions() { return tables().front()->isa; }

const char* name(DType dtype) {
  constexpr const char* names[] = {"bool",
                                   "uint8",
                                   "int8",
                                   "uint16",
                                   "int16",
                                   "uint32",
                                   "int32",
                                   "uint64",
                                   "int64",
                                   "float16",
                                   "bfloat16",
                                   "float32",
                                   "float64",
                                   "complex64",
                                   "complex128",
                                   "float8_e4m3fn",
                                   "float8_e5m2",
                                   "float8_e4m3fnuz",
                                   "float8_e5m2fnuz",
                                   "float8_e8m0fnu"};
  static_assert(std::size(names) == static_cast<size_t>(DType::Count));
  return dtype < DType::Count ? names[static_cast<size_t>(dtype)] : "unknown dtype";
}

const char* name(Reduce op) {
  constexpr const char* names[] = {"SUM",  "AVG", "PRODUCT", "MIN",       "MAX",
                                   "BAND", "BOR", "BXOR",    "PREMUL_SUM"};
  static_assert(std::size(names) == static_cast<size_t>(Reduce::Count));
  return op < Reduce::Count ? names[static_cast<size_t>(op)] : "unknown reduction";
}

bool reducible(DType dtype, Reduce op) {
  return known(dtype, op) && baseline::table.at(dtype, op) != nullptr;
}

void reduce(const Reduction& reduction, std::span<void* const> dsts,
            std::span<const void* const> srcs, size_t count) {
  const auto [dtype, op, factors] = reduction;
  if (!reducible(dtype, op)) {
    throw Failure(Kind::Invalid, std::string(name(op)) + " is not defined for " + name(dtype));
  }
  if (srcs.empty()) throw Failure(Kind::Invalid, "a reduction needs at least one source");
  if (op == Reduce::PremulSum && factors == nullptr) {
    throw Failure(Kind::Invalid, "PREMUL_SUM needs one factor per source");
  }
  if (srcs.size() == 1 && !normalises(dtype, op)) {
    for (void* dst : dsts) {
      if (dst != srcs[0]) copy(dst, srcs[0], count * item_size(dtype));
    }
    return;
  }
  if (dsts.empty() || count == 0) return;
  available.tables[0]->at(
      dtype, op)(Operands{dsts.data(), dsts.size(), srcs.data(), srcs.size(), count, factors});
}

bool measurable(DType dtype) {
  return dtype < DType::Count && baseline::table.squares_of(dtype) != nullptr;
}

double sum_of_squares(DType dtype, const void* data, size_t count) {
  if (!measurable(dtype)) {
    throw Failure(Kind::Invalid, std::string("a sum of squares is not defined for ") + name(dtype));
  }
  return available.tables[0]->squares_of(dtype)(data, count);
}

void copy(void* dst, const void* src, size_t bytes, size_t stream_from) {
  if (bytes >= stream_from) return available.tables[0]->stream(dst, src, bytes);
  if (bytes != 0) std::memcpy(dst, src, bytes);  // with no bytes the pointers may be null
}

}  // namespace phalanx
