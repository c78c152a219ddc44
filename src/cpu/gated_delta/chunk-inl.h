// One chunk of the gated delta rule, one head, n <= 64 tokens:
//
//   G(i,j) = exp(g[j+1] + ... + g[i]),  gamma[i] = G(i,-1),  kappa[j] = G(n-1,j)
//   total = gamma[n-1]
//   A = strictly lower (diag(beta) K K^T * G),   X = (I + A)^-1,   T = X diag(beta)
//   W = T diag(gamma) K,   U = T V,   B = lower (Q K^T * G)
//   read        o += diag(lambda_l) Q~ S_l    with Q~ = diag(gamma) Q - B W
//   transition  S_l <- M S_l                  with M = total I - K~^T W,  K~ = diag(kappa) K
//   new state   K~^T U
//   inside      o = ((B T) * Lambda) V,       Lambda[t,s] = lambda[t, level(t,s)]
//
// (*: elementwise.) The decays stand inside A and B, so every exponent is a sum of g inside the
// chunk and never positive. W is kept with its sign turned, so that all products are added. M is
// never formed: S <- total S + K~^T (-W S) costs the same and skips a K x K matrix.

#include <algorithm>
#include <cstdint>

#include "cpu/scratch.h"
#include "cpu/tile_layout.h"
#include "fenwick/partition.h"
#include "fenwick/state.h"

#if defined(FENWICK_CPU_GATED_DELTA_CHUNK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FENWICK_CPU_GATED_DELTA_CHUNK_INL_H_
#undef FENWICK_CPU_GATED_DELTA_CHUNK_INL_H_
#else
#define FENWICK_CPU_GATED_DELTA_CHUNK_INL_H_
#endif

#include "cpu/tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fenwick::cpu {
namespace HWY_NAMESPACE {

// Tiles of one chunk. Rows are tokens; n of the kStateChunk rows are in use.
template <typename T>
struct DeltaChunk {
  int64_t n = 0, K = 0, V = 0;
  int L = 0;
  int64_t kp = 0;                         // where V starts in a row of `in` and `wu`
  int64_t ld_k = 0, ld_v = 0, ld_kv = 0;  // of [., K], [., V] and [., kp + V] tiles
  static constexpr int64_t ld_c = TileLd<T>(kStateChunk);  // of [64, 64] tiles

  // Filled by the caller.
  T* q;       // [64, K], times the scale
  T* k;       // [64, K]
  T* in;      // [64, kp + V]: -gamma K (written by PrepareKeys) | V (the caller's)
  T* g;       // [64]
  T* beta;    // [64]
  T* lambda;  // [L, 64]

  // ScoreKeys and ScoreQueries: the same for all heads of a group.
  T* kt;  // [K, 64] K^T
  T* kk;  // [64, 64] K K^T on and below the diagonal
  T* qk;  // [64, 64] Q K^T on and below the diagonal

  // PrepareKeys.
  T* decay;  // [64, 64] G, zero above the diagonal
  T* gamma;  // [64]
  T* kappa;  // [64]
  T* a;      // [64, 64] A
  T* x;      // [64, 64] X
  T* t;      // [64, 64] T
  T* wu;     // [64, kp + V]: -W | U
  T* k_end;  // [64, K] K~
  T total;

  // PrepareReads.
  T* b;       // [64, 64] B
  T* q_read;  // [64, K] Q~

  // PrepareQueries.
  T* d;  // [64, 64] B T
  T* p;  // [64, 64] (B T) * Lambda

  DeltaChunk(Scratch& scratch, int64_t K, int64_t V, int L)
      : K(K),
        V(V),
        L(L),
        kp(PaddedColumns<T>(K)),
        ld_k(TileLd<T>(K)),
        ld_v(TileLd<T>(V)),
        ld_kv(TileLd<T>(kp + V)) {
    constexpr int64_t C = kStateChunk;
    for (T** tile : {&q, &k, &k_end, &q_read}) *tile = scratch.New<T>(C * ld_k);
    for (T** tile : {&in, &wu}) *tile = scratch.New<T>(C * ld_kv);
    for (T** tile : {&kk, &qk, &decay, &a, &x, &t, &b, &d, &p}) *tile = scratch.New<T>(C * ld_c);
    for (T** row : {&g, &beta, &gamma, &kappa}) *row = scratch.New<T>(C);
    kt = scratch.New<T>(K * ld_c);
    lambda = scratch.New<T>(L * C);
  }

