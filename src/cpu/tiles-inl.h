// Small dense products on tiles: C = beta C + diag(row_scale) op(A) B, and the elementwise helpers
// around them, for one instruction set at a time (Highway).
//
// A tile is row-major with a leading dimension from TileLd(columns). Its columns are padded to
// whole vectors: elements between `columns` and the padded width may hold anything, are read and
// are overwritten, and never reach a valid element. So no kernel here has a masked tail. Memory of
// tensors is never touched here; rows-inl.h moves rows between tensors and tiles.
//
// A result's bits depend on the tile's values alone, not on the number of rows computed with it:
// every element is one chain of multiply-adds in order of depth.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/tile_layout.h"

#if defined(FENWICK_CPU_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FENWICK_CPU_TILES_INL_H_
#undef FENWICK_CPU_TILES_INL_H_
#else
#define FENWICK_CPU_TILES_INL_H_
#endif

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fenwick::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Rows of C held in registers: 6 x 2 vectors fill 16 registers (with two of B and one of A), 12 x 2
// suit the 32 registers of AVX-512 and Neon.
#if HWY_TARGET <= HWY_AVX3 || HWY_TARGET == HWY_NEON
inline constexpr int kMicroRows = 12;
#else
inline constexpr int kMicroRows = 6;
#endif
// Depth of one pass: kDepthBlock rows of two vectors of B (16 KB) stay in the first-level cache.
inline constexpr int64_t kDepthBlock = 256;

// How the matrix A is stored: op(A) = A [rows, depth], or op(A) = A^T with A [depth, rows].
enum class Op { kNone, kTranspose };

// What happens to the old C and to the rows of the product.
template <typename T>
struct Epilogue {
  T beta = 0;                    // 0: C is not read
  const T* row_scale = nullptr;  // [rows] or null for 1
};

template <int kRows, int kVectors, Op kOp, class D, typename T = hn::TFromD<D>>
HWY_INLINE void MicroKernel(D d, int64_t depth, const T* HWY_RESTRICT a, int64_t lda,
                            const T* HWY_RESTRICT b, int64_t ldb, T* HWY_RESTRICT c, int64_t ldc,
                            Epilogue<T> epilogue) {
  using Vector = hn::Vec<D>;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  Vector sum[kRows][kVectors];
  HWY_UNROLL(16)
  for (int i = 0; i < kRows; ++i) {
    HWY_UNROLL(8)
    for (int j = 0; j < kVectors; ++j) sum[i][j] = hn::Zero(d);
  }
  for (int64_t p = 0; p < depth; ++p) {
    Vector row[kVectors];
    HWY_UNROLL(8)
    for (int j = 0; j < kVectors; ++j) row[j] = hn::LoadU(d, b + p * ldb + j * lanes);
    HWY_UNROLL(16)
    for (int i = 0; i < kRows; ++i) {
      const Vector x = hn::Set(d, kOp == Op::kNone ? a[i * lda + p] : a[p * lda + i]);
      HWY_UNROLL(8)
      for (int j = 0; j < kVectors; ++j) sum[i][j] = hn::MulAdd(x, row[j], sum[i][j]);
    }
  }
  HWY_UNROLL(16)
  for (int i = 0; i < kRows; ++i) {
    T* HWY_RESTRICT out = c + i * ldc;
    const Vector scale =
        hn::Set(d, epilogue.row_scale != nullptr ? epilogue.row_scale[i] : static_cast<T>(1));
    HWY_UNROLL(8)
    for (int j = 0; j < kVectors; ++j) {
      Vector x = hn::Mul(scale, sum[i][j]);
      if (epilogue.beta != 0) {
        x = hn::MulAdd(hn::Set(d, epilogue.beta), hn::LoadU(d, out + j * lanes), x);
      }
      hn::StoreU(x, d, out + j * lanes);
    }
  }
}

