#include "copies.hpp"

#include <algorithm>

#include "kernels.hpp"

namespace phalanx {
namespace {

// What is measured and then copied while it is in the first-level cache.
constexpr size_t kBlock = 16 << 10;

double copy_measured(DType dtype, std::byte* to, const std::byte* from, size_t count) {
  const size_t item = item_size(dtype), block = kBlock / item;
  const size_t stream_from = count * item < stream_threshold ? stream_threshold : 0;
  double sum = 0;
  for (size_t begin = 0; begin < count; begin += block) {
    const size_t size = std::min(block, count - begin);
    sum += sum_of_squares(dtype, from + begin * item, size);
    if (to != from) phalanx::copy(to + begin * item, from + begin * item, size * item, stream_from);
  }
  return sum;
}

}  // namespace

void copy_all(std::span<const Transfer> transfers, double* squares) {
  std::unique_ptr<std::byte[]> scratch;
  size_t room = 0;
  for (size_t i = 0; i < transfers.size(); ++i) {
    const auto& [dtype, to, from] = transfers[i];
    const size_t item = item_size(dtype), bytes = from.count * item;
    if (!to.layout && !from.layout) {
      if (squares)
        squares[i] = copy_measured(dtype, to.data, from.data, from.count);
      else if (to.data != from.data)
        phalanx::copy(to.data, from.data, bytes);
      continue;
    }
    std::byte* dense = !from.layout ? from.data : to.data;
    if (from.layout && to.layout) {
      if (room < bytes) scratch.reset(new std::byte[room = bytes]);
      dense = scratch.get();
    }
    if (from.layout) pack(dense, from.data, *from.layout, item);
    if (squares) squares[i] = sum_of_squares(dtype, dense, from.count);
    if (to.layout) unpack(to.data, dense, *to.layout, item);
  }
}

}  // namespace phalanx
