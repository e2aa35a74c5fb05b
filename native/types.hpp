// Small values used by the whole core: element types, reductions, operations.
#pragma once

#include <cstddef>
#include <cstdint>

namespace phalanx {

// The numbers are part of the protocol between ranks and are mirrored in types.py.
enum class DType : uint8_t {
  Bool,
  U8,
  I8,
  U16,
  I16,
  U32,
  I32,
  U64,
  I64,
  F16,
  BF16,
  F32,
  F64,
  C64,
  C128,
  F8E4M3FN,
  F8E5M2,
  F8E4M3FNUZ,
  F8E5M2FNUZ,
  F8E8M0FNU,
  Count
};

enum class Reduce : uint8_t { Sum, Avg, Product, Min, Max, Band, Bor, Bxor, PremulSum, Count };

constexpr size_t item_size(DType dtype) {
  constexpr uint8_t sizes[] = {1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 8, 16, 1, 1, 1, 1, 1};
  return sizes[static_cast<size_t>(dtype)];
}

}  // namespace phalanx
