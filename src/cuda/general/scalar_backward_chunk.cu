// Scalar gate, backward: everything inside the chunks (scalar_backward.cuh has the equations).
#include "cuda/general/scalar_backward.cuh"
#include "cuda/launch.h"

namespace fenwick::cuda::general {
namespace {

template <typename T>
struct QueryMemory {
  TileMemory<T> tiles;
  TileMatrix<T> pairs;  // [t][s]
  double sums[kChunk];
  ChunkLevels<T> levels;
  ChunkLevelGradients<T> d_levels;
  T dots[kChunk];   // of a row with a node's read
  T reads[kChunk];  // flow of each row's reads
  T warp_flow[2];
};

// dlevel_scales, row_flow, read_flow; block = (chunk, head).
template <typename Math>
__global__ void __launch_bounds__(kThreads)
    QueryFlows(const __grid_constant__ Problem problem,
               const __grid_constant__ ScalarStates<typename Math::Scalar> states,
               const __grid_constant__ ScalarGradients<typename Math::Scalar> gradients,
               const __grid_constant__ TokenRows d_o, const __grid_constant__ Rows d_levels) {
  using T = typename Math::Scalar;
  auto& shared = SharedAs<QueryMemory<T>>();
  FlatIndex index{blockIdx.x};
  const int head = index.Take(problem.heads);
  const ChunkAt chunk(problem.geometry, index.rest);
  const std::int64_t item = ItemOf(problem, index.rest, head);
  const Span& span = chunk.span;
  const int h = problem.Head(head), row = threadIdx.x;
  const T scale = static_cast<T>(problem.scale);
  if (chunk.first_query() >= chunk.rows()) {
    if (row < kChunk) gradients.row_flow[item * kChunk + row] = 0;
    for (int bit = row; bit < gradients.node_bits; bit += kThreads) {
      gradients.ReadFlow(item, bit) = 0;
    }
    return;
  }

  shared.d_levels.Clear();
  for (int bit = row; bit < gradients.node_bits; bit += kThreads) gradients.ReadFlow(item, bit) = 0;
  if (row < kChunk) shared.reads[row] = 0;
  shared.levels.Load(problem, chunk, h);
  LoadGates(shared.sums, problem.g, chunk, h);

  const TokenSource<T> q{&problem.q, &span, chunk.first_row(), problem.Group(head)};
  const TokenSource<T> k{&problem.k, &span, chunk.first_row(), problem.Group(head)};
  const TokenSource<T> v{&problem.v, &span, chunk.first_row(), h};
  const TokenSource<T> d_output{&d_o, &span, chunk.first_row(), h};
  typename Math::Tile tile;
  Clear(tile);
  Product<Math>(tile, shared.tiles, problem.K, Left(q), RightT(k));
  ForEach<Math>(tile, [&](int t, int s, T dot) {
    shared.pairs(t, s) = s <= t ? dot * scale * Decay<T>(shared.sums, t, s) : T(0);
  });
  Clear(tile);
  Product<Math>(tile, shared.tiles, problem.V, Left(d_output), RightT(v));
  ForEach<Math>(tile, [&](int t, int s, T dot) { shared.pairs(t, s) *= dot; });
  __syncthreads();
  // Rows: gradients of the levels inside the chunk, then pairs(t, r) = sum_{s < r} P dP, r <= t.
  if (row < kChunk) {
    T before = 0;
    for (int s = 0; s < kChunk; ++s) {
      const T pair = shared.pairs(row, s);
      shared.pairs(row, s) = s <= row ? before : T(0);
      if (s > row) continue;
      shared.d_levels.x[row][LevelOf(problem, row, s)] += pair;
      before += pair * shared.levels.At(row, s);
    }
  }
  __syncthreads();
  T over = 0;
  if (row < kChunk) {
    for (int t = row; t < kChunk; ++t) over += shared.pairs(t, row);
  }

  ForEachRead(problem, span, chunk.absolute(), head, states.node_total,
              [&](int bit, const NodeAt& node, double gap) {
                __syncthreads();
                if (row < kChunk) shared.dots[row] = 0;
                for (int v0 = 0; v0 < problem.V; v0 += kTile) {
                  const MatrixSource<T> state{
                      FindState(problem, node, static_cast<const T*>(states.states)), problem.K,
                      problem.V, 0, v0};
                  Clear(tile);
                  Product<Math>(tile, shared.tiles, problem.K, Left(q), Right(state));
                  AddRowDots<Math>(tile, TokenSource<T>{&d_o, &span, chunk.first_row(), h, v0},
                                   shared.dots);
                }
                __syncthreads();
                const int level = NodeLevel(problem, bit);
                T flow = 0;
                if (row < kChunk) {
                  const T gradient = scale * Exp<T>(gap + shared.sums[row]) * shared.dots[row];
                  shared.d_levels.x[row][level] += gradient;
                  flow = gradient * LoadToken<T>(problem.level_scales, span,
                                                 chunk.first_row() + row, h, level);
                  shared.reads[row] += flow;
                }
                for (int mask = 16; mask > 0; mask /= 2) {
                  flow += __shfl_xor_sync(0xffffffffu, flow, mask);
                }
                if (row % 32 == 0 && row < kChunk) shared.warp_flow[row / 32] = flow;
                __syncthreads();
                if (row == 0) {
                  gradients.ReadFlow(item, bit) = shared.warp_flow[0] + shared.warp_flow[1];
                }
              });
  __syncthreads();
  if (row < kChunk) {
    for (int t = row; t < kChunk; ++t) over += shared.reads[t];
    gradients.row_flow[item * kChunk + row] = over;
  }
  if (d_levels.data == nullptr) return;
  shared.d_levels.Store(problem, chunk, h, d_levels);
}

template <typename T>
struct ChunkMemory {
  TileMemory<T> tiles;
  TileMatrix<T> pairs;  // [t][s]
  double sums[kChunk];
  ChunkLevels<T> levels;
  T row_scale[kChunk];
  T to_end[kChunk];
  T write_flow[kChunk];
};

// dv, write_flow; block = (chunk, head).
template <typename Math>
__global__ void __launch_bounds__(kThreads)
    ValueGradients(const __grid_constant__ Problem problem,
                   const __grid_constant__ ScalarGradients<typename Math::Scalar> gradients,
                   const __grid_constant__ TokenRows d_o,
                   const __grid_constant__ TokenGradients dv) {
  using T = typename Math::Scalar;
  auto& shared = SharedAs<ChunkMemory<T>>();
  FlatIndex index{blockIdx.x};
  const int head = index.Take(problem.heads);
  const ChunkAt chunk(problem.geometry, index.rest);
  if (!chunk.exists()) return;
  const std::int64_t item = ItemOf(problem, index.rest, head);
  const Span& span = chunk.span;
  const int h = problem.Head(head);
  const T scale = static_cast<T>(problem.scale);

  shared.levels.Load(problem, chunk, h);
  LoadGates(shared.sums, problem.g, chunk, h);
  if (threadIdx.x < kChunk) {
    shared.to_end[threadIdx.x] = Decay<T>(shared.sums, kChunk - 1, threadIdx.x);
    shared.write_flow[threadIdx.x] = 0;
  }
  const TokenSource<T> q{&problem.q, &span, chunk.first_row(), problem.Group(head)};
  const TokenSource<T> k{&problem.k, &span, chunk.first_row(), problem.Group(head)};
  TokenSource<T> k_to_end = k;
  k_to_end.scale = shared.to_end;
  typename Math::Tile tile;
  Clear(tile);
  Product<Math>(tile, shared.tiles, problem.K, Left(q), RightT(k));
  ForEach<Math>(tile, [&](int t, int s, T dot) {
    shared.pairs(t, s) =
        s <= t ? dot * scale * shared.levels.At(t, s) * Decay<T>(shared.sums, t, s) : T(0);
  });
  const bool writes = chunk.absolute() < span.last_chunk();
  for (int v0 = 0; v0 < problem.V; v0 += kTile) {
    Clear(tile);
    if (writes) {
      const MatrixSource<T> d_state{gradients.grads + item * problem.state_size(), problem.K,
                                    problem.V, 0, v0};
      Product<Math>(tile, shared.tiles, problem.K, Left(k_to_end), Right(d_state));
      AddRowDots<Math>(tile, TokenSource<T>{&problem.v, &span, chunk.first_row(), h, v0},
                       shared.write_flow);
    }
    const TokenSource<T> d_output{&d_o, &span, chunk.first_row(), h, v0};
    Product<Math>(tile, shared.tiles, kChunk, LeftT(SharedSource<T>{&shared.pairs}),
                  Right(d_output));
    StoreGradients<Math>(tile, dv, span, chunk.first_row(), h, v0, problem.V);
  }
  __syncthreads();
  if (threadIdx.x < kChunk) {
    gradients.write_flow[item * kChunk + threadIdx.x] = shared.write_flow[threadIdx.x];
  }
}

// dq, dk; block = (chunk, group, 64 columns of K), summing over the heads of the group.
template <typename Math>
__global__ void __launch_bounds__(kThreads)
    KeyGradients(const __grid_constant__ Problem problem,
                 const __grid_constant__ ScalarStates<typename Math::Scalar> states,
                 const __grid_constant__ ScalarGradients<typename Math::Scalar> gradients,
                 const __grid_constant__ TokenRows d_o, const __grid_constant__ TokenGradients dq,
                 const __grid_constant__ TokenGradients dk) {
  using T = typename Math::Scalar;
  auto& shared = SharedAs<ChunkMemory<T>>();
  FlatIndex index{blockIdx.x};
  const int k0 = index.Take((problem.K + kTile - 1) / kTile) * kTile;
  const int group = index.Take(problem.groups);
  const ChunkAt chunk(problem.geometry, index.rest);
  if (!chunk.exists()) return;
  const Span& span = chunk.span;
  const T scale = static_cast<T>(problem.scale);
  const int global_group = problem.group_begin + group;
  const TokenSource<T> q{&problem.q, &span, chunk.first_row(), global_group, k0};
  const TokenSource<T> k{&problem.k, &span, chunk.first_row(), global_group, k0};
  const SharedSource<T> pairs{&shared.pairs};

  typename Math::Tile dq_tile, dk_tile;
  Clear(dq_tile);
  Clear(dk_tile);
  for (int i = 0; i < problem.heads_per_group; ++i) {
    const int head = group * problem.heads_per_group + i, h = problem.Head(head);
    __syncthreads();
    shared.levels.Load(problem, chunk, h);
    LoadGates(shared.sums, problem.g, chunk, h);
    TokenSource<T> v{&problem.v, &span, chunk.first_row(), h};
    TokenSource<T> d_output{&d_o, &span, chunk.first_row(), h};
    if (chunk.first_query() < chunk.rows()) {
      typename Math::Tile tile;
      Clear(tile);
      Product<Math>(tile, shared.tiles, problem.V, Left(d_output), RightT(v));
      ForEach<Math>(tile, [&](int t, int s, T dot) {
        shared.pairs(t, s) =
            s <= t ? dot * scale * shared.levels.At(t, s) * Decay<T>(shared.sums, t, s) : T(0);
      });
      Product<Math>(dq_tile, shared.tiles, kChunk, Left(pairs), Right(k));
      Product<Math>(dk_tile, shared.tiles, kChunk, LeftT(pairs), Right(q));
      d_output.scale = shared.row_scale;
      ForEachRead(problem, span, chunk.absolute(), head, states.node_total,
                  [&](int bit, const NodeAt& node, double gap) {
                    LoadReadScale(problem, chunk, h, bit, gap, shared.sums, shared.row_scale);
                    const MatrixSource<T> state{
                        FindState(problem, node, static_cast<const T*>(states.states)), problem.K,
                        problem.V, k0};
                    Product<Math>(dq_tile, shared.tiles, problem.V, Left(d_output), RightT(state));
                  });
    }
    if (chunk.absolute() >= span.last_chunk()) continue;
    if (threadIdx.x < kChunk) {
      shared.to_end[threadIdx.x] = Decay<T>(shared.sums, kChunk - 1, threadIdx.x);
    }
    v.scale = shared.to_end;
    const MatrixSource<T> d_state{
        gradients.grads + ItemOf(problem, index.rest, head) * problem.state_size(), problem.K,
        problem.V, k0};
    Product<Math>(dk_tile, shared.tiles, problem.V, Left(v), RightT(d_state));
  }
  StoreGradients<Math>(dq_tile, dq, span, chunk.first_row(), global_group, k0, problem.K);
  StoreGradients<Math>(dk_tile, dk, span, chunk.first_row(), global_group, k0, problem.K);
}

// Flow from left node (bit, ...) of chunk `chunk` to readers after the chunk, this thread's part.
template <typename T>
__device__ T LaterReads(const Problem& problem, const ScalarGradients<T>& gradients,
                        const ChunkAt& chunk, int head, int bit) {
  const Span& span = chunk.span;
  const std::int64_t end = ((chunk.absolute() >> bit) + 1) << bit;  // of the node's readers
  T sum = 0;
  for (std::int64_t c = chunk.absolute() + 1 + threadIdx.x; c < end && c <= span.last_chunk();
       c += kChunk) {
    sum +=
        gradients.ReadFlow(ItemOf(problem, span.chunk_begin + c - span.first_chunk(), head), bit);
  }
  return sum;
}

// dg; block of 64 threads = (chunk, head).
template <typename T>
__global__ void __launch_bounds__(kChunk)
    GateGradients(const __grid_constant__ Problem problem,
                  const __grid_constant__ ScalarGradients<T> gradients,
                  const __grid_constant__ TokenGradients dg) {
  __shared__ T write_flow[kChunk];
  __shared__ T warps[kChunk / 32];
  FlatIndex index{blockIdx.x};
  const int head = index.Take(problem.heads), row = threadIdx.x;
  const ChunkAt chunk(problem.geometry, index.rest);
  if (!chunk.exists()) return;
  const Span& span = chunk.span;
  const std::int64_t item = ItemOf(problem, index.rest, head);
  write_flow[row] = gradients.write_flow[item * kChunk + row];

  const std::int64_t final_chunk = NextBase(span.base, span.base + span.rows()) / kChunk;
  T passing = 0;
  ForEachLeftNode(static_cast<std::uint64_t>(chunk.absolute()), [&](int bit, std::uint64_t end) {
    passing += LaterReads(problem, gradients, chunk, head, bit);
    if (row != 0) return;
    const NodeAt node(problem, span, head, bit, static_cast<std::int64_t>(end));
    if (!node.exists()) return;
    passing += gradients.MergeFlow(problem, span, head, bit, node);
    if (final_chunk > chunk.absolute() && final_chunk >> bit == chunk.absolute() >> bit) {
      passing += gradients.FinalFlow(problem, span, head, bit);
    }
  });
  for (int mask = 16; mask > 0; mask /= 2) {
    passing += __shfl_xor_sync(0xffffffffu, passing, mask);
  }
  if (row % 32 == 0) warps[row / 32] = passing;
  __syncthreads();
  T flow = gradients.row_flow[item * kChunk + row] + (warps[0] + warps[1]);
  for (int s = 0; s < row; ++s) flow += write_flow[s];
  StoreGradient(dg, span, chunk.first_row() + row, problem.Head(head), 0, flow);
}

}  // namespace

template <typename Math>
void ComputeScalarChunkGradients(const Problem& problem, const Plan& plan,
                                 const ScalarStates<typename Math::Scalar>& states,
                                 const ScalarGradients<typename Math::Scalar>& gradients,
                                 const TokenRows& d_o, const ScalarOutputs& out,
                                 cudaStream_t stream) {
  using T = typename Math::Scalar;
  const std::int64_t items = plan.total_chunks * problem.heads;
  const std::int64_t k_tiles = (plan.K + kTile - 1) / kTile;
  Launch("query flows", QueryFlows<Math>, items, kThreads, sizeof(QueryMemory<T>), stream, problem,
         states, gradients, d_o, out.level_scales);
  Launch("value gradients", ValueGradients<Math>, items, kThreads, sizeof(ChunkMemory<T>), stream,
         problem, gradients, d_o, out.v);
  Launch("key gradients", KeyGradients<Math>, plan.total_chunks * problem.groups * k_tiles,
         kThreads, sizeof(ChunkMemory<T>), stream, problem, states, gradients, d_o, out.q, out.k);
  Launch("gate gradients", GateGradients<T>, items, kChunk, 0, stream, problem, gradients, out.g);
}

#define FENWICK_INSTANTIATE(Math)                                     \
  template void ComputeScalarChunkGradients<Math>(                    \
      const Problem&, const Plan&, const ScalarStates<Math::Scalar>&, \
      const ScalarGradients<Math::Scalar>&, const TokenRows&, const ScalarOutputs&, cudaStream_t);
FENWICK_INSTANTIATE(FmaMath<float>)
FENWICK_INSTANTIATE(FmaMath<double>)
FENWICK_INSTANTIATE(TensorMath)
#undef FENWICK_INSTANTIATE

}  // namespace fenwick::cuda::general
