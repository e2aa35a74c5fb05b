// How close the kernels come to a loop written by hand and to memcpy. Not run by ctest:
//   cmake --build build/native-plain --target bench_kernels && build/native-plain/bench_kernels
// Rates count the bytes of one operand, best of several rounds; on a shared machine trust ratios.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "kernels.hpp"
#include "kernels_table.hpp"

using namespace phalanx;

namespace {

// One operand, on its own pages.
struct Memory {
  size_t bytes;
  uint8_t* data;
  explicit Memory(size_t bytes)
      : bytes(bytes), data(static_cast<uint8_t*>(operator new(bytes, std::align_val_t{4096}))) {
    std::memset(data, 0, bytes);
  }
  Memory(const Memory&) = delete;
  ~Memory() { operator delete(data, std::align_val_t{4096}); }
};

template <class Body>
double gigabytes_per_second(size_t bytes, Body body) {
  using Clock = std::chrono::steady_clock;
  const size_t repeats = std::max<size_t>(1, (size_t{16} << 20) / bytes);
  double best = 0;
  for (int round = 0; round < 7; ++round) {
    const auto start = Clock::now();
    for (size_t i = 0; i < repeats; ++i) body();
    const std::chrono::duration<double> took = Clock::now() - start;
    best = std::max(best, static_cast<double>(bytes * repeats) / took.count() / 1e9);
  }
  return best;
}

#if PHALANX_X86_VARIANTS
#define BEST_TARGET __attribute__((noinline, target("avx512f,prefer-vector-width=512")))
#else
#define BEST_TARGET __attribute__((noinline))
#endif

// What a kernel has to measure up to; on machines without AVX-512 it is not called.
BEST_TARGET void add_by_hand(float* __restrict a, const float* __restrict b, size_t count) {
  for (size_t i = 0; i < count; ++i) a[i] += b[i];
}

void rates(size_t bytes) {
  Memory a(bytes), b(bytes), c(bytes), d(bytes);
  const void* srcs[] = {a.data, b.data, c.data, d.data};
  const auto run = [&](const Table& table, DType dtype, Reduce op, std::vector<void*> dsts,
                       size_t num_srcs) {
    const double factors[] = {1, 1, 1, 1};
    const Operands job{dsts.data(), dsts.size(), srcs, num_srcs, bytes / item_size(dtype), factors};
    return gigabytes_per_second(bytes, [&] { table.at(dtype, op)(job); });
  };
  std::printf("\n%zu KiB per operand\n", bytes >> 10);
  std::printf("  memcpy                  %7.1f\n",
              gigabytes_per_second(bytes, [&] { std::memcpy(c.data, a.data, bytes); }));
  std::printf("  stream                  %7.1f\n",
              gigabytes_per_second(bytes, [&] { tables()[0]->stream(c.data, a.data, bytes); }));
  if (!PHALANX_X86_VARIANTS || std::strcmp(tables()[0]->isa, "avx512") == 0) {
    std::printf("  a += b by hand          %7.1f\n", gigabytes_per_second(bytes, [&] {
                  add_by_hand(reinterpret_cast<float*>(a.data), reinterpret_cast<float*>(b.data),
                              bytes / sizeof(float));
                }));
  }
  for (const Table* table : tables()) {
    std::printf("  %-10s%14s%9s%9s%9s%9s\n", table->isa, "2 to same", "2 to both", "2 to new",
                "2 to 2new", "4 to all");
    for (DType dtype : {DType::F32, DType::F64, DType::BF16, DType::F16}) {
      for (Reduce op : {Reduce::Sum, Reduce::Avg}) {
        std::printf(
            "    %-10s%-10s%7.1f%9.1f%9.1f%9.1f%9.1f\n", name(dtype), name(op),
            run(*table, dtype, op, {a.data}, 2), run(*table, dtype, op, {a.data, b.data}, 2),
            run(*table, dtype, op, {c.data}, 2), run(*table, dtype, op, {c.data, d.data}, 2),
            run(*table, dtype, op, {a.data, b.data, c.data, d.data}, 4));
      }
    }
  }
}

void overhead() {
  Memory a(4096), b(4096);
  const void* srcs[] = {a.data, b.data};
  void* dsts[] = {a.data, b.data};
  std::printf("nanoseconds per call of reduce, 2 sources to both\n");
  for (DType dtype : {DType::F32, DType::BF16, DType::F16}) {
    for (size_t bytes : {8, 64, 1024}) {
      const double rate = gigabytes_per_second(
          bytes, [&] { reduce({dtype, Reduce::Sum}, dsts, srcs, bytes / item_size(dtype)); });
      std::printf("  %-10s%5zu bytes %7.1f\n", name(dtype), bytes,
                  static_cast<double>(bytes) / rate);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) {
    for (int i = 1; i < argc; ++i) rates(std::strtoull(argv[i], nullptr, 10) << 10);
    return 0;
  }
  overhead();
  for (size_t kib : {64, 1024, 4096, 65536}) rates(kib << 10);
}
