// What one chunk of one head does under a scalar gate. With a[r] = g[first] + ... + g[r] inside the
// chunk and A its total:
//   weights      P[r, s] = q[r].k[s] * lambda[r, level(r, s)] * exp(a[r] - a[s]),  s <= r
//   own node     N = sum_s exp(A - a[s]) k[s] v[s]^T
//   read of S    o[r] += lambda[r, level] exp(a[r] + gap) S^T q[r]
// where gap is the log decay between the node's end and the chunk's begin.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/scratch.h"
#include "cpu/tile_pool.h"
#include "cpu/walk.h"

#if defined(FENWICK_CPU_SCALAR_GATE_CHUNK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FENWICK_CPU_SCALAR_GATE_CHUNK_INL_H_
#undef FENWICK_CPU_SCALAR_GATE_CHUNK_INL_H_
#else
#define FENWICK_CPU_SCALAR_GATE_CHUNK_INL_H_
#endif

#include "cpu/rows-inl.h"
#include "cpu/tiles-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fenwick::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// A node and the log decay across the tokens that it covers. Nodes are stored as they are at their
// end; a reader adds up the totals of all newer nodes (the gap), so nothing is decayed in place.
template <typename T>
struct ScalarNode {
  T* state = nullptr;  // tile [K, V]
  double total = 0;
  bool owned = false;  // by the pool of the walk that made it; others are only read
  bool live() const { return state != nullptr; }
};

// exp of anything below is 0 in T. Clamping g here keeps -inf (a hard reset) out of differences.
template <typename T>
inline constexpr double kResetLogDecay = sizeof(T) == 4 ? -200.0 : -1200.0;

// The log decays of a chunk's tokens.
template <typename T>
struct Gate {
  double sum[kStateChunk];              // a[r]
  double total = 0;                     // A
  alignas(64) T high[kStateChunk + 8];  // sum = high + low: differences of sums in T are as good
  alignas(64) T low[kStateChunk + 8];   // as if taken in double

  void Load(const TokenRows& g, int64_t first, int64_t n) {
    alignas(64) T values[kStateChunk];
    LoadScalars(g, first, n, values);
    total = 0;
    for (int64_t i = 0; i < n; ++i) {
      const double value = values[i];
      total += value < kResetLogDecay<T> ? kResetLogDecay<T> : value;
      sum[i] = total;
      high[i] = static_cast<T>(total);
      low[i] = static_cast<T>(total - high[i]);
    }
    std::fill(high + n, high + kStateChunk + 8, T{0});
    std::fill(low + n, low + kStateChunk + 8, T{0});
  }

  // out[i] = exp(a[i] + gap), i < n; out is padded to kStateChunk.
  void FromBegin(double gap, int64_t n, T* HWY_RESTRICT out) const {
    std::fill(out, out + kStateChunk, T{0});
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<T>(sum[i] + gap);
    ExpVector(n, out);
  }

  // out[i] = exp(A - a[i]).
  void ToEnd(int64_t n, T* HWY_RESTRICT out) const {
    std::fill(out, out + kStateChunk, T{0});
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<T>(total - sum[i]);
    ExpVector(n, out);
  }
};

// Row r of the chunk: out[s] = levels[min(level(r, s), last)] for s <= r.
template <typename T>
HWY_INLINE void SpreadLevels(int64_t r, const T* HWY_RESTRICT levels, int last,
                             T* HWY_RESTRICT out) {
  out[r] = levels[0];
  for (int64_t bits = r; bits != 0; bits &= bits - 1) {
    const int b = std::countr_zero(static_cast<uint64_t>(bits));
    std::fill_n(out + (r >> (b + 1) << (b + 1)), int64_t{1} << b, levels[std::min(b + 1, last)]);
  }
}

// Columns of a lower triangular tile that row r must define (tiles-inl.h, MatMulLower).
HWY_INLINE int64_t TriangleEnd(int64_t r) { return (r / kTriangleBlock + 1) * kTriangleBlock; }

// P (see above) for n rows; qk is the tile q k^T, lambda [n, levels] a tile.
template <typename T>
void ChunkWeights(int64_t n, const Gate<T>& gate, const T* HWY_RESTRICT qk, const T* lambda,
                  int64_t ld_lambda, int last_level, T* HWY_RESTRICT out) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  constexpr int64_t kLd = TileLd<T>(kStateChunk);
  alignas(64) T level_row[kStateChunk];
  std::fill_n(level_row, kStateChunk, T{0});
  for (int64_t r = 0; r < n; ++r) {
    SpreadLevels(r, lambda + r * ld_lambda, last_level, level_row);
    const auto high = hn::Set(d, gate.high[r]);
    const auto low = hn::Set(d, gate.low[r]);
    for (int64_t s = 0; s <= r; s += lanes) {
      const auto difference = hn::Add(hn::Sub(high, hn::Load(d, gate.high + s)),
                                      hn::Sub(low, hn::Load(d, gate.low + s)));
      const auto weight =
          hn::Mul(hn::Load(d, level_row + s), hn::Exp(d, hn::Min(difference, hn::Zero(d))));
      hn::Store(hn::Mul(weight, hn::Load(d, qk + r * kLd + s)), d, out + r * kLd + s);
    }
    std::fill(out + r * kLd + r + 1, out + r * kLd + TriangleEnd(r), T{0});
  }
}

// How a K x V state lies in its tile: forward reads it as Q S, backward as dO S^T.
enum class StateLayout { kKeyByValue, kValueByKey };

// state = N (see above); `scratch` [n, V] is overwritten.
template <typename T>
void ChunkNode(StateLayout layout, int64_t n, int64_t key_size, int64_t value_size,
               const Gate<T>& gate, const T* k, const T* v, T* scratch, T* state) {
  alignas(64) T to_end[kStateChunk];
  gate.ToEnd(n, to_end);
  const int64_t ld_k = TileLd<T>(key_size);
  const int64_t ld_v = TileLd<T>(value_size);
  ScaleRows(n, value_size, to_end, v, ld_v, scratch, ld_v);
  if (layout == StateLayout::kKeyByValue) {
    MatMul<Op::kTranspose>(key_size, value_size, n, k, ld_k, scratch, ld_v, state, ld_v);
  } else {
    MatMul<Op::kTranspose>(value_size, key_size, n, scratch, ld_v, k, ld_k, state, ld_k);
  }
}

// into = into + exp(into.total) older.
template <typename T>
void MergeNode(int64_t tile_size, ScalarNode<T>& into, const ScalarNode<T>& older) {
  const T decay = static_cast<T>(std::exp(into.total));
  if (decay != 0) ScaleAdd<T>(tile_size, 1, into.state, decay, older.state);
  into.total += older.total;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fenwick::cpu
HWY_AFTER_NAMESPACE();

#endif  // FENWICK_CPU_SCALAR_GATE_CHUNK_INL_H_