  T* v() const { return in + kp; }         // ld_kv
  const T* minus_w() const { return wu; }  // ld_kv
  const T* u() const { return wu + kp; }   // ld_kv
  const T* level(int level) const { return lambda + std::min(level, L - 1) * kStateChunk; }
};

// out = a * b on and below the diagonal (below it only, where strict), zero above. Row i of the
// result is scaled by row_scale[i] if that is given.
template <typename T>
void MultiplyLower(int64_t n, bool strict, const T* a, const T* b, const T* row_scale, T* out) {
  constexpr int64_t ld = DeltaChunk<T>::ld_c;
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < n; ++i) {
    const int64_t end = strict ? i : i + 1;
    const auto scale = hn::Set(d, row_scale != nullptr ? row_scale[i] : T{1});
    for (int64_t j = 0; j < kStateChunk; j += lanes) {
      const int64_t at = i * ld + j;
      auto value = hn::Zero(d);
      if (j < end) {
        const auto product = hn::Mul(hn::LoadU(d, a + at), hn::LoadU(d, b + at));
        value = hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(end - j)),
                                   hn::Mul(scale, product));
      }
      hn::StoreU(value, d, out + at);
    }
  }
}

// G, gamma and kappa: row i of the sums is row i - 1 plus g[i], so nothing is subtracted.
template <typename T>
void Decays(DeltaChunk<T>& c) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  HWY_ALIGN T sums[kStateChunk] = {};
  for (int64_t i = 0; i < c.n; ++i) {
    c.gamma[i] = (i > 0 ? c.gamma[i - 1] : T{0}) + c.g[i];
    const auto gi = hn::Set(d, c.g[i]);
    T* row = c.decay + i * c.ld_c;
    for (int64_t j = 0; j < kStateChunk; j += lanes) {
      if (j > i) {
        hn::StoreU(hn::Zero(d), d, row + j);
        continue;
      }
      const auto sum = hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(i - j)),
                                          hn::Add(hn::LoadU(d, sums + j), gi));
      hn::StoreU(sum, d, sums + j);
      hn::StoreU(hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(i + 1 - j)), hn::Exp(d, sum)),
                 d, row + j);
    }
  }
  std::fill(c.gamma + c.n, c.gamma + kStateChunk, T{0});
  ExpVector(kStateChunk, c.gamma);
  std::copy_n(c.decay + (c.n - 1) * c.ld_c, kStateChunk, c.kappa);
  c.total = c.gamma[c.n - 1];
}

// X = (I + A)^-1 by forward substitution, a block of rows at a time; T = X diag(beta).
template <typename T>
void InvertLower(DeltaChunk<T>& c) {
  constexpr int kGroup = 4;  // independent chains of multiply-adds
  constexpr int64_t ld = DeltaChunk<T>::ld_c;
  constexpr int64_t kBlock = kTriangleBlock;
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  HWY_ALIGN T minus_one[kBlock];
  std::fill_n(minus_one, kBlock, T{-1});
  for (int64_t begin = 0; begin < c.n; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, c.n);
    T* rows = c.x + begin * ld;
    if (begin > 0) {
      MatMul<Op::kNone>(end - begin, begin, begin, c.a + begin * ld, ld, c.x, ld, rows, ld,
                        Epilogue<T>{.row_scale = minus_one});
    }
    for (int64_t i = begin; i < end; ++i) {
      const T* a = c.a + i * ld;
      T* row = c.x + i * ld;
      std::fill(row + begin, row + kStateChunk, T{0});
      for (int64_t j0 = 0; j0 < end; j0 += kGroup * lanes) {
        const int64_t vectors = std::min<int64_t>(kGroup, (end - j0 + lanes - 1) / lanes);
        hn::Vec<decltype(d)> sum[kGroup];
        for (int64_t s = 0; s < vectors; ++s) sum[s] = hn::LoadU(d, row + j0 + s * lanes);
        for (int64_t m = begin; m < i; ++m) {
          const auto am = hn::Set(d, a[m]);
          for (int64_t s = 0; s < vectors; ++s) {
            sum[s] = hn::NegMulAdd(am, hn::LoadU(d, c.x + m * ld + j0 + s * lanes), sum[s]);
          }
        }
        for (int64_t s = 0; s < vectors; ++s) hn::StoreU(sum[s], d, row + j0 + s * lanes);
      }
      row[i] = 1;
      for (int64_t j = 0; j < kStateChunk; j += lanes) {
        hn::StoreU(hn::Mul(hn::LoadU(d, row + j), hn::LoadU(d, c.beta + j)), d, c.t + i * ld + j);
      }
    }
  }
}

template <typename T>
void ScoreKeys(DeltaChunk<T>& c) {
  Transpose(c.n, c.K, c.k, c.ld_k, c.kt, c.ld_c);
  MatMulToLower(c.n, c.K, c.k, c.ld_k, c.kt, c.ld_c, c.kk, c.ld_c);
}

