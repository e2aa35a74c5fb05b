#include "strided.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "failure.hpp"

namespace phalanx {

namespace {

// One loop of the nest: how far each index step moves on both sides, in elements.
struct Dim {
  int64_t size;
  int64_t dense;
  int64_t strided;
};

// The fewest loops that walk a layout, outermost first.
struct Nest {
  Dim dims[Layout::max_ndim];
  int ndim = 0;
  bool empty = false;

  explicit Nest(const Layout& layout) {
    int64_t dense = 1;
    for (int d = layout.ndim - 1; d >= 0; --d) {
      const int64_t size = layout.shape[d];
      const int64_t strided = layout.stride[d];
      if (size == 0) empty = true;
      if (size == 1) continue;
      Dim* inner = ndim > 0 ? &dims[ndim - 1] : nullptr;
      if (inner != nullptr && strided == inner->strided * inner->size) {
        inner->size *= size;
      } else {
        dims[ndim++] = {size, dense, strided};
      }
      dense *= size;
    }
    std::reverse(dims, dims + ndim);
  }
};

// A 16-byte element without the alignment that a 16-byte integer would claim.
struct Wide {
  uint64_t parts[2];
};

template <class T, bool packing>
struct Mover {
  // The side that is read is never written through.
  T* dense;
  T* strided;

  void one(int64_t at_dense, int64_t at_strided) const {
    if constexpr (packing) {
      dense[at_dense] = strided[at_strided];
    } else {
      strided[at_strided] = dense[at_dense];
    }
  }

  void line(const Dim& dim, int64_t at_dense, int64_t at_strided) const {
    if (dim.dense == 1 && dim.strided == 1) {
      T* const to = packing ? dense + at_dense : strided + at_strided;
      const T* const from = packing ? strided + at_strided : dense + at_dense;
      std::memcpy(to, from, static_cast<size_t>(dim.size) * sizeof(T));
      return;
    }
    for (int64_t i = 0; i < dim.size; ++i)
      one(at_dense + i * dim.dense, at_strided + i * dim.strided);
  }

  // Two loops whose short steps are on different sides, as in a transpose: in tiles, so that a
  // cache line is used whole while it is near.
  void plane(const Dim& outer, const Dim& inner, int64_t at_dense, int64_t at_strided) const {
    constexpr int64_t tile = 32;
    for (int64_t i = 0; i < outer.size; i += tile) {
      for (int64_t j = 0; j < inner.size; j += tile) {
        const int64_t rows = std::min(tile, outer.size - i);
        const Dim part{std::min(tile, inner.size - j), inner.dense, inner.strided};
        for (int64_t row = i; row < i + rows; ++row) {
          line(part, at_dense + row * outer.dense + j * inner.dense,
               at_strided + row * outer.strided + j * inner.strided);
        }
      }
    }
  }

  void walk(const Dim* dims, int ndim, int64_t at_dense, int64_t at_strided) const {
    if (ndim == 0) return one(at_dense, at_strided);
    if (ndim == 1) return line(dims[0], at_dense, at_strided);
    const bool transposed = std::abs(dims[0].strided) < std::abs(dims[1].strided);
    if (ndim == 2 && transposed) {
      // Short steps where it writes: stores wait for their lines, loads are fetched ahead.
      return packing ? plane(dims[0], dims[1], at_dense, at_strided)
                     : plane(dims[1], dims[0], at_dense, at_strided);
    }
    for (int64_t i = 0; i < dims[0].size; ++i) {
      walk(dims + 1, ndim - 1, at_dense + i * dims[0].dense, at_strided + i * dims[0].strided);
    }
  }

  void run(Nest nest) const {
    if (nest.empty) return;
    // The loop with the shortest steps on the strided side belongs next to the innermost one.
    if (nest.ndim > 2) {
      Dim* const last = nest.dims + nest.ndim - 1;
      Dim* const nearest = std::min_element(nest.dims, last, [](const Dim& a, const Dim& b) {
        return std::abs(a.strided) < std::abs(b.strided);
      });
      if (std::abs(nearest->strided) < std::abs(last->strided)) {
        std::rotate(nearest, nearest + 1, last);
      }
    }
    walk(nest.dims, nest.ndim, 0, 0);
  }
};

template <bool packing>
void move(void* dense, void* strided, const Layout& layout, size_t item) {
  const Nest nest(layout);
  const auto run = [&]<class T>(T) {
    Mover<T, packing>{static_cast<T*>(dense), static_cast<T*>(strided)}.run(nest);
  };
  switch (item) {
    case 1:
      return run(uint8_t{});
    case 2:
      return run(uint16_t{});
    case 4:
      return run(uint32_t{});
    case 8:
      return run(uint64_t{});
    case 16:
      return run(Wide{});
    default:
      throw Failure(Kind::Invalid, "cannot copy elements of " + std::to_string(item) +
                                       " bytes (known sizes: 1, 2, 4, 8, 16)");
  }
}

}  // namespace

void pack(void* dense, const void* strided, const Layout& layout, size_t item) {
  move<true>(dense, const_cast<void*>(strided), layout, item);
}

void unpack(void* strided, const void* dense, const Layout& layout, size_t item) {
  move<false>(const_cast<void*>(dense), strided, layout, item);
}

}  // namespace phalanx
