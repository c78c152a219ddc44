// The derivative of one chunk of the gated delta rule; names and equations are those of
// chunk-inl.h. x' is the gradient of x.
//
// For each carried state, with its gradient S' at the chunk's end (CarryAdjoint, ReadAdjoint);
// those that merge when the chunk ends share S', and are carried as one, their sum:
//
//   (-W)' += (K~ S') S^T    K~' += (-W S) S'^T    total' += <S', S>
//   Q~'   += diag(lambda_l) dO S^T                lambda_l' = rowsum(Q~ * dO S^T)
//   S' at its start = total S' + (-W)^T K~ S' + Q~^T diag(lambda_l) dO
//
// The new state K~^T U merges with them, so it shares S' too (AdvanceAdjoint): U' = K~ S' is
// already there, and with U - W S for -W S the second product above is K~' of both. Then, once for
// a chunk (FinishChunk):
//
//   (-W)' += B^T Q~'    P = (B T) * Lambda,  P' = dO V^T
//   B' = lower((P' * Lambda) T^T + Q~' (-W)^T)
//   T' = lower(B^T (P' * Lambda) + (-W)' (-diag(gamma) K)^T + U' V^T)
//   A' = -strictly lower(X^T T' T^T)              (from T = (I + A)^-1 diag(beta))
//   V' = P^T dO + T^T U'                          beta' = colsum(T' * X) + rowsum(A' * K K^T * G)
//
// and K', Q' from W, K~, Q~, K K^T and Q K^T by the product rule; the last two are summed over the
// heads of a group first. A decay exp(g[j+1] + ... + g[i]) with
// gradient G' adds E(i,j) = G' G to g'[t] for all j < t <= i, j = -1 being the chunk's start: g' is
// a sum of such rectangles and never the difference of two sums, so no error grows with T.

#include <algorithm>
#include <cstdint>

#if defined(FENWICK_CPU_GATED_DELTA_CHUNK_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FENWICK_CPU_GATED_DELTA_CHUNK_BACKWARD_INL_H_
#undef FENWICK_CPU_GATED_DELTA_CHUNK_BACKWARD_INL_H_
#else
#define FENWICK_CPU_GATED_DELTA_CHUNK_BACKWARD_INL_H_
#endif

#include "cpu/gated_delta/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fenwick::cpu {
namespace HWY_NAMESPACE {

// Gradients of one chunk. Tiles as those of DeltaChunk that they belong to.
template <typename T>
struct DeltaChunkGrad {
  T* q_read;  // [64, K]
  T* wu;      // [64, kp + V] of -W | U
  T* k_end;   // [64, K]
  double total;

  T* q;       // [64, K], of q times the scale; without what Q K^T gives
  T* k;       // [64, K], without what K K^T and Q K^T give
  T* v;       // [64, V], ld_v
  T* g;       // [64]
  T* beta;    // [64]
  T* lambda;  // [L, 64]

  // Added to: the caller's, for all heads of a group.
  T* kk = nullptr;  // [64, 64] of K K^T, strictly lower
  T* qk = nullptr;  // [64, 64] of Q K^T, lower

  DeltaChunkGrad(Scratch& scratch, const DeltaChunk<T>& c) {
    constexpr int64_t C = kStateChunk;
    for (T** tile : {&q_read, &k_end, &q, &k}) *tile = scratch.New<T>(C * c.ld_k);
    wu = scratch.New<T>(C * c.ld_kv);
    v = scratch.New<T>(C * c.ld_v);
    for (T** row : {&g, &beta}) *row = scratch.New<T>(C);
    lambda = scratch.New<T>(c.L * C);
  }