// After ScoreKeys.
template <typename T>
void ScoreQueries(DeltaChunk<T>& c) {
  MatMulToLower(c.n, c.K, c.q, c.ld_k, c.kt, c.ld_c, c.qk, c.ld_c);
}

// All that the transition and the new state need; after ScoreKeys.
template <typename T>
void PrepareKeys(DeltaChunk<T>& c) {
  const int64_t n = c.n;
  std::fill(c.beta + n, c.beta + kStateChunk, T{0});  // no NaN times zero in T
  Decays(c);
  MultiplyLower(n, /*strict=*/true, c.kk, c.decay, c.beta, c.a);
  InvertLower(c);
  HWY_ALIGN T minus_gamma[kStateChunk];
  for (int64_t i = 0; i < n; ++i) minus_gamma[i] = -c.gamma[i];
  ScaleRows(n, c.kp, minus_gamma, c.k, c.ld_k, c.in, c.ld_kv);
  MatMulLower(n, c.kp + c.V, c.t, c.ld_c, c.in, c.ld_kv, c.wu, c.ld_kv, T{0});
  ScaleRows(n, c.kp, c.kappa, c.k, c.ld_k, c.k_end, c.ld_k);
}

// f(level, begin, end) for the sources s in [begin, end) that row t of a chunk reads through
// `level` >= 1.
template <typename F>
HWY_INLINE void ForEachBucket(int64_t t, F&& f) {
  for (uint64_t bits = static_cast<uint64_t>(t); bits != 0; bits &= bits - 1) {
    const int level = MergeLevel(bits);
    const int64_t begin = static_cast<int64_t>(BucketBegin(static_cast<uint64_t>(t), level));
    f(level, begin, begin + (int64_t{1} << (level - 1)));
  }
}

// out = in * Lambda on and below the diagonal, zero above.
template <typename T>
void MultiplyLevels(const DeltaChunk<T>& c, const T* in, T* out) {
  for (int64_t t = 0; t < c.n; ++t) {
    const T* from = in + t * c.ld_c;
    T* to = out + t * c.ld_c;
    ForEachBucket(t, [&](int level, int64_t begin, int64_t end) {
      const T weight = c.level(level)[t];
      for (int64_t s = begin; s < end; ++s) to[s] = from[s] * weight;
    });
    to[t] = from[t] * c.level(0)[t];
    std::fill(to + t + 1, to + kStateChunk, T{0});
  }
}

// What reads of carried states need; after PrepareKeys and ScoreQueries.
template <typename T>
void PrepareReads(DeltaChunk<T>& c) {
  const int64_t n = c.n;
  MultiplyLower(n, /*strict=*/false, c.qk, c.decay, static_cast<const T*>(nullptr), c.b);
  ScaleRows(n, c.kp, c.gamma, c.q, c.ld_k, c.q_read, c.ld_k);
  MatMulLower(n, c.K, c.b, c.ld_c, c.minus_w(), c.ld_kv, c.q_read, c.ld_k, T{1});
}

// All that the outputs need; after PrepareKeys and ScoreQueries.
template <typename T>
void PrepareQueries(DeltaChunk<T>& c) {
  PrepareReads(c);
  MatMulLower(c.n, c.n, c.b, c.ld_c, c.t, c.ld_c, c.d, c.ld_c, T{0});
  MultiplyLevels(c, c.d, c.p);
}

// Up to this key size the transition is applied token by token. 64 tokens that write into few
// dimensions erase nearly all of an older state, and S - K~^T W S then is what two much larger
// terms leave: for K = 16 a factor of 10 in float32's relative error, for K = 3 a factor of 10^4.
// The arithmetic is the same and the state's columns stay in the first-level cache.
inline constexpr int64_t kTokenwiseKeys = 32;

