// Tile products and row conversions on every instruction set, ragged sizes, against plain loops in
// double.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <vector>

#include "cpu/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/tiles_test.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "cpu/rows-inl.h"
#include "cpu/tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fenwick::cpu {
namespace HWY_NAMESPACE {

// A tile with random values and NaN in the padding.
template <typename T>
struct RandomTile {
  RandomTile(int64_t rows, int64_t columns, std::mt19937& rng, int64_t extra_rows = 0)
      : ld(TileLd<T>(columns)),
        data((rows + extra_rows) * ld, std::numeric_limits<T>::quiet_NaN()) {
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) at(i, j) = static_cast<T>(normal(rng));
    }
  }
  T& at(int64_t i, int64_t j) { return data[i * ld + j]; }
  int64_t ld;
  std::vector<T> data;
};

template <typename T, Op kOp>
void CheckMatMul(int64_t m, int64_t n, int64_t depth, std::mt19937& rng) {
  SCOPED_TRACE(testing::Message() << m << " " << n << " " << depth << " op " << int(kOp));
  RandomTile<T> a(kOp == Op::kNone ? m : depth, kOp == Op::kNone ? depth : m, rng);
  RandomTile<T> b(depth, n, rng), c(m, n, rng), scale(1, m, rng);
  RandomTile<T> old = c;
  MatMul<kOp>(m, n, depth, a.data.data(), a.ld, b.data.data(), b.ld, c.data.data(), c.ld,
              Epilogue<T>{.beta = static_cast<T>(0.5), .row_scale = scale.data.data()});
  double error = 0, norm = 0;
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t p = 0; p < depth; ++p) {
        sum += double(kOp == Op::kNone ? a.at(i, p) : a.at(p, i)) * b.at(p, j);
      }
      const double expected = 0.5 * old.at(i, j) + scale.at(0, i) * sum;
      error += std::pow(c.at(i, j) - expected, 2);
      norm += std::pow(0.5 * old.at(i, j), 2) + std::pow(scale.at(0, i) * sum, 2);
    }
  }
  EXPECT_LE(std::sqrt(error / norm), sizeof(T) == 4 ? 1e-6 : 1e-14);
}

template <typename T>
void CheckTriangles(int64_t n, int64_t columns, std::mt19937& rng) {
  SCOPED_TRACE(testing::Message() << n << " " << columns);
  RandomTile<T> a(n, n, rng), b(n, columns, rng), c(n, columns, rng), ct(n, columns, rng);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = i + 1; j < n; ++j) a.at(i, j) = 0;
  }
  MatMulLower<T>(n, columns, a.data.data(), a.ld, b.data.data(), b.ld, c.data.data(), c.ld, 0);
  MatMulLowerTransposed<T>(n, columns, a.data.data(), a.ld, b.data.data(), b.ld, ct.data.data(),
                           ct.ld, 0);
  RandomTile<T> bt(columns, n, rng), s(n, n, rng);
  Transpose(n, columns, b.data.data(), b.ld, bt.data.data(), bt.ld);
  MatMulToLower<T>(n, columns, c.data.data(), c.ld, bt.data.data(), bt.ld, s.data.data(), s.ld);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      double sum = 0, sum_t = 0;
      for (int64_t p = 0; p < n; ++p) {
        sum += double(a.at(i, p)) * b.at(p, j);
        sum_t += double(a.at(p, i)) * b.at(p, j);
      }
      EXPECT_NEAR(c.at(i, j), sum, 1e-4);
      EXPECT_NEAR(ct.at(i, j), sum_t, 1e-4);
    }
    for (int64_t j = 0; j <= i; ++j) {
      double sum = 0;
      for (int64_t p = 0; p < columns; ++p) sum += double(c.at(i, p)) * b.at(j, p);
      EXPECT_NEAR(s.at(i, j), sum, 1e-3);
    }
  }
}

template <typename T>
void CheckTiles(unsigned seed) {
  std::mt19937 rng(seed);
  for (const auto& [m, n, depth] : std::vector<std::array<int64_t, 3>>{{1, 1, 1},
                                                                       {64, 64, 128},
                                                                       {63, 65, 1},
                                                                       {5, 7, 9},
                                                                       {17, 33, 300},
                                                                       {64, 100, 513},
                                                                       {13, 16, 64}}) {
    CheckMatMul<T, Op::kNone>(m, n, depth, rng);
    CheckMatMul<T, Op::kTranspose>(m, n, depth, rng);
  }
  for (const int64_t n : {1, 15, 16, 33, 64}) CheckTriangles<T>(n, 20, rng);
  alignas(64) T y[16];
  for (int i = 0; i < 16; ++i) y[i] = static_cast<T>(i == 15 ? -INFINITY : -i * i);
  ExpVector<T>(16, y);
  for (int i = 0; i < 16; ++i) {
    const double expected = i == 15 ? 0 : std::exp(-double(i) * i);
    EXPECT_NEAR(y[i], expected, (sizeof(T) == 4 ? 1e-6 : 1e-15) * expected + 1e-44);
  }
}

void CheckTilesFloat(unsigned seed) { CheckTiles<float>(seed); }
void CheckTilesDouble(unsigned seed) { CheckTiles<double>(seed); }

// bfloat16 has 8 significant bits, float16 11; rows are written and read without touching what is
// beyond.
void CheckRows(unsigned seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const int64_t columns : {1, 7, 8, 31, 64}) {
      std::vector<float> in(PaddedColumns<float>(columns), NAN), out = in;
      for (int64_t j = 0; j < columns; ++j) in[j] = normal(rng);
      std::vector<std::byte> storage(columns * ElementSize(dtype));
      StoreRow(dtype, in.data(), columns, storage.data());
      LoadRow(dtype, storage.data(), columns, out.data());
      const double unit = dtype == DType::kFloat32    ? 0
                          : dtype == DType::kBFloat16 ? std::ldexp(1, -8)
                                                      : std::ldexp(1, -11);
      for (int64_t j = 0; j < columns; ++j) {
        EXPECT_LE(std::abs(in[j] - out[j]), std::abs(in[j]) * unit * 1.001 + 1e-7);
      }
      for (size_t j = columns; j < out.size(); ++j) EXPECT_EQ(out[j], 0);
    }
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fenwick::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "each_target.h"

namespace fenwick::cpu {

HWY_EXPORT(CheckTilesFloat);
HWY_EXPORT(CheckTilesDouble);
HWY_EXPORT(CheckRows);

unsigned Seed() {
  const unsigned seed = std::random_device{}();
  std::printf("seed %u\n", seed);
  return seed;
}

TEST(Tiles, FloatAgreesWithLoops) {
  ForEachTarget([seed = Seed()](const char*) { HWY_DYNAMIC_DISPATCH(CheckTilesFloat)(seed); });
}

TEST(Tiles, DoubleAgreesWithLoops) {
  ForEachTarget([seed = Seed()](const char*) { HWY_DYNAMIC_DISPATCH(CheckTilesDouble)(seed); });
}

TEST(Rows, RoundTrip) {
  ForEachTarget([seed = Seed()](const char*) { HWY_DYNAMIC_DISPATCH(CheckRows)(seed); });
}

}  // namespace fenwick::cpu
#endif  // HWY_ONCE