  // Before the adjoints of a chunk's states.
  void Clear(const DeltaChunk<T>& c) {
    std::fill_n(q_read, c.n * c.ld_k, T{0});
    std::fill_n(k_end, c.n * c.ld_k, T{0});
    std::fill_n(wu, c.n * c.ld_kv, T{0});
    std::fill_n(lambda, c.L * kStateChunk, T{0});
    total = 0;
  }
};

// What a state's end, total S + K~^T edits, gives to K~ and to the edits [64, columns] (ld_edits):
// k_end' += edits S'^T and kds [64, columns] (ld_kds) = K~ S'. ds [K, columns] (ld) is S'.
template <typename T>
void EditsAdjoint(const DeltaChunk<T>& c, int64_t columns, const T* edits, int64_t ld_edits,
                  const T* ds, int64_t ld, T* kds, int64_t ld_kds, DeltaChunkGrad<T>& grad) {
  Scratch scratch;
  T* dst = scratch.New<T>(columns * c.ld_k);
  Transpose(c.K, columns, ds, ld, dst, c.ld_k);
  MatMul<Op::kNone>(c.n, c.K, columns, edits, ld_edits, dst, c.ld_k, grad.k_end, c.ld_k,
                    Epilogue<T>{.beta = 1});
  MatMul<Op::kNone>(c.n, columns, c.K, c.k_end, c.ld_k, ds, ld, kds, ld_kds);
}

// A state s [K, columns] with its transpose st [columns, K] (ld_k) is carried to the chunk's end:
// ds, the gradient there, becomes the one at the chunk's start. kds is K~ ds from EditsAdjoint.
template <typename T>
void TransitionAdjoint(const DeltaChunk<T>& c, int64_t columns, const T* s, const T* st,
                       const T* kds, int64_t ld_kds, T* ds, int64_t ld, DeltaChunkGrad<T>& grad) {
  MatMul<Op::kNone>(c.n, c.K, columns, kds, ld_kds, st, c.ld_k, grad.wu, c.ld_kv,
                    Epilogue<T>{.beta = 1});
  grad.total += Dot(c.K, columns, ds, ld, s, ld);
  if (c.K <= kTokenwiseKeys) return ApplyTokens(c, /*transposed=*/true, columns, ds, ld);
  MatMul<Op::kTranspose>(c.K, columns, c.n, c.minus_w(), c.ld_kv, kds, ld_kds, ds, ld,
                         Epilogue<T>{.beta = c.total});
}

// A state that goes on by itself. ws is -W s if that is known.
template <typename T>
void CarryAdjoint(const DeltaChunk<T>& c, int64_t columns, const T* s, const T* st, const T* ws,
                  T* ds, int64_t ld, DeltaChunkGrad<T>& grad) {
  Scratch scratch;
  T* kds = scratch.New<T>(c.n * ld);
  if (ws == nullptr) {
    T* product = scratch.New<T>(c.n * ld);
    MatMul<Op::kNone>(c.n, columns, c.K, c.minus_w(), c.ld_kv, s, ld, product, ld);
    ws = product;
  }
  EditsAdjoint(c, columns, ws, ld, ds, ld, kds, ld, grad);
  TransitionAdjoint(c, columns, s, st, kds, ld, ds, ld, grad);
}

// The state that the chunk's new state merges with: s, st and ds as above, edits of AdvanceState if
// they are known. Without such a state (s null) ds is that of the new state and stays as it is.
template <typename T>
void AdvanceAdjoint(const DeltaChunk<T>& c, const T* s, const T* st, const T* edits, T* ds,
                    DeltaChunkGrad<T>& grad) {
  T* du = grad.wu + c.kp;
  if (s == nullptr) return EditsAdjoint(c, c.V, c.u(), c.ld_kv, ds, c.ld_v, du, c.ld_kv, grad);
  Scratch scratch;
  if (edits == nullptr) {
    T* product = scratch.New<T>(c.n * c.ld_v);
    WriteEdits(c, s, product);
    edits = product;
  }
  EditsAdjoint(c, c.V, edits, c.ld_v, ds, c.ld_v, du, c.ld_kv, grad);
  TransitionAdjoint(c, c.V, s, st, du, c.ld_kv, ds, c.ld_v, grad);
}

// The same for the identity, whose gradient at the chunk's start nobody needs; dm [K, K] (ld_k) is
// that of M.
template <typename T>
void IdentityAdjoint(const DeltaChunk<T>& c, const T* dm, DeltaChunkGrad<T>& grad) {
  Scratch scratch;
  T* dmt = scratch.New<T>(c.K * c.ld_k);
  Transpose(c.K, c.K, dm, c.ld_k, dmt, c.ld_k);
  MatMul<Op::kNone>(c.n, c.K, c.K, c.k_end, c.ld_k, dm, c.ld_k, grad.wu, c.ld_kv,
                    Epilogue<T>{.beta = 1});
  MatMul<Op::kNone>(c.n, c.K, c.K, c.minus_w(), c.ld_kv, dmt, c.ld_k, grad.k_end, c.ld_k,
                    Epilogue<T>{.beta = 1});
  for (int64_t i = 0; i < c.K; ++i) grad.total += dm[i * c.ld_k + i];
}

// Outputs o += diag(lambda) R S for a reader R [64, K] and a state with transpose st [V, K] (ld_k):
// adds to lambda' and to dr, the gradient of R.
template <typename T>
void LevelAdjoint(const DeltaChunk<T>& c, int level, const T* d_o, const T* st, const T* r, T* dr,
                  DeltaChunkGrad<T>& grad) {
  Scratch scratch;
  const T* lambda = c.level(level);
  T* d_lambda = grad.lambda + std::min(level, c.L - 1) * kStateChunk;
  T* z = scratch.New<T>(c.n * c.ld_k);  // dO S^T
  MatMul<Op::kNone>(c.n, c.K, c.V, d_o, c.ld_v, st, c.ld_k, z, c.ld_k);
  for (int64_t i = 0; i < c.n; ++i) {
    d_lambda[i] += static_cast<T>(Dot(1, c.K, r + i * c.ld_k, c.ld_k, z + i * c.ld_k, c.ld_k));
    ScaleAdd(c.kp, T{1}, dr + i * c.ld_k, lambda[i], z + i * c.ld_k);
  }
}

// The chunk reads a local state through `level`: also adds to its gradient ds [K, V].
template <typename T>
void ReadAdjoint(const DeltaChunk<T>& c, int level, const T* d_o, const T* st, T* ds,
                 DeltaChunkGrad<T>& grad) {
  Scratch scratch;
  T* weighted = scratch.New<T>(c.n * c.ld_v);
  LevelAdjoint(c, level, d_o, st, c.q_read, grad.q_read, grad);
  ScaleRows(c.n, PaddedColumns<T>(c.V), c.level(level), d_o, c.ld_v, weighted, c.ld_v);
  MatMul<Op::kTranspose>(c.K, c.V, c.n, c.q_read, c.ld_k, weighted, c.ld_v, ds, c.ld_v,
                         Epilogue<T>{.beta = 1});
}

// lambda' of the levels inside the chunk: row sums of P' * (B T) over each bucket.
template <typename T>
void LevelsAdjoint(const DeltaChunk<T>& c, const T* dp, DeltaChunkGrad<T>& grad) {
  for (int64_t t = 0; t < c.n; ++t) {
    const T* a = dp + t * c.ld_c;
    const T* b = c.d + t * c.ld_c;
    const auto add = [&](int level, T value) {
      grad.lambda[std::min(level, c.L - 1) * kStateChunk + t] += value;
    };
    ForEachBucket(t, [&](int level, int64_t begin, int64_t end) {
      add(level, static_cast<T>(Dot(1, end - begin, a + begin, c.ld_c, b + begin, c.ld_c)));
    });
    add(0, a[t] * b[t]);
  }
}

// g' from E (lower triangle of e, and e_start for j = -1).
template <typename T>
void GateAdjoint(int64_t n, const T* e, const T* e_start, T* dg) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  HWY_ALIGN T below[kStateChunk] = {};  // sum of rows t.. of E
  T below_start = 0;
  for (int64_t t = n - 1; t >= 0; --t) {
    below_start += e_start[t];
    auto sum = hn::Zero(d);
    for (int64_t j = 0; j <= t; j += lanes) {
      const auto row = hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(t + 1 - j)),
                                          hn::LoadU(d, e + t * DeltaChunk<T>::ld_c + j));
      const auto total = hn::Add(hn::LoadU(d, below + j), row);
      hn::StoreU(total, d, below + j);
      sum = hn::Add(sum, hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(t - j)), total));
    }
    dg[t] = below_start + hn::GetLane(hn::SumOfLanes(d, sum));
  }
}

