// Scalar gate: the states of all left nodes, in parallel over chunks (scalar.cuh has the
// equations).
#include "cuda/general/scalar.cuh"
#include "cuda/launch.h"

namespace fenwick::cuda::general {
namespace {

// leaf_total; block = (chunk, head).
template <typename T>
__global__ void __launch_bounds__(kChunk)
    LeafTotals(const __grid_constant__ Problem problem,
               const __grid_constant__ ScalarStates<T> buffers) {
  __shared__ double sums[kChunk];
  const std::int64_t item = blockIdx.x;
  const ChunkAt chunk(problem.geometry, item / problem.heads);
  LoadGates(sums, problem.g, chunk, problem.Head(static_cast<int>(item % problem.heads)));
  if (threadIdx.x == 0) buffers.leaf_total[item] = static_cast<T>(sums[kChunk - 1]);
}

// node_total; one warp for each (chunk, head).
template <typename T>
__global__ void __launch_bounds__(kThreads)
    NodeTotals(const __grid_constant__ Problem problem,
               const __grid_constant__ ScalarStates<T> buffers) {
  const std::int64_t item =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (item >= problem.geometry.total_chunks * problem.heads) return;
  const ChunkAt chunk(problem.geometry, item / problem.heads);
  const std::int64_t end = chunk.absolute() + 1, size = end & -end;
  const std::int64_t held = size < chunk.index + 1 ? size : chunk.index + 1;
  double total = 0;
  for (std::int64_t i = threadIdx.x % 32; i < held; i += 32) {
    total += buffers.leaf_total[item - i * problem.heads];
  }
  for (int mask = 16; mask > 0; mask /= 2) total += __shfl_xor_sync(0xffffffffu, total, mask);
  if (threadIdx.x % 32 == 0) buffers.node_total[item] = static_cast<T>(total);
}

template <typename T>
struct LeafMemory {
  TileMemory<T> tiles;
  double sums[kChunk];
  T to_end[kChunk];
};

// X_c; block = (chunk, head, 64 rows of K, 64 columns of V).
template <typename Math>
__global__ void __launch_bounds__(kThreads)
    LeafStates(const __grid_constant__ Problem problem,
               const __grid_constant__ ScalarStates<typename Math::Scalar> buffers) {
  using T = typename Math::Scalar;
  auto& shared = SharedAs<LeafMemory<T>>();
  FlatIndex index{blockIdx.x};
  const int v0 = index.Take((problem.V + kTile - 1) / kTile) * kTile;
  const int k0 = index.Take((problem.K + kTile - 1) / kTile) * kTile;
  const int head = index.Take(problem.heads);
  const ChunkAt chunk(problem.geometry, index.rest);
  if (chunk.absolute() >= chunk.span.last_chunk()) return;

  LoadGates(shared.sums, problem.g, chunk, problem.Head(head));
  if (threadIdx.x < kChunk) {
    shared.to_end[threadIdx.x] = Decay<T>(shared.sums, kChunk - 1, threadIdx.x);
  }
  const TokenSource<T> k{&problem.k,          &chunk.span, chunk.first_row(),
                         problem.Group(head), k0,          shared.to_end};
  const TokenSource<T> v{&problem.v, &chunk.span, chunk.first_row(), problem.Head(head), v0};
  typename Math::Tile x;
  Clear(x);
  Product<Math>(x, shared.tiles, kChunk, LeftT(k), Right(v));
  T* state = buffers.states + ItemOf(problem, index.rest, head) * problem.state_size();
  ForEach<Math>(x, [&](int i, int j, T value) {
    if (k0 + i < problem.K && v0 + j < problem.V) {
      state[static_cast<std::int64_t>(k0 + i) * problem.V + v0 + j] = value;
    }
  });
}

constexpr int kMergeElements = 4 * kThreads;  // of a state, by one block

// One level of the tree; block = (merge, head, part of the state).
template <typename T>
__global__ void __launch_bounds__(kThreads)
    MergeStates(const __grid_constant__ Problem problem,
                const __grid_constant__ ScalarStates<T> buffers, int bit) {
  const std::int64_t size = problem.state_size();
  FlatIndex index{blockIdx.x};
  const int part = index.Take(static_cast<int>((size + kMergeElements - 1) / kMergeElements));
  const int head = index.Take(problem.heads);
  const MergeAt merge(problem.geometry, bit, index.rest);
  if (!merge.needed()) return;
  const NodeAt left(problem, merge.span, head, bit, merge.end - (std::int64_t{1} << bit));
  if (!left.exists()) return;
  const T decay = Exp<T>(RightTotal(problem, merge.span, head, bit, merge.end, buffers));
  const T* from = FindState(problem, left, static_cast<const T*>(buffers.states));
  T* to = buffers.states +
          NodeAt(problem, merge.span, head, bit, merge.end).item * problem.state_size();
  for (std::int64_t i = static_cast<std::int64_t>(part) * kMergeElements + threadIdx.x;
       i < size && i < (part + std::int64_t{1}) * kMergeElements; i += kThreads) {
    to[i] += decay * from[i];
  }
}

}  // namespace

template <typename Math>
void ComputeScalarStates(const Problem& problem, const Plan& plan,
                         const ScalarStates<typename Math::Scalar>& buffers, cudaStream_t stream) {
  using T = typename Math::Scalar;
  const std::int64_t items = plan.total_chunks * problem.heads;
  const std::int64_t k_tiles = (plan.K + kTile - 1) / kTile, v_tiles = (plan.V + kTile - 1) / kTile;
  const std::int64_t parts = (plan.K * plan.V + kMergeElements - 1) / kMergeElements;
  Launch("leaf totals", LeafTotals<T>, items, kChunk, 0, stream, problem, buffers);
  Launch("node totals", NodeTotals<T>, (items + 3) / 4, kThreads, 0, stream, problem, buffers);
  Launch("leaf states", LeafStates<Math>, items * k_tiles * v_tiles, kThreads,
         sizeof(LeafMemory<T>), stream, problem, buffers);
  for (int bit = 0; bit < plan.merge_levels(); ++bit) {
    const std::int64_t merges = NumMerges(plan.total_chunks, static_cast<int>(plan.N), bit);
    Launch("merge states", MergeStates<T>, merges * problem.heads * parts, kThreads, 0, stream,
           problem, buffers, bit);
  }
}

template void ComputeScalarStates<FmaMath<float>>(const Problem&, const Plan&,
                                                  const ScalarStates<float>&, cudaStream_t);
template void ComputeScalarStates<FmaMath<double>>(const Problem&, const Plan&,
                                                   const ScalarStates<double>&, cudaStream_t);
template void ComputeScalarStates<TensorMath>(const Problem&, const Plan&,
                                              const ScalarStates<float>&, cudaStream_t);

}  // namespace fenwick::cuda::general
