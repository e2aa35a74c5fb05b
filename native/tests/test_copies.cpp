// Sums of squares in every variant this machine runs, and copies of many tensors.
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "check.hpp"
#include "copies.hpp"
#include "failure.hpp"
#include "kernels.hpp"
#include "kernels_table.hpp"
#include "reference.hpp"

using namespace phalanx;
using reference::brain;
using reference::Bytes;
using reference::get;
using reference::half;
using reference::put;

namespace {

constexpr DType floats[] = {DType::F16, DType::BF16, DType::F32,
                            DType::F64, DType::C64,  DType::C128};

// Real numbers in an element, each of this many bytes.
size_t parts_of(DType dtype) { return dtype == DType::C64 || dtype == DType::C128 ? 2 : 1; }

void put_value(DType dtype, Bytes& bytes, size_t i, double value) {
  switch (item_size(dtype) / parts_of(dtype)) {
    case 2:
      return put<uint16_t>(bytes, i, (dtype == DType::F16 ? half : brain).encode(value));
    case 4:
      return put<float>(bytes, i, static_cast<float>(value));
    default:
      return put<double>(bytes, i, value);
  }
}

double get_value(DType dtype, const Bytes& bytes, size_t i) {
  switch (item_size(dtype) / parts_of(dtype)) {
    case 2:
      return (dtype == DType::F16 ? half : brain).decode(get<uint16_t>(bytes, i));
    case 4:
      return get<float>(bytes, i);
    default:
      return get<double>(bytes, i);
  }
}

Bytes sample(DType dtype, size_t count, std::minstd_rand& random) {
  Bytes bytes(count * item_size(dtype));
  for (size_t i = 0; i < count * parts_of(dtype); ++i)
    put_value(dtype, bytes, i, (static_cast<double>(random() % 20001) - 10000) / 1024);
  return bytes;
}

double expected_squares(DType dtype, const Bytes& bytes) {
  long double sum = 0;
  for (size_t i = 0; i < bytes.size() / item_size(dtype) * parts_of(dtype); ++i) {
    const long double value = get_value(dtype, bytes, i);
    sum += value * value;
  }
  return static_cast<double>(sum);
}

bool close(double a, double b) { return std::abs(a - b) <= 1e-13 * std::abs(b); }

View view(Bytes& bytes, size_t count) {
  return {reinterpret_cast<std::byte*>(bytes.data()), count, nullptr};
}

}  // namespace

TEST(squares_are_right_and_the_same_bits_in_every_variant) {
  std::minstd_rand random(21);
  for (DType dtype : floats) {
    for (size_t count : {0, 1, 2, 7, 31, 32, 33, 67, 1023, 1024, 1025, 20011}) {
      const Bytes bytes = sample(dtype, count, random);
      const double sum = sum_of_squares(dtype, bytes.data(), count);
      CHECK(close(sum, expected_squares(dtype, bytes)));
      for (const Table* table : tables()) {
        const double each = table->squares_of(dtype)(bytes.data(), count);
        CHECK_EQ(std::bit_cast<uint64_t>(each), std::bit_cast<uint64_t>(sum));
      }
    }
  }
}

TEST(squares_of_every_half) {
  for (DType dtype : {DType::F16, DType::BF16}) {
    const uint16_t infinity = dtype == DType::F16 ? 0x7c00 : 0x7f80;
    for (uint32_t bits = 0; bits < 1 << 16; bits += 7) {
      const uint32_t magnitude = bits & 0x7fff;
      Bytes bytes(2 * 41);
      for (size_t i = 0; i < 41; ++i) put<uint16_t>(bytes, i, static_cast<uint16_t>(bits));
      for (const Table* table : tables()) {
        const double sum = table->squares_of(dtype)(bytes.data(), 41);
        if (magnitude > infinity) CHECK(std::isnan(sum));
        if (magnitude == infinity) CHECK(std::isinf(sum));
        if (magnitude < infinity) CHECK(close(sum, expected_squares(dtype, bytes)));
      }
    }
  }
}

