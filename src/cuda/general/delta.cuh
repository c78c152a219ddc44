// Gated delta rule: what forward and backward share.
//
// Inside a chunk, with a = gates.cuh's sums, A = a[63], D(t, s) = exp(a[t] - a[s]), and S the state
// at the chunk's start, the recurrence is linear algebra on 64 rows:
//   N[t,s] = beta[t] D(t,s) k[t].k[s], s < t          Ti = (I + N)^-1          Tb = Ti diag(beta)
//   E[t,s] = scale D(t,s) q[t].k[s],   s <= t         B = E Tb
//   W = Tb (exp(a) K)    U = Tb V    Q~ = scale exp(a) Q - E W    K~ = exp(A - a) K
//   o = (B . level_scales) V + (level_scales) Q~ S           every level alike
//   state at the end:  M S + X,   M = exp(A) I - K~^T W,   X = K~^T U
//
// Across chunks the pairs (M, X) compose, so the Fenwick tree holds for each node the product Phi
// of its chunks' M and its state S:
//   Phi(bit + 1, end) = Phi(right) Phi(left)
//   S(bit + 1, end) = Phi(right) S(left) + S(right)
// and a chunk reads the nodes e1, e2, ... (newest first) without carrying their states:
//   o += level_scales Q^_i S_{e_i},   Q^_1 = Q~,   Q^_{i+1} = Q^_i Phi_{e_i}
// All of it is products of matrices of one size, in parallel over chunks, and log2(chunks) deep;
// the rounding of tf32 products thereby grows with the depth, not with the length.
#pragma once

#include "cuda/general/arena.h"
#include "cuda/general/call.h"
#include "cuda/general/problem.cuh"

namespace fenwick::cuda::general {

inline constexpr int kMaxBits = 48;

// Matrices of all nodes, also of right children: node (bit, end) of a sequence.
template <typename T>
struct Pyramid {
  T* data = nullptr;                   // [nodes, heads, K, K]
  std::int64_t level_begin[kMaxBits];  // first node of each level

  __device__ T* Find(const Problem& problem, const Span& span, int head, int bit,
                     std::int64_t end) const {
    const std::int64_t index = (end >> bit) - (span.first_chunk() >> bit) - 1;
    const std::int64_t node = level_begin[bit] + (span.chunk_begin >> bit) + span.sequence + index;
    return data + (node * problem.heads + head) * problem.K * problem.K;
  }
};

inline std::int64_t PyramidNodes(const Plan& plan) {
  std::int64_t nodes = 0;
  for (int bit = 0; bit == 0 || bit < plan.node_bits; ++bit) {
    nodes += (plan.total_chunks >> bit) + plan.N;
  }
  return nodes;
}

template <typename T>
Pyramid<T> TakePyramid(Arena& arena, const Plan& plan, std::int64_t heads) {
  Pyramid<T> pyramid;
  std::int64_t nodes = 0;
  for (int bit = 0; bit == 0 || bit < plan.node_bits; ++bit) {
    pyramid.level_begin[bit] = nodes;
    nodes += (plan.total_chunks >> bit) + plan.N;
  }
  pyramid.data = arena.Take<T>(nodes * heads * plan.K * plan.K);
  return pyramid;
}

template <typename T>
struct DeltaStates {
  T* inverse = nullptr;       // [chunks, heads, 64, 64] Ti
  T* inverse_beta = nullptr;  // [chunks, heads, 64, 64] Tb
  T* scores = nullptr;        // [chunks, heads, 64, 64] E
  T* mix = nullptr;           // [chunks, heads, 64, 64] B
  T* w = nullptr;             // [chunks, heads, 64, K]
  T* u = nullptr;             // [chunks, heads, 64, V]
  T* q_tilde = nullptr;       // [chunks, heads, 64, K]
  T* chain = nullptr;         // [chunks, heads, node_bits, 64, K] Q^_2, Q^_3, ...
  T* states = nullptr;        // [chunks, heads, K, V] left nodes
  Pyramid<T> phi;
  int node_bits = 0;

