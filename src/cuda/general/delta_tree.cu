// Gated delta rule: nodes of the tree over chunks, and the queries as each node is read with
// (delta.cuh has the equations).
#include "cuda/general/delta.cuh"
#include "cuda/launch.h"

namespace fenwick::cuda::general {
namespace {

// One level of the tree; block = (merge, head, 64 rows of K, 64 columns of K, then of V).
template <typename Math>
__global__ void __launch_bounds__(kThreads)
    MergeNodes(const __grid_constant__ Problem problem,
               const __grid_constant__ DeltaStates<typename Math::Scalar> buffers, int bit) {
  using T = typename Math::Scalar;
  auto& tiles = SharedAs<TileMemory<T>>();
  FlatIndex index{blockIdx.x};
  const int k_tiles = (problem.K + kTile - 1) / kTile, v_tiles = (problem.V + kTile - 1) / kTile;
  const int column_tile = index.Take(k_tiles + v_tiles);
  const int k0 = index.Take(k_tiles) * kTile;
  const int head = index.Take(problem.heads);
  const MergeAt merge(problem.geometry, bit, index.rest);
  if (!merge.needed()) return;
  const Span& span = merge.span;
  const std::int64_t left_end = merge.end - (std::int64_t{1} << bit);
  const T* right = buffers.phi.Find(problem, span, head, bit, merge.end);
  const MatrixSource<T> phi{right, problem.K, problem.K, k0};
  typename Math::Tile tile;
  if (column_tile < k_tiles) {
    const int column0 = column_tile * kTile;
    if (left_end > span.first_chunk()) {
      const MatrixSource<T> left{buffers.phi.Find(problem, span, head, bit, left_end), problem.K,
                                 problem.K, 0, column0};
      Clear(tile);
      Product<Math>(tile, tiles, problem.K, Left(phi), Right(left));
    } else {
      LoadTile<Math>(tile, right, k0, problem.K, column0, problem.K);
    }
    StoreTile<Math>(tile, buffers.phi.Find(problem, span, head, bit + 1, merge.end), k0, problem.K,
                    column0, problem.K);
    return;
  }
  const NodeAt node(problem, span, head, bit, left_end);
  if (!node.exists()) return;
  const int v0 = (column_tile - k_tiles) * kTile;
  T* state =
      buffers.states + NodeAt(problem, span, head, bit, merge.end).item * problem.state_size();
  const MatrixSource<T> left{FindState(problem, node, static_cast<const T*>(buffers.states)),
                             problem.K, problem.V, 0, v0};
  LoadTile<Math>(tile, state, k0, problem.K, v0, problem.V);
  Product<Math>(tile, tiles, problem.K, Left(phi), Right(left));
  StoreTile<Math>(tile, state, k0, problem.K, v0, problem.V);
}

// Q^ behind the node of 2^bit chunks; block = (chunk, head, 64 columns of K).
template <typename Math>
__global__ void __launch_bounds__(kThreads)
    ChainQueries(const __grid_constant__ Problem problem,
                 const __grid_constant__ DeltaStates<typename Math::Scalar> buffers, int bit) {
  using T = typename Math::Scalar;
  auto& tiles = SharedAs<TileMemory<T>>();
  FlatIndex index{blockIdx.x};
  const int k0 = index.Take((problem.K + kTile - 1) / kTile) * kTile;
  const int head = index.Take(problem.heads);
  const ChunkAt chunk(problem.geometry, index.rest);
  if (chunk.first_query() >= chunk.rows()) return;
  const int order = ReadOrder(chunk.span, chunk.absolute(), bit);
  const std::int64_t end = chunk.absolute() >> bit << bit;
  if (order < 0 || (end & (end - 1)) == 0) return;  // no older node reads on
  const std::int64_t item = ItemOf(problem, index.rest, head);
  const MatrixSource<T> query{buffers.Query(problem, item, order), kChunk, problem.K};
  const MatrixSource<T> phi{buffers.phi.Find(problem, chunk.span, head, bit, end), problem.K,
                            problem.K, 0, k0};
  typename Math::Tile tile;
  Clear(tile);
  Product<Math>(tile, tiles, problem.K, Left(query), Right(phi));
  StoreTile<Math>(tile, buffers.Query(problem, item, order + 1), 0, kChunk, k0, problem.K);
}

// Z behind the node of 2^bit chunks; block = (sequence, head, 64 rows, 64 columns of K).
template <typename Math>
__global__ void __launch_bounds__(kThreads)
    ChainFinal(const __grid_constant__ Problem problem,
               const __grid_constant__ DeltaStates<typename Math::Scalar> buffers,
               const __grid_constant__ FinalChain<typename Math::Scalar> final_chain, int bit) {
  using T = typename Math::Scalar;
  auto& tiles = SharedAs<TileMemory<T>>();
  FlatIndex index{blockIdx.x};
  const int k_tiles = (problem.K + kTile - 1) / kTile;
  const int column0 = index.Take(k_tiles) * kTile;
  const int k0 = index.Take(k_tiles) * kTile;
  const int head = index.Take(problem.heads);
  const Span span = problem.geometry.SpanOf(static_cast<int>(index.rest));
  const std::int64_t chunk = FinalChunk(span);
  const int order = ReadOrder(span, chunk, bit);
  if (order < 0) return;
  const T* transition = buffers.phi.Find(problem, span, head, bit, chunk >> bit << bit);
  typename Math::Tile tile;
  if (order == 0) {
    LoadTile<Math>(tile, transition, k0, problem.K, column0, problem.K);
  } else {
    const MatrixSource<T> z{final_chain.Find(problem, span, head, order), problem.K, problem.K, k0};
    const MatrixSource<T> phi{transition, problem.K, problem.K, 0, column0};
    Clear(tile);
    Product<Math>(tile, tiles, problem.K, Left(z), Right(phi));
  }
  StoreTile<Math>(tile, final_chain.Find(problem, span, head, order + 1), k0, problem.K, column0,
                  problem.K);
}

}  // namespace

template <typename Math>
void ComputeFinalChain(const Problem& problem, const Plan& plan,
                       const DeltaStates<typename Math::Scalar>& buffers,
                       const FinalChain<typename Math::Scalar>& final_chain, cudaStream_t stream) {
  using T = typename Math::Scalar;
  const std::int64_t blocks = plan.N * problem.heads * Tiles(plan.K) * Tiles(plan.K);
  for (int bit = 0; bit < plan.node_bits; ++bit) {
    Launch("chain final", ChainFinal<Math>, blocks, kThreads, sizeof(TileMemory<T>), stream,
           problem, buffers, final_chain, bit);
  }
}

template <typename Math>
void ComputeDeltaTree(const Problem& problem, const Plan& plan,
                      const DeltaStates<typename Math::Scalar>& buffers, cudaStream_t stream) {
  using T = typename Math::Scalar;
  const int N = static_cast<int>(plan.N);
  const std::int64_t items = plan.total_chunks * problem.heads;
  const std::int64_t k_tiles = Tiles(plan.K);
  for (int bit = 0; bit < plan.merge_levels(); ++bit) {
    Launch(
        "merge nodes", MergeNodes<Math>,
        NumMerges(plan.total_chunks, N, bit) * problem.heads * k_tiles * (k_tiles + Tiles(plan.V)),
        kThreads, sizeof(TileMemory<T>), stream, problem, buffers, bit);
  }
  for (int bit = 0; bit < plan.node_bits; ++bit) {
    Launch("chain queries", ChainQueries<Math>, items * k_tiles, kThreads, sizeof(TileMemory<T>),
           stream, problem, buffers, bit);
  }
}

#define FENWICK_INSTANTIATE(Math)                                                       \
  template void ComputeDeltaTree<Math>(const Problem&, const Plan&,                     \
                                       const DeltaStates<Math::Scalar>&, cudaStream_t); \
  template void ComputeFinalChain<Math>(const Problem&, const Plan&,                    \
                                        const DeltaStates<Math::Scalar>&,               \
                                        const FinalChain<Math::Scalar>&, cudaStream_t);
FENWICK_INSTANTIATE(FmaMath<float>)
FENWICK_INSTANTIATE(FmaMath<double>)
FENWICK_INSTANTIATE(TensorMath)
#undef FENWICK_INSTANTIATE

}  // namespace fenwick::cuda::general
