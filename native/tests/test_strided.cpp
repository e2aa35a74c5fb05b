#include <algorithm>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <numeric>
#include <random>
#include <vector>

#include "check.hpp"
#include "failure.hpp"
#include "strided.hpp"

using namespace phalanx;

namespace {

Layout make(std::initializer_list<int64_t> shape, std::initializer_list<int64_t> stride) {
  Layout layout;
  for (int64_t size : shape) layout.shape[layout.ndim++] = size;
  std::copy(stride.begin(), stride.end(), layout.stride);
  return layout;
}

int64_t numel(const Layout& layout) {
  return std::accumulate(layout.shape, layout.shape + layout.ndim, int64_t{1}, std::multiplies<>());
}

// The offset of the n-th element in row-major order, in elements.
int64_t offset(const Layout& layout, int64_t n) {
  int64_t at = 0;
  for (int d = layout.ndim - 1; d >= 0; --d) {
    at += n % layout.shape[d] * layout.stride[d];
    n /= layout.shape[d];
  }
  return at;
}

// Pack, compare with the definition, unpack elsewhere: only the elements of the layout change.
void verify(const Layout& layout) {
  const int64_t count = numel(layout);
  int64_t low = 0, high = 0;
  bool shares = false;
  for (int d = 0; d < layout.ndim; ++d) {
    const int64_t reach = (layout.shape[d] - 1) * layout.stride[d];
    (reach < 0 ? low : high) += reach;
    shares = shares || (layout.stride[d] == 0 && layout.shape[d] > 1);
  }
  if (count == 0) low = high = 0;
  for (size_t item : {1, 2, 4, 8, 16}) {
    std::vector<uint8_t> memory((high - low + 1) * item);
    std::minstd_rand random(7);
    for (uint8_t& byte : memory) byte = static_cast<uint8_t>(random());
    uint8_t* const origin = memory.data() - low * static_cast<int64_t>(item);

    std::vector<uint8_t> dense(count * item);
    pack(dense.data(), origin, layout, item);
    for (int64_t n = 0; n < count; ++n) {
      const uint8_t* expected = origin + offset(layout, n) * static_cast<int64_t>(item);
      CHECK(std::memcmp(dense.data() + n * item, expected, item) == 0);
    }

    if (shares) continue;
    std::vector<uint8_t> copy(memory.size(), 0xee), expected = copy;
    for (int64_t n = 0; n < count; ++n) {
      const int64_t at = (offset(layout, n) - low) * static_cast<int64_t>(item);
      std::memcpy(expected.data() + at, dense.data() + n * item, item);
    }
    unpack(copy.data() - low * static_cast<int64_t>(item), dense.data(), layout, item);
    CHECK(copy == expected);
  }
}

}  // namespace

TEST(scalar_and_empty) {
  verify(make({}, {}));
  verify(make({1, 1}, {5, 9}));
  verify(make({0}, {1}));
  verify(make({3, 0, 2}, {2, 2, 1}));
}

TEST(contiguous) {
  verify(make({1000}, {1}));
  verify(make({5, 7, 11}, {77, 11, 1}));
  verify(make({5, 1, 11}, {11, 123, 1}));
}

TEST(rows_columns_and_steps) {
  verify(make({9, 5}, {16, 1}));
  verify(make({33}, {3}));
  verify(make({6, 5, 4}, {100, 8, 2}));
  verify(make({4, 6, 5}, {60, 10, 2}));  // one step after coalescing
}

TEST(transposes) {
  verify(make({100, 70}, {1, 100}));
  verify(make({17, 130}, {1, 19}));
  verify(make({3, 40, 50}, {2000, 1, 40}));
  verify(make({2, 3, 16, 21}, {1008, 1, 63, 3}));  // channels last
  verify(make({7, 5, 6, 4}, {1, 7, 35, 210}));     // all reversed
}

TEST(expanded_and_reversed) {
  verify(make({10, 6}, {0, 1}));
  verify(make({10, 6}, {1, 0}));
  verify(make({4, 10, 6}, {0, 0, 0}));
  verify(make({10, 6}, {6, -1}));
  verify(make({10, 6}, {-1, 10}));
}

TEST(random_permutations_and_slices) {
  std::minstd_rand random(3);
  for (int round = 0; round < 200; ++round) {
    Layout layout;
    layout.ndim = 1 + random() % 5;
    int order[5] = {0, 1, 2, 3, 4};
    std::shuffle(order, order + layout.ndim, random);
    int64_t stride = 1;
    for (int k = 0; k < layout.ndim; ++k) {
      const int d = order[k];
      layout.shape[d] = 1 + random() % 6;
      layout.stride[d] = stride * (1 + (random() % 4 == 0));
      stride = layout.stride[d] * (layout.shape[d] + (random() % 3 == 0));
    }
    verify(layout);
  }
}

TEST(many_dimensions) {
  Layout layout;
  layout.ndim = Layout::max_ndim;
  for (int d = 0; d < layout.ndim; ++d) {
    const bool wide = d % 7 == 0;
    layout.shape[d] = wide ? 2 : 1;
    layout.stride[d] = wide ? int64_t{1} << (d / 7) : 3;
  }
  verify(layout);
}

TEST(unknown_item_size) {
  uint8_t byte = 0;
  CHECK_THROWS(pack(&byte, &byte, make({1}, {1}), 3), Failure);
}
