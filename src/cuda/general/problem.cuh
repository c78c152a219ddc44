// What every kernel of the general path is given, and the Fenwick tree over chunks as they read it.
//
// The tree. Node (bit, end) covers the 2^bit chunks before absolute chunk `end`; it is a left node
// when bit = ctz(end). Chunk c reads the left nodes (bit, end) that ForEachLeftNode(c) visits.
// Arrays of nodes have one slot per chunk and head: slot of `end` is chunk end - 1, which at first
// holds that chunk's own state (bit 0) and grows in place up to bit ctz(end), exactly as in a
// Fenwick array; what a reader finds there is always the left node. Nodes that end at or before a
// sequence's base come from the initial state: there, `bit` alone names the node, and its decay
// already runs up to the base.
#pragma once

#include "cuda/general/gates.cuh"
#include "cuda/general/geometry.cuh"
#include "cuda/general/sources.cuh"
#include "cuda/general/tile.cuh"

namespace fenwick::cuda::general {

// A call, restricted to the heads of one pass (plan.h).
struct Problem {
  Geometry geometry;
  TokenRows q, k;                       // [B, T, G, K]
  TokenRows v;                          // [B, T, H, V]
  TokenRows g, beta;                    // [B, T, H]
  TokenRows level_scales;               // [B, T, H, L]
  const void* initial_nodes = nullptr;  // [N, H, initial_slots, K, V] or null
  int initial_slots = 0;
  int top_slot = 0;  // slots beyond are merged into this one (saturation); kNoTop: none are
  int K = 0, V = 0, L = 0;
  int H = 0;  // all heads: strides of the initial state
  int heads_per_group = 1;
  int head_begin = 0, heads = 0;    // of this pass
  int group_begin = 0, groups = 0;  // of this pass
  double scale = 1.0;

  // Global head and group of head `local` of the pass.
  __host__ __device__ int Head(int local) const { return head_begin + local; }
  __host__ __device__ int Group(int local) const { return Head(local) / heads_per_group; }
  __host__ __device__ std::int64_t state_size() const { return static_cast<std::int64_t>(K) * V; }
};

inline constexpr int kNoTop = 1 << 20;

__device__ inline int LevelOf(const Problem& problem, std::uint64_t t, std::uint64_t s) {
  return SaturatedLevel(t, s, problem.L);
}
// Level through which a chunk reads its left node of 2^bit chunks.
__device__ inline int NodeLevel(const Problem& problem, int bit) {
  const int level = 7 + bit;  // bit_width(64 * 2^bit)
  return level < problem.L ? level : problem.L - 1;
}

// Slot of the initial state that node (bit, end <= first chunk) of a sequence lies in, or -1 where
// it holds nothing of its own. Merged top nodes stand for the lowest of the bits they hold.
__device__ inline int InitialSlot(const Problem& problem, const Span& span, int bit) {
  if (problem.initial_nodes == nullptr) return -1;
  if (bit < problem.top_slot) return bit;
  const std::int64_t merged = span.first_chunk() >> problem.top_slot << problem.top_slot;
  return merged != 0 && __ffsll(merged) - 1 == bit ? problem.top_slot : -1;
}

// Item of the arrays indexed [chunk, head of the pass].
__device__ inline std::int64_t ItemOf(const Problem& problem, std::int64_t chunk, int head) {
  return chunk * problem.heads + head;
}

// Where left node (bit, end) of a sequence and head lies.
struct NodeAt {
  std::int64_t item = -1;     // slot of the call, or
  std::int64_t initial = -1;  // matrix of the initial state, or nowhere: the node is zero

  __device__ NodeAt(const Problem& problem, const Span& span, int head, int bit, std::int64_t end) {
    if (end > span.first_chunk()) {
      item = ItemOf(problem, span.chunk_begin + end - span.first_chunk() - 1, head);
    } else {
      const int slot = InitialSlot(problem, span, bit);
      if (slot >= 0 && slot < problem.initial_slots) {
        initial = (static_cast<std::int64_t>(span.sequence) * problem.H + problem.Head(head)) *
                      problem.initial_slots +
                  slot;
      }
    }
  }
  __device__ bool exists() const { return item >= 0 || initial >= 0; }