// S [K, columns] <- M S, or M^T S where `transposed`, one token after the other.
template <typename T>
void ApplyTokens(const DeltaChunk<T>& c, bool transposed, int64_t columns, T* s, int64_t ld) {
  constexpr int kGroup = 4;  // vectors of columns at a time
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t j0 = 0; j0 < columns; j0 += kGroup * lanes) {
    const int vectors =
        static_cast<int>(std::min<int64_t>(kGroup, (columns - j0 + lanes - 1) / lanes));
    for (int64_t step = 0; step < c.n; ++step) {
      const int64_t i = transposed ? c.n - 1 - step : step;
      const T* k = c.k + i * c.ld_k;
      const T alpha = i > 0 ? c.decay[i * c.ld_c + i - 1] : c.gamma[0];
      hn::Vec<decltype(d)> dot[kGroup];
      for (int m = 0; m < vectors; ++m) dot[m] = hn::Zero(d);
      for (int64_t r = 0; r < c.K; ++r) {
        const auto kr = hn::Set(d, k[r]);
        for (int m = 0; m < vectors; ++m) {
          dot[m] = hn::MulAdd(kr, hn::LoadU(d, s + r * ld + j0 + m * lanes), dot[m]);
        }
      }
      const auto strength = hn::Set(d, c.beta[i]);
      const auto gate = hn::Set(d, alpha);
      for (int m = 0; m < vectors; ++m) dot[m] = hn::Mul(strength, dot[m]);
      for (int64_t r = 0; r < c.K; ++r) {
        const auto kr = hn::Set(d, k[r]);
        for (int m = 0; m < vectors; ++m) {
          T* at = s + r * ld + j0 + m * lanes;
          hn::StoreU(hn::Mul(gate, hn::NegMulAdd(kr, dot[m], hn::LoadU(d, at))), d, at);
        }
      }
    }
  }
}

// S [K, columns] <- M S. ws [64, columns], if given, receives -W S.
template <typename T>
void ApplyTransition(const DeltaChunk<T>& c, int64_t columns, T* s, int64_t ld, T* ws = nullptr) {
  const bool tokenwise = c.K <= kTokenwiseKeys;
  Scratch scratch;
  if (ws == nullptr && !tokenwise) ws = scratch.New<T>(c.n * ld);
  if (ws != nullptr) {
    MatMul<Op::kNone>(c.n, columns, c.K, c.minus_w(), c.ld_kv, s, ld, ws, ld);
  }
  if (tokenwise) return ApplyTokens(c, /*transposed=*/false, columns, s, ld);
  MatMul<Op::kTranspose>(c.K, columns, c.n, c.k_end, c.ld_k, ws, ld, s, ld,
                         Epilogue<T>{.beta = c.total});
}

// m [K, K] = M.
template <typename T>
void WriteTransition(const DeltaChunk<T>& c, T* m) {
  if (c.K <= kTokenwiseKeys) {
    std::fill_n(m, c.K * c.ld_k, T{0});
    for (int64_t i = 0; i < c.K; ++i) m[i * c.ld_k + i] = 1;
    return ApplyTokens(c, /*transposed=*/false, c.K, m, c.ld_k);
  }
  MatMul<Op::kTranspose>(c.K, c.K, c.n, c.k_end, c.ld_k, c.minus_w(), c.ld_kv, m, c.ld_k);
  for (int64_t i = 0; i < c.K; ++i) m[i * c.ld_k + i] += c.total;
}

// s [K, V] (+)= K~^T U.
template <typename T>
void AddNewState(const DeltaChunk<T>& c, bool accumulate, T* s) {
  MatMul<Op::kTranspose>(c.K, c.V, c.n, c.k_end, c.ld_k, c.u(), c.ld_kv, s, c.ld_v,
                         Epilogue<T>{.beta = accumulate ? T{1} : T{0}});
}

// edits [64, V] (ld_v) = U - W S: what the chunk writes with K~ into a state s [K, V] before it.
template <typename T>
void WriteEdits(const DeltaChunk<T>& c, const T* s, T* edits) {
  for (int64_t i = 0; i < c.n; ++i) std::copy_n(c.u() + i * c.ld_kv, c.V, edits + i * c.ld_v);
  MatMul<Op::kNone>(c.n, c.V, c.K, c.minus_w(), c.ld_kv, s, c.ld_v, edits, c.ld_v,
                    Epilogue<T>{.beta = 1});
}

// s [K, V] <- M S + K~^T U = total S + K~^T (U - W S), with one product less than the transition
// and the new state apart. edits, if given, as above.
template <typename T>
void AdvanceState(const DeltaChunk<T>& c, T* s, T* edits = nullptr) {
  const bool tokenwise = c.K <= kTokenwiseKeys;
  Scratch scratch;
  if (edits == nullptr && !tokenwise) edits = scratch.New<T>(c.n * c.ld_v);
  if (edits != nullptr) WriteEdits(c, s, edits);
  if (tokenwise) {
    ApplyTokens(c, /*transposed=*/false, c.V, s, c.ld_v);
    return AddNewState(c, /*accumulate=*/true, s);
  }
  MatMul<Op::kTranspose>(c.K, c.V, c.n, c.k_end, c.ld_k, edits, c.ld_v, s, c.ld_v,
                         Epilogue<T>{.beta = c.total});
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fenwick::cpu
HWY_AFTER_NAMESPACE();

#endif  // FENWICK_CPU_GATED_DELTA_CHUNK_INL_H_