// All rows of one panel of `kVectors` vectors of columns.
template <int kVectors, Op kOp, class D, typename T = hn::TFromD<D>>
HWY_INLINE void Panel(D d, int64_t rows, int64_t depth, const T* a, int64_t lda, const T* b,
                      int64_t ldb, T* c, int64_t ldc, Epilogue<T> epilogue) {
  const int64_t a_row = kOp == Op::kNone ? lda : 1;
  const T* row_scale = epilogue.row_scale;
  int64_t i = 0;
  const auto run = [&]<int kRows>() HWY_ATTR {
    epilogue.row_scale = row_scale == nullptr ? nullptr : row_scale + i;
    MicroKernel<kRows, kVectors, kOp>(d, depth, a + i * a_row, lda, b, ldb, c + i * ldc, ldc,
                                      epilogue);
    i += kRows;
  };
  while (rows - i >= kMicroRows) run.template operator()<kMicroRows>();
  while (rows - i >= 4) run.template operator()<4>();
  while (rows - i >= 1) run.template operator()<1>();
}

// C [rows, columns] = beta C + diag(row_scale) op(A) B with op(A) [rows, depth], B [depth,
// columns]. C must not overlap A or B.
template <Op kOp, typename T>
void MatMul(int64_t rows, int64_t columns, int64_t depth, const T* a, int64_t lda, const T* b,
            int64_t ldb, T* c, int64_t ldc, Epilogue<T> epilogue = {}) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t p = 0;
  do {
    const int64_t block = std::min(kDepthBlock, depth - p);
    const T* a_block = a + (kOp == Op::kNone ? p : p * lda);
    const T* b_block = b + p * ldb;
    int64_t j = 0;
    for (; j + lanes < columns; j += 2 * lanes) {
      Panel<2, kOp>(d, rows, block, a_block, lda, b_block + j, ldb, c + j, ldc, epilogue);
    }
    if (j < columns) {
      Panel<1, kOp>(d, rows, block, a_block, lda, b_block + j, ldb, c + j, ldc, epilogue);
    }
    epilogue.beta = 1;
    p += block;
  } while (p < depth);
}

// As MatMul with op(A) [n, n] lower triangular: reads no further than the diagonal's block of
// kTriangleBlock columns, which must hold zeros above the diagonal.
inline constexpr int64_t kTriangleBlock = 16;
template <typename T>
void MatMulLower(int64_t n, int64_t columns, const T* a, int64_t lda, const T* b, int64_t ldb, T* c,
                 int64_t ldc, T beta) {
  for (int64_t i = 0; i < n; i += kTriangleBlock) {
    const int64_t end = std::min(n, i + kTriangleBlock);
    MatMul<Op::kNone>(end - i, columns, end, a + i * lda, lda, b, ldb, c + i * ldc, ldc,
                      Epilogue<T>{.beta = beta});
  }
}

// C = beta C + A^T B with A [n, n] lower triangular as above.
template <typename T>
void MatMulLowerTransposed(int64_t n, int64_t columns, const T* a, int64_t lda, const T* b,
                           int64_t ldb, T* c, int64_t ldc, T beta) {
  for (int64_t i = 0; i < n; i += kTriangleBlock) {
    const int64_t end = std::min(n, i + kTriangleBlock);
    MatMul<Op::kTranspose>(end - i, columns, n - i, a + i * lda + i, lda, b + i * ldb, ldb,
                           c + i * ldc, ldc, Epilogue<T>{.beta = beta});
  }
}

// C = beta C + A B on and below the diagonal, A [n, depth], B [depth, n]; of what lies above the
// diagonal only part is written.
template <typename T>
void MatMulToLower(int64_t n, int64_t depth, const T* a, int64_t lda, const T* b, int64_t ldb, T* c,
                   int64_t ldc, T beta = 0) {
  for (int64_t i = 0; i < n; i += kTriangleBlock) {
    const int64_t end = std::min(n, i + kTriangleBlock);
    MatMul<Op::kNone>(end - i, end, depth, a + i * lda, lda, b, ldb, c + i * ldc, ldc,
                      Epilogue<T>{.beta = beta});
  }
}