// From X^T T' T^T (in `da`) and B': A' stays in the registers, the gradients of K K^T and Q K^T get
// the head's share, `e` becomes E, and beta' gets its second term.
template <typename T>
void ScoresAdjoint(const DeltaChunk<T>& c, bool queries, const T* da, const T* db, T* e,
                   DeltaChunkGrad<T>& grad) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < c.n; ++i) {
    auto d_beta = hn::Zero(d);
    const auto beta = hn::Set(d, c.beta[i]);
    for (int64_t j = 0; j < kStateChunk; j += lanes) {
      const int64_t at = i * c.ld_c + j;
      const auto below = hn::FirstN(d, static_cast<size_t>(std::max<int64_t>(i - j, 0)));
      const auto decay = hn::LoadU(d, c.decay + at);
      const auto a = hn::IfThenElseZero(below, hn::Neg(hn::LoadU(d, da + at)));
      const auto kk = hn::IfThenElseZero(below, hn::LoadU(d, c.kk + at));
      const auto a_decay = hn::Mul(a, decay);
      d_beta = hn::MulAdd(a_decay, kk, d_beta);
      auto flow = hn::Mul(a, hn::LoadU(d, c.a + at));
      hn::StoreU(hn::MulAdd(a_decay, beta, hn::LoadU(d, grad.kk + at)), d, grad.kk + at);
      if (queries) {
        const auto diagonal = hn::FirstN(d, static_cast<size_t>(std::max<int64_t>(i + 1 - j, 0)));
        const auto b = hn::IfThenElseZero(diagonal, hn::LoadU(d, db + at));
        flow = hn::MulAdd(b, hn::LoadU(d, c.b + at), flow);
        hn::StoreU(hn::MulAdd(b, decay, hn::LoadU(d, grad.qk + at)), d, grad.qk + at);
      }
      hn::StoreU(flow, d, e + at);
    }
    grad.beta[i] += hn::GetLane(hn::SumOfLanes(d, d_beta));
  }
}