TEST(squares_of_what_is_not_finite_and_of_the_largest) {
  for (const Table* table : tables()) {
    for (size_t at : {size_t{0}, size_t{31}, size_t{64}, size_t{70}}) {
      std::vector<float> values(71, std::numeric_limits<float>::max());
      const auto sum = [&] { return table->squares_of(DType::F32)(values.data(), values.size()); };
      CHECK(std::isfinite(sum()));
      values[at] = -INFINITY;
      CHECK_EQ(sum(), double{INFINITY});
      values[at] = NAN;
      CHECK(std::isnan(sum()));
    }
  }
}

TEST(integers_are_not_measured) {
  const int64_t value = 3;
  CHECK(!measurable(DType::I64));
  CHECK(!measurable(DType::F8E5M2));
  CHECK(!measurable(DType::Count));
  CHECK_THROWS(sum_of_squares(DType::I64, &value, 1), Failure);
}

TEST(dense_tensors_are_copied_and_measured_on_the_way) {
  std::minstd_rand random(22);
  for (DType dtype : floats) {
    for (bool measure : {false, true}) {
      const size_t counts[] = {0, 1, 1000, 16384, 40003};
      std::vector<Bytes> from, to;
      for (size_t count : counts) {
        from.push_back(sample(dtype, count, random));
        to.emplace_back(count * item_size(dtype));
      }
      std::vector<Transfer> transfers;
      for (size_t i = 0; i < std::size(counts); ++i)
        transfers.push_back({dtype, view(to[i], counts[i]), view(from[i], counts[i])});
      std::vector<double> squares(std::size(counts), -1);
      copy_all(transfers, measure ? squares.data() : nullptr);
      for (size_t i = 0; i < std::size(counts); ++i) {
        CHECK(to[i] == from[i]);
        CHECK(measure ? close(squares[i], expected_squares(dtype, from[i])) : squares[i] == -1);
      }
    }
  }
}

TEST(a_tensor_that_is_in_its_place_is_measured_only) {
  std::vector<float> values(10000, 3);
  const View there{reinterpret_cast<std::byte*>(values.data()), values.size(), nullptr};
  const Transfer transfer{DType::F32, there, there};
  double squares = 0;
  copy_all({&transfer, 1}, nullptr);
  copy_all({&transfer, 1}, &squares);
  CHECK_EQ(squares, 90000.0);
  CHECK(values == std::vector<float>(10000, 3));
}

TEST(layouts_are_followed_on_both_sides) {
  constexpr int64_t rows = 37, columns = 53;
  const auto by_rows = std::make_shared<Layout>(Layout{2, {rows, columns}, {columns + 3, 1}});
  const auto by_columns = std::make_shared<Layout>(Layout{2, {rows, columns}, {1, rows}});
  const std::shared_ptr<Layout> layouts[] = {nullptr, by_rows, by_columns};
  const auto at = [](const Layout* layout, int64_t row, int64_t column) {
    return layout ? row * layout->stride[0] + column * layout->stride[1] : row * columns + column;
  };
  for (const auto& source : layouts) {
    for (const auto& target : layouts) {
      std::vector<float> from(rows * (columns + 3)), to(from.size());
      double expected = 0;
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) {
          const auto value = static_cast<float>(i * columns + j);
          from[static_cast<size_t>(at(source.get(), i, j))] = value;
          expected += value * static_cast<double>(value);
        }
      const Transfer transfer{DType::F32,
                              {reinterpret_cast<std::byte*>(to.data()), rows * columns, target},
                              {reinterpret_cast<std::byte*>(from.data()), rows * columns, source}};
      double squares = 0;
      copy_all({&transfer, 1}, &squares);
      CHECK(close(squares, expected));
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j)
          CHECK_EQ(to[static_cast<size_t>(at(target.get(), i, j))],
                   static_cast<float>(i * columns + j));
    }
  }
}