// out [columns, rows] = in [rows, columns]^T, in blocks of one 128-bit vector a row.
template <typename T>
void Transpose(int64_t rows, int64_t columns, const T* HWY_RESTRICT in, int64_t ld_in,
               T* HWY_RESTRICT out, int64_t ld_out) {
  constexpr int64_t kStripe = 16;  // rows of `in`: whole cache lines of `out`
  for (int64_t i0 = 0; i0 < rows; i0 += kStripe) {
    const int64_t i1 = std::min(rows, i0 + kStripe);
    int64_t j = 0;
#if HWY_TARGET != HWY_SCALAR
    constexpr int64_t kBlock = 16 / sizeof(T);
    const hn::FixedTag<T, kBlock> d;
    for (; j + kBlock <= columns; j += kBlock) {
      int64_t i = i0;
      for (; i + kBlock <= i1; i += kBlock) {
        const T* from = in + i * ld_in + j;
        T* to = out + j * ld_out + i;
        const auto r0 = hn::LoadU(d, from);
        const auto r1 = hn::LoadU(d, from + ld_in);
        if constexpr (kBlock == 2) {
          hn::StoreU(hn::InterleaveLower(d, r0, r1), d, to);
          hn::StoreU(hn::InterleaveUpper(d, r0, r1), d, to + ld_out);
        } else {
          const hn::RepartitionToWide<decltype(d)> dw;
          const auto r2 = hn::LoadU(d, from + 2 * ld_in);
          const auto r3 = hn::LoadU(d, from + 3 * ld_in);
          const auto low01 = hn::BitCast(dw, hn::InterleaveLower(d, r0, r1));
          const auto low23 = hn::BitCast(dw, hn::InterleaveLower(d, r2, r3));
          const auto high01 = hn::BitCast(dw, hn::InterleaveUpper(d, r0, r1));
          const auto high23 = hn::BitCast(dw, hn::InterleaveUpper(d, r2, r3));
          hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dw, low01, low23)), d, to);
          hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dw, low01, low23)), d, to + ld_out);
          hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dw, high01, high23)), d, to + 2 * ld_out);
          hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dw, high01, high23)), d, to + 3 * ld_out);
        }
      }
      for (; i < i1; ++i) {
        for (int64_t m = 0; m < kBlock; ++m) out[(j + m) * ld_out + i] = in[i * ld_in + j + m];
      }
    }
#endif
    for (; j < columns; ++j) {
      for (int64_t i = i0; i < i1; ++i) out[j * ld_out + i] = in[i * ld_in + j];
    }
  }
}

// out = row_scale[i] * in, rows of `columns` padded elements; out may be in.
template <typename T>
void ScaleRows(int64_t rows, int64_t columns, const T* row_scale, const T* in, int64_t ld_in,
               T* out, int64_t ld_out) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < rows; ++i) {
    const auto scale = hn::Set(d, row_scale[i]);
    for (int64_t j = 0; j < columns; j += lanes) {
      hn::StoreU(hn::Mul(scale, hn::LoadU(d, in + i * ld_in + j)), d, out + i * ld_out + j);
    }
  }
}

// out = beta out + alpha in over `count` contiguous elements, a multiple of the vector length.
template <typename T>
void ScaleAdd(int64_t count, T beta, T* HWY_RESTRICT out, T alpha, const T* HWY_RESTRICT in) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto va = hn::Set(d, alpha);
  const auto vb = hn::Set(d, beta);
  for (int64_t i = 0; i < count; i += lanes) {
    const auto x = hn::Mul(va, hn::LoadU(d, in + i));
    hn::StoreU(hn::MulAdd(vb, hn::LoadU(d, out + i), x), d, out + i);
  }
}

// sum over rows and columns of a * b.
template <typename T>
double Dot(int64_t rows, int64_t columns, const T* HWY_RESTRICT a, int64_t lda,
           const T* HWY_RESTRICT b, int64_t ldb) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  double total = 0;
  for (int64_t i = 0; i < rows; ++i) {
    auto sum = hn::Zero(d);
    int64_t j = 0;
    for (; j + lanes <= columns; j += lanes) {
      sum = hn::MulAdd(hn::LoadU(d, a + i * lda + j), hn::LoadU(d, b + i * ldb + j), sum);
    }
    double row = hn::GetLane(hn::SumOfLanes(d, sum));
    for (; j < columns; ++j) row += static_cast<double>(a[i * lda + j]) * b[i * ldb + j];
    total += row;
  }
  return total;
}

// x[i] = exp(x[i]) for x <= 0, -inf allowed; `count` is padded to whole vectors.
template <typename T>
void ExpVector(int64_t count, T* x) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < count; i += lanes) hn::StoreU(hn::Exp(d, hn::LoadU(d, x + i)), d, x + i);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fenwick::cpu
HWY_AFTER_NAMESPACE();

#endif  // FENWICK_CPU_TILES_INL_H_
