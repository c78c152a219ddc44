// Where the tokens of a call lie, as kernels see them.
//
// A sequence is the tokens [base, position) of its initial state's ring, if it has one, followed by
// the call's tokens. Row j of a sequence is the token at position base + j. Rows are grouped in
// chunks of 64 (kStateChunk) that are aligned in the absolute positions, since base is a multiple
// of 64: chunk i of a sequence is chunk base / 64 + i of the Fenwick tree. Positions are read on
// the device; the host knows upper bounds only, so that the last chunks of a sequence may turn out
// to hold no rows.
#pragma once

#include <cstdint>

#include "cuda/general/elements.cuh"
#include "fenwick/partition.h"
#include "fenwick/state.h"

namespace fenwick::cuda::general {

inline constexpr int kChunk = kStateChunk;

// A tensor [batch, token, head, width] of any strides; width is contiguous.
struct Rows {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int width = 0;
  bool quads = false;  // rows start at multiples of four elements: wide accesses are legal
  std::int64_t batch_stride = 0, token_stride = 0, head_stride = 0;

  __device__ std::int64_t Offset(std::int64_t batch, std::int64_t token, int head) const {
    return batch * batch_stride + token * token_stride + head * head_stride;
  }
};

// One tensor's tokens: those of the call and those of the ring, [N, kStateRing, heads, width].
struct TokenRows {
  Rows call;
  Rows ring;  // no data: there are no ring tokens, or (for q, level_scales) none in them
};

// One sequence.
struct Span {
  int sequence = 0;
  std::int64_t batch = 0, first_token = 0, tokens = 0;  // of the call
  std::int64_t base = 0;                                // position of row 0
  int ring_tokens = 0;                                  // rows that lie in the ring
  std::int64_t chunk_begin = 0;                         // index of its first chunk over the call

  __device__ std::int64_t rows() const { return ring_tokens + tokens; }
  __device__ std::int64_t first_chunk() const { return base / kChunk; }
  __device__ std::int64_t chunks() const { return (rows() + kChunk - 1) / kChunk; }
  // Absolute index of the chunk that holds the last row; its state is read by nobody.
  __device__ std::int64_t last_chunk() const { return first_chunk() + chunks() - 1; }
};

struct Geometry {
  int num_sequences = 0;
  std::int64_t tokens = 0;                    // of each sequence, where all are equal
  std::int64_t chunks_per_sequence = 0;       // upper bound, where all are equal
  std::int64_t total_chunks = 0;              // over all sequences
  const std::int64_t* token_begin = nullptr;  // [N + 1] packed sequences, device memory
  const std::int64_t* chunk_begin = nullptr;  // [N + 1]
  const std::int64_t* position = nullptr;     // [N] of the initial state, or null: all 0
  const std::int64_t* base = nullptr;         // [N]

  __device__ std::int64_t ChunkBegin(int n) const {
    return chunk_begin ? chunk_begin[n] : n * chunks_per_sequence;
  }

  __device__ Span SpanOf(int n) const {
    Span span;
    span.sequence = n;
    span.batch = token_begin ? 0 : n;
    span.first_token = token_begin ? token_begin[n] : 0;
    span.tokens = token_begin ? token_begin[n + 1] - token_begin[n] : tokens;
    span.base = base ? base[n] : 0;
    span.ring_tokens = position ? static_cast<int>(position[n] - span.base) : 0;
    span.chunk_begin = ChunkBegin(n);
    return span;
  }

  // Sequence whose run of units holds unit `id`, where sequence n starts at unit
  // (ChunkBegin(n) >> shift) + extra * n: with extra = 0 and shift = 0 chunks, otherwise aligned
  // groups of 2^shift chunks.
  __device__ int SequenceOf(std::int64_t id, int shift, int extra) const {
    int low = 0, high = num_sequences - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if ((ChunkBegin(middle) >> shift) + extra * static_cast<std::int64_t>(middle) <= id) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
};

// Chunk `id` of the call.
struct ChunkAt {
  Span span;
  std::int64_t index;  // within the sequence

  __device__ ChunkAt(const Geometry& geometry, std::int64_t id) {
    span = geometry.SpanOf(geometry.SequenceOf(id, 0, 0));
    index = id - span.chunk_begin;
  }
  __device__ bool exists() const { return index < span.chunks(); }
  __device__ std::int64_t absolute() const { return span.first_chunk() + index; }
  __device__ std::int64_t first_row() const { return index * kChunk; }
  // Rows that are queries are those from here on.
  __device__ int first_query() const {
    const std::int64_t rest = span.ring_tokens - first_row();
    return rest < 0 ? 0 : static_cast<int>(rest < kChunk ? rest : kChunk);
  }
  __device__ int rows() const {
    const std::int64_t rest = span.rows() - first_row();
    return rest < 0 ? 0 : static_cast<int>(rest < kChunk ? rest : kChunk);
  }
};

// Element offset of row j in whichever tensor holds it, or -1 where the sequence has no such row.
struct RowAt {
  const Rows* rows = nullptr;
  std::int64_t offset = -1;

  __device__ RowAt(const TokenRows& tokens, const Span& span, std::int64_t j, int head) {
    if (j < 0 || j >= span.rows()) return;
    if (j >= span.ring_tokens) {
      if (tokens.call.data == nullptr) return;
      rows = &tokens.call;
      offset = rows->Offset(span.batch, span.first_token + j - span.ring_tokens, head);
    } else if (tokens.ring.data != nullptr) {
      rows = &tokens.ring;
      offset = rows->Offset(span.sequence, (span.base + j) % kStateRing, head);
    }
  }
  __device__ bool exists() const { return rows != nullptr; }
};

template <typename T>
__device__ inline T LoadToken(const TokenRows& tokens, const Span& span, std::int64_t j, int head,
                              int column = 0) {
  const RowAt row(tokens, span, j, head);
  if (!row.exists()) return T(0);
  return LoadElement<T>(row.rows->data, row.rows->dtype, row.offset + column);
}

// Where the gradient of a token tensor goes, and what the gradient of the final state's ring adds.
struct TokenGradients {
  TokenRows out;  // absent data: not wanted
  Rows d_final;   // [N, kStateRing, heads, width] or no data
};

template <typename T>
__device__ inline void StoreGradient(const TokenGradients& gradients, const Span& span,
                                     std::int64_t j, int head, int column, T value) {
  const RowAt row(gradients.out, span, j, head);
  if (!row.exists()) return;
  const Rows& d_final = gradients.d_final;
  const std::int64_t position = span.base + j;
  if (d_final.data != nullptr && position >= NextBase(span.base, span.base + span.rows())) {
    value += LoadElement<T>(d_final.data, d_final.dtype,
                            d_final.Offset(span.sequence, position % kStateRing, head) + column);
  }
  StoreElement(row.rows->data, row.rows->dtype, row.offset + column, value);
}

// Takes a flat index below 2^32 apart, fastest axis first; by divisions of 32 bits, which cost a
// fifth of those of 64.
struct FlatIndex {
  std::int64_t rest;
  __device__ int Take(int size) {
    const auto flat = static_cast<unsigned>(rest), divisor = static_cast<unsigned>(size);
    rest = flat / divisor;
    return static_cast<int>(flat % divisor);
  }
};

}  // namespace fenwick::cuda::general