  // Q^ of read number `order` (from 0) of an item.
  __device__ T* Query(const Problem& problem, std::int64_t item, int order) const {
    const std::int64_t size = static_cast<std::int64_t>(kChunk) * problem.K;
    return order == 0 ? q_tilde + item * size : chain + (item * node_bits + order - 1) * size;
  }
};

template <typename T>
DeltaStates<T> TakeDeltaStates(Arena& arena, const Plan& plan, std::int64_t heads) {
  const std::int64_t items = plan.total_chunks * heads, square = kChunk * kChunk;
  DeltaStates<T> buffers;
  buffers.node_bits = plan.node_bits;
  buffers.inverse = arena.Take<T>(items * square);
  buffers.inverse_beta = arena.Take<T>(items * square);
  buffers.scores = arena.Take<T>(items * square);
  buffers.mix = arena.Take<T>(items * square);
  buffers.w = arena.Take<T>(items * kChunk * plan.K);
  buffers.u = arena.Take<T>(items * kChunk * plan.V);
  buffers.q_tilde = arena.Take<T>(items * kChunk * plan.K);
  buffers.chain = arena.Take<T>(items * plan.node_bits * kChunk * plan.K);
  buffers.states = arena.Take<T>(items * plan.K * plan.V);
  buffers.phi = TakePyramid<T>(arena, plan, heads);
  return buffers;
}

// Computes all of it (delta_chunk.cu and delta_tree.cu).
template <typename Math>
void ComputeDeltaChunks(const Problem& problem, const Plan& plan,
                        const DeltaStates<typename Math::Scalar>& buffers, cudaStream_t stream);
template <typename Math>
void ComputeDeltaTree(const Problem& problem, const Plan& plan,
                      const DeltaStates<typename Math::Scalar>& buffers, cudaStream_t stream);

// f(bit, end, node, order): the nodes that absolute chunk `chunk` reads, newest first; `order` says
// how many transitions lie between the node and the chunk. Nodes of the initial state lie at the
// sequence's base: no transition leads from one to the next.
template <typename F>
__device__ inline void ForEachDeltaRead(const Problem& problem, const Span& span,
                                        std::int64_t chunk, int head, F&& f) {
  int order = 0;
  ForEachLeftNode(static_cast<std::uint64_t>(chunk), [&](int bit, std::uint64_t end) {
    const auto signed_end = static_cast<std::int64_t>(end);
    const NodeAt node(problem, span, head, bit, signed_end);
    if (node.exists()) f(bit, signed_end, node, order);
    if (signed_end > span.first_chunk()) ++order;
  });
}

// Order of the initial state's nodes, as `chunk` reads them.
__device__ inline int OrderOfInitial(const Span& span, std::int64_t chunk) {
  int order = 0;
  ForEachLeftNode(static_cast<std::uint64_t>(chunk), [&](int, std::uint64_t end) {
    if (static_cast<std::int64_t>(end) > span.first_chunk()) ++order;
  });
  return order;
}

// Number of the read of `bit` by `chunk`, or -1 where it does not read such a node of the call.
__device__ inline int ReadOrder(const Span& span, std::int64_t chunk, int bit) {
  if ((chunk >> bit) % 2 == 0 || (chunk >> bit << bit) <= span.first_chunk()) return -1;
  return __popcll(chunk & ((std::int64_t{1} << bit) - 1));
}

// The final state reads nodes as a chunk at its base would, with K rows Z instead of 64 rows Q^:
//   nodes[slot of e_i] = Z_i S_{e_i},   Z_0 = I,   Z_1 = Phi_{e_0},   Z_{i+1} = Z_i Phi_{e_i}
template <typename T>
struct FinalChain {
  T* data = nullptr;  // [N, heads, node_bits, K, K] Z_1, Z_2, ...
  int node_bits = 0;

  // order >= 1.
  __device__ T* Find(const Problem& problem, const Span& span, int head, int order) const {
    return data + ((static_cast<std::int64_t>(span.sequence) * problem.heads + head) * node_bits +
                   order - 1) *
                      problem.K * problem.K;
  }
};

template <typename T>
FinalChain<T> TakeFinalChain(Arena& arena, const Plan& plan, std::int64_t heads) {
  FinalChain<T> chain;
  chain.node_bits = plan.node_bits;
  chain.data = arena.Take<T>(plan.N * heads * plan.node_bits * plan.K * plan.K);
  return chain;
}

__device__ inline std::int64_t FinalChunk(const Span& span) {
  return NextBase(span.base, span.base + span.rows()) / kChunk;
}

template <typename Math>
void ComputeFinalChain(const Problem& problem, const Plan& plan,
                       const DeltaStates<typename Math::Scalar>& buffers,
                       const FinalChain<typename Math::Scalar>& final_chain, cudaStream_t stream);

// Calls store(row, column, value) for the entries of a tile that lie in a rows x columns matrix
// whose (row0, column0) is the tile's corner.
template <typename Math, typename F>
__device__ inline void ForEachInside(typename Math::Tile& tile, int row0, int rows, int column0,
                                     int columns, F&& f) {
  ForEach<Math>(tile, [&](int i, int j, typename Math::Scalar& value) {
    if (row0 + i < rows && column0 + j < columns) f(row0 + i, column0 + j, value);
  });
}

// Writes a tile into a row-major matrix.
template <typename Math>
__device__ inline void StoreTile(typename Math::Tile& tile, typename Math::Scalar* matrix, int row0,
                                 int rows, int column0, int columns) {
  ForEachInside<Math>(tile, row0, rows, column0, columns,
                      [&](int i, int j, typename Math::Scalar value) {
                        matrix[static_cast<std::int64_t>(i) * columns + j] = value;
                      });
}

template <typename Math>
__device__ inline void LoadTile(typename Math::Tile& tile, const typename Math::Scalar* matrix,
                                int row0, int rows, int column0, int columns) {
  ForEach<Math>(tile, [&](int i, int j, typename Math::Scalar& value) {
    const bool inside = row0 + i < rows && column0 + j < columns;
    value = inside ? matrix[static_cast<std::int64_t>(row0 + i) * columns + column0 + j] : 0;
  });
}

template <typename Math>
__device__ inline void Negate(typename Math::Tile& tile) {
#pragma unroll
  for (int i = 0; i < 32; ++i) tile.x[i] = -tile.x[i];
}

// Row factors of a chunk in shared memory.
template <typename T>
struct RowFactors {
  double sums[kChunk];
  T from_start[kChunk];  // exp(a[t])
  T to_end[kChunk];      // exp(A - a[t])
  T beta[kChunk];

  // Ends synchronised.
  __device__ void Load(const Problem& problem, const ChunkAt& chunk, int head) {
    if (threadIdx.x < kChunk) {
      beta[threadIdx.x] =
          LoadToken<T>(problem.beta, chunk.span, chunk.first_row() + threadIdx.x, head);
    }
    LoadGates(sums, problem.g, chunk, head);
    if (threadIdx.x < kChunk) {
      from_start[threadIdx.x] = Exp<T>(sums[threadIdx.x]);
      to_end[threadIdx.x] = Decay<T>(sums, kChunk - 1, threadIdx.x);
    }
    __syncthreads();
  }
};

inline std::int64_t Tiles(std::int64_t size) { return (size + kTile - 1) / kTile; }

}  // namespace fenwick::cuda::general