  template <typename T>
  __device__ T* Find(const Problem& problem, T* slots, T* initial_nodes) const {
    return item >= 0 ? slots + item * problem.state_size()
                     : initial_nodes + initial * problem.state_size();
  }
};

// The matrix of a node in memory: `slots` [chunks, heads, K, V] of the call, or the initial state.
template <typename T>
__device__ inline const T* FindState(const Problem& problem, const NodeAt& node, const T* slots) {
  return node.Find(problem, slots, static_cast<const T*>(problem.initial_nodes));
}

// Merge `id` at level `bit`: node (bit + 1, end) is made of (bit, end - 2^bit) and (bit, end).
// Merges of all sequences are numbered without gaps larger than one per sequence.
struct MergeAt {
  Span span;
  std::int64_t end = 0;

  __device__ MergeAt(const Geometry& geometry, int bit, std::int64_t id) {
    const int shift = bit + 1;
    const int n = geometry.SequenceOf(id, shift, 1);
    span = geometry.SpanOf(n);
    const std::int64_t index = id - (span.chunk_begin >> shift) - n;
    end = ((span.first_chunk() >> shift) + 1 + index) << shift;
  }
  // The parent has a reader: a later chunk.
  __device__ bool needed() const { return end <= span.last_chunk(); }
};
inline std::int64_t NumMerges(std::int64_t total_chunks, int num_sequences, int bit) {
  return (total_chunks >> (bit + 1)) + num_sequences;
}

// Aligned run `id` of 2^shift chunks.
struct RunAt {
  Span span;
  std::int64_t begin = 0;  // absolute chunk

  __device__ RunAt(const Geometry& geometry, int shift, std::int64_t id) {
    const int n = geometry.SequenceOf(id, shift, 2);
    span = geometry.SpanOf(n);
    const std::int64_t index = id - (span.chunk_begin >> shift) - 2 * static_cast<std::int64_t>(n);
    begin = ((span.first_chunk() >> shift) + index) << shift;
  }
};
inline std::int64_t NumRuns(std::int64_t total_chunks, int num_sequences, int shift) {
  return (total_chunks >> shift) + 2 * static_cast<std::int64_t>(num_sequences);
}

// level_scales of a chunk's rows for the levels inside the chunk; rows that are no query read 0.
template <typename T>
struct ChunkLevels {
  static constexpr int kLevels = 7;  // bit_width of 0 .. 63
  T x[kChunk][kLevels];

  __device__ void Load(const Problem& problem, const ChunkAt& chunk, int head) {
    for (int i = threadIdx.x; i < kChunk * kLevels; i += blockDim.x) {
      const int row = i / kLevels, level = i % kLevels;
      x[row][level] = LoadToken<T>(problem.level_scales, chunk.span, chunk.first_row() + row, head,
                                   level < problem.L ? level : problem.L - 1);
    }
  }
  __device__ T At(int t, int s) const { return x[t][Level(t, s)]; }
};

// Gradients of level_scales of a chunk's queries.
template <typename T>
struct ChunkLevelGradients {
  static constexpr int kLevels = 40;  // of a sequence of 2^39 tokens
  T x[kChunk][kLevels];

  __device__ void Clear() {
    for (int i = threadIdx.x; i < kChunk * kLevels; i += blockDim.x) (&x[0][0])[i] = 0;
  }
  __device__ void Store(const Problem& problem, const ChunkAt& chunk, int head,
                        const Rows& to) const {
    const Span& span = chunk.span;
    const int queries = chunk.rows() - chunk.first_query();
    for (std::int64_t i = threadIdx.x; i < static_cast<std::int64_t>(queries) * problem.L;
         i += blockDim.x) {
      const int t = chunk.first_query() + static_cast<int>(i / problem.L);
      const int level = static_cast<int>(i % problem.L);
      const std::int64_t token = span.first_token + chunk.first_row() + t - span.ring_tokens;
      StoreElement<T>(to.data, to.dtype, to.Offset(span.batch, token, head) + level,
                      level < kLevels ? x[t][level] : T(0));
    }
  }
};

}  // namespace fenwick::cuda::general
