// Between the tensors of a call and the tiles of a chunk (chunk-inl.h).

#include <algorithm>
#include <cstdint>

#include "cpu/gated_delta/segments.h"
#include "cpu/scratch.h"
#include "cpu/sequence.h"

#if defined(FENWICK_CPU_GATED_DELTA_CHUNK_IO_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FENWICK_CPU_GATED_DELTA_CHUNK_IO_INL_H_
#undef FENWICK_CPU_GATED_DELTA_CHUNK_IO_INL_H_
#else
#define FENWICK_CPU_GATED_DELTA_CHUNK_IO_INL_H_
#endif

#include "cpu/gated_delta/chunk-inl.h"
#include "cpu/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fenwick::cpu {
namespace HWY_NAMESPACE {

// Where the tokens of one head of one sequence lie.
struct DeltaRows {
  TokenRows q, k, v, g, beta, lambda;

  DeltaRows(const Inputs& in, const Sequence& s, int64_t head, int64_t group)
      : q(in.q, TensorView(), s, group),
        k(in.k, in.initial_state.k, s, group),
        v(in.v, in.initial_state.v, s, head),
        g(in.g, in.initial_state.g, s, head),
        beta(in.beta, in.initial_state.beta, s, head),
        lambda(in.level_scales, TensorView(), s, head) {}
};

// The tokens of one chunk of a sequence; those before `queries` lie in the ring and have no query.
struct ChunkSpan {
  int64_t first, count;
  int64_t queries;  // index in the chunk of the first token with a query; count: none

  ChunkSpan(const Sequence& s, int64_t chunk)
      : first(chunk * kStateChunk),
        count(std::min<int64_t>(kStateChunk, s.end - first)),
        queries(std::clamp<int64_t>(s.begin - first, 0, count)) {}

  bool has_queries() const { return queries < count; }
};

// The keys are those of all heads of a group.
template <typename T>
void LoadKeys(const DeltaRows& rows, const ChunkSpan& span, DeltaChunk<T>& c) {
  c.n = span.count;
  LoadRows(rows.k, span.first, c.n, c.K, c.k, c.ld_k);
}

template <typename T>
void LoadValues(const DeltaRows& rows, const ChunkSpan& span, DeltaChunk<T>& c) {
  c.n = span.count;
  LoadRows(rows.v, span.first, c.n, c.V, c.v(), c.ld_kv);
  LoadScalars(rows.g, span.first, c.n, c.g);
  LoadScalars(rows.beta, span.first, c.n, c.beta);
}

// lambda [L, 64] of the tokens with a query, zero for the others.
template <typename T>
void LoadLevels(const DeltaRows& rows, const ChunkSpan& span, int L, T* lambda) {
  Scratch scratch;
  T* row = scratch.New<T>(PaddedColumns<T>(L));
  for (int64_t i = 0; i < span.count; ++i) {
    if (i < span.queries) {
      std::fill_n(row, L, T{0});
    } else {
      LoadRow(rows.lambda.dtype(), rows.lambda.Row(span.first + i), L, row);
    }
    for (int l = 0; l < L; ++l) lambda[l * kStateChunk + i] = row[l];
  }
}

// The queries, times the scale, are those of all heads of a group.
template <typename T>
void LoadQueries(const DeltaRows& rows, const ChunkSpan& span, double scale, DeltaChunk<T>& c) {
  HWY_ALIGN T factor[kStateChunk];
  std::fill_n(factor, kStateChunk, static_cast<T>(scale));
  LoadRows(rows.q, span.first, c.n, c.K, c.q, c.ld_k);
  ScaleRows(c.n, c.kp, factor, c.q, c.ld_k, c.q, c.ld_k);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fenwick::cpu
HWY_AFTER_NAMESPACE();

#endif  // FENWICK_CPU_GATED_DELTA_CHUNK_IO_INL_H_
