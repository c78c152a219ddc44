// The gradients inside one chunk of one head under a scalar gate. With P as in chunk-inl.h,
// E[r, s] = exp(a[r] - a[s]) and dP[r, s] = dO[r].v[s]:
//   dS = dP lambda E           (gradient of q k^T)
//   dlambda[r, l] = sum_{s at level l of r} dP q[r].k[s] E
//   flow[t] = sum_{s < t <= r} P dP: what reaches the outputs across token t, which is dg[t]
// Each is a sum of its own terms; no difference of large sums is taken.

#include <bit>
#include <cstdint>

#if defined(FENWICK_CPU_SCALAR_GATE_CHUNK_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FENWICK_CPU_SCALAR_GATE_CHUNK_BACKWARD_INL_H_
#undef FENWICK_CPU_SCALAR_GATE_CHUNK_BACKWARD_INL_H_
#else
#define FENWICK_CPU_SCALAR_GATE_CHUNK_BACKWARD_INL_H_
#endif

#include "cpu/scalar_gate/chunk-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fenwick::cpu {
namespace HWY_NAMESPACE {

// Sum of x[0, count); reads whole vectors, ignores what is beyond count.
template <typename T>
HWY_INLINE T SumOf(int64_t count, const T* HWY_RESTRICT x) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  T total = 0;
  if (count >= lanes) {
    auto sum = hn::Zero(d);
    for (; i + lanes <= count; i += lanes) sum = hn::Add(sum, hn::LoadU(d, x + i));
    total = hn::GetLane(hn::SumOfLanes(d, sum));
  }
  for (; i < count; ++i) total += x[i];
  return total;
}

// qk and dp are lower triangular tiles [n, n]. Writes weights = P, adds to d_qk (zero above the
// diagonal) and d_lambda [n, levels], sets flow[0, n).
template <typename T>
void ChunkBackward(int64_t n, const Gate<T>& gate, const T* HWY_RESTRICT qk,
                   const T* HWY_RESTRICT dp, const T* lambda, int64_t ld_lambda, int last_level,
                   T* HWY_RESTRICT weights, T* HWY_RESTRICT d_qk, T* HWY_RESTRICT d_lambda,
                   double* HWY_RESTRICT flow) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  constexpr int64_t kLd = TileLd<T>(kStateChunk);
  alignas(64) T level_row[kStateChunk];
  alignas(64) T terms[kStateChunk];        // dP q.k E of a row
  alignas(64) T column_sums[kStateChunk];  // sum over the rows from r on of P dP
  std::fill_n(level_row, kStateChunk, T{0});
  std::fill_n(column_sums, kStateChunk, T{0});
  for (int64_t r = n - 1; r >= 0; --r) {
    SpreadLevels(r, lambda + r * ld_lambda, last_level, level_row);
    const auto high = hn::Set(d, gate.high[r]);
    const auto low = hn::Set(d, gate.low[r]);
    for (int64_t s = 0; s <= r; s += lanes) {
      const auto valid = hn::Lt(hn::Iota(d, 0), hn::Set(d, static_cast<T>(r + 1 - s)));
      const auto difference = hn::Add(hn::Sub(high, hn::Load(d, gate.high + s)),
                                      hn::Sub(low, hn::Load(d, gate.low + s)));
      const auto decay = hn::Exp(d, hn::Min(difference, hn::Zero(d)));
      const auto level = hn::Load(d, level_row + s);
      const auto qk_row = hn::IfThenElseZero(valid, hn::Load(d, qk + r * kLd + s));
      const auto dp_decay =
          hn::IfThenElseZero(valid, hn::Mul(hn::Load(d, dp + r * kLd + s), decay));
      hn::Store(hn::Mul(qk_row, hn::Mul(decay, level)), d, weights + r * kLd + s);
      hn::Store(hn::MulAdd(dp_decay, level, hn::Load(d, d_qk + r * kLd + s)), d,
                d_qk + r * kLd + s);
      const auto term = hn::Mul(dp_decay, qk_row);
      hn::Store(term, d, terms + s);
      hn::Store(hn::MulAdd(term, level, hn::Load(d, column_sums + s)), d, column_sums + s);
    }
    std::fill(weights + r * kLd + r + 1, weights + r * kLd + TriangleEnd(r), T{0});
    flow[r] = SumOf(r, column_sums);
    T* d_row = d_lambda + r * ld_lambda;
    d_row[0] += terms[r];
    for (int64_t bits = r; bits != 0; bits &= bits - 1) {
      const int b = std::countr_zero(static_cast<uint64_t>(bits));
      d_row[std::min(b + 1, last_level)] +=
          SumOf(int64_t{1} << b, terms + (r >> (b + 1) << (b + 1)));
    }
  }
}

// One read of a carried state: y [n, K] = dO S^T. Adds scale[r] y[r] to dq[r] and returns the
// products q[r].y[r] in dots.
template <typename T>
void ReadBackward(int64_t n, int64_t key_size, const T* HWY_RESTRICT q, const T* HWY_RESTRICT y,
                  const T* scale, T* HWY_RESTRICT dq, T* HWY_RESTRICT dots) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t ld = TileLd<T>(key_size);
  for (int64_t r = 0; r < n; ++r) {
    const auto factor = hn::Set(d, scale[r]);
    auto sum = hn::Zero(d);
    int64_t j = 0;
    for (; j + lanes <= key_size; j += lanes) {
      const auto row = hn::LoadU(d, y + r * ld + j);
      sum = hn::MulAdd(hn::LoadU(d, q + r * ld + j), row, sum);
      hn::StoreU(hn::MulAdd(factor, row, hn::LoadU(d, dq + r * ld + j)), d, dq + r * ld + j);
    }
    T dot = hn::GetLane(hn::SumOfLanes(d, sum));
    for (; j < key_size; ++j) {
      dot += q[r * ld + j] * y[r * ld + j];
      dq[r * ld + j] += scale[r] * y[r * ld + j];
    }
    dots[r] = dot;
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fenwick::cpu
HWY_AFTER_NAMESPACE();

#endif  // FENWICK_CPU_SCALAR_GATE_CHUNK_BACKWARD_INL_H_