// Zeroes `m` above the diagonal.
template <typename T>
void MaskLower(int64_t n, T* m) {
  for (int64_t i = 0; i < n; ++i) {
    std::fill(m + i * DeltaChunk<T>::ld_c + i + 1, m + i * DeltaChunk<T>::ld_c + kStateChunk, T{0});
  }
}

// The rest of a chunk, after the adjoints of its states. d_o [64, V] (ld_v): null where the chunk
// has no queries.
template <typename T>
void FinishChunk(const DeltaChunk<T>& c, const T* d_o, DeltaChunkGrad<T>& grad) {
  Scratch scratch;
  constexpr int64_t ld_c = DeltaChunk<T>::ld_c;
  const int64_t n = c.n, K = c.K, V = c.V;
  const auto square = [&] { return scratch.New<T>(kStateChunk * ld_c); };
  T *dp = square(), *dd = square(), *db = square(), *dt = square(), *tt = square(), *e = square();
  T* y = square();
  T* vt = scratch.New<T>(V * ld_c);
  T* wt = scratch.New<T>(K * ld_c);
  T* din = scratch.New<T>(kStateChunk * c.ld_kv);
  const T* du = grad.wu + c.kp;
  HWY_ALIGN T e_start[kStateChunk];
  const auto row_dot = [&](const T* a, int64_t lda, const T* b, int64_t ldb, int64_t i) {
    return static_cast<T>(Dot(1, K, a + i * lda, lda, b + i * ldb, ldb));
  };

  Transpose(n, V, c.v(), c.ld_kv, vt, ld_c);
  Transpose(n, n, c.t, ld_c, tt, ld_c);
  if (d_o != nullptr) {
    for (int64_t i = 0; i < n; ++i) e_start[i] = row_dot(c.q, c.ld_k, grad.q_read, c.ld_k, i);
    ScaleRows(n, c.kp, c.gamma, grad.q_read, c.ld_k, grad.q, c.ld_k);
    MatMulLowerTransposed(n, K, c.b, ld_c, grad.q_read, c.ld_k, grad.wu, c.ld_kv, T{1});
    MatMulToLower(n, V, d_o, c.ld_v, vt, ld_c, dp, ld_c);
    LevelsAdjoint(c, dp, grad);
    MultiplyLevels(c, dp, dd);
    MatMulLowerTransposed(n, V, c.p, ld_c, d_o, c.ld_v, grad.v, c.ld_v, T{0});
    MatMulToLower(n, n, dd, ld_c, tt, ld_c, db, ld_c);
    Transpose(n, K, c.minus_w(), c.ld_kv, wt, ld_c);
    MatMulToLower(n, K, grad.q_read, c.ld_k, wt, ld_c, db, ld_c, T{1});
    MatMulLowerTransposed(n, n, c.b, ld_c, dd, ld_c, dt, ld_c, T{0});
  } else {
    std::fill_n(e_start, n, T{0});
    std::fill_n(grad.v, n * c.ld_v, T{0});
    std::fill_n(dt, n * ld_c, T{0});
  }
  Transpose(n, K, c.in, c.ld_kv, wt, ld_c);
  MatMulToLower(n, K, grad.wu, c.ld_kv, wt, ld_c, dt, ld_c, T{1});
  MatMulToLower(n, V, du, c.ld_kv, vt, ld_c, dt, ld_c, T{1});
  MaskLower(n, dt);

  MatMulLowerTransposed(n, c.kp + V, c.t, ld_c, grad.wu, c.ld_kv, din, c.ld_kv, T{0});
  std::fill_n(grad.beta, kStateChunk, T{0});
  for (int64_t i = 0; i < n; ++i) {
    e_start[i] = c.gamma[i] * (e_start[i] - row_dot(c.k, c.ld_k, din, c.ld_kv, i));
    for (int64_t j = 0; j < V; ++j) grad.v[i * c.ld_v + j] += din[i * c.ld_kv + c.kp + j];
    for (int64_t j = 0; j < K; ++j) {
      grad.k[i * c.ld_k + j] =
          c.kappa[i] * grad.k_end[i * c.ld_k + j] - c.gamma[i] * din[i * c.ld_kv + j];
    }
    for (int64_t j = 0; j <= i; ++j) grad.beta[j] += dt[i * ld_c + j] * c.x[i * ld_c + j];
  }
  e_start[n - 1] += static_cast<T>(c.total * grad.total);

  MatMulLower(n, n, dt, ld_c, tt, ld_c, y, ld_c, T{0});
  T* da = dp;
  MatMulLowerTransposed(n, n, c.x, ld_c, y, ld_c, da, ld_c, T{0});
  ScoresAdjoint(c, d_o != nullptr, da, db, e, grad);
  for (int64_t j = 0; j < n; ++j) {
    e[(n - 1) * ld_c + j] += c.kappa[j] * row_dot(c.k, c.ld_k, grad.k_end, c.ld_k, j);
  }
  GateAdjoint(n, e, e_start, grad.g);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fenwick::cpu
HWY_AFTER_NAMESPACE();

#endif  // FENWICK_CPU_GATED_DELTA_CHUNK_BACKWARD_INL_H_
