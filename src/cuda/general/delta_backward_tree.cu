// Gated delta rule, backward: reads and merges (delta_backward.cuh has the equations).
#include "cuda/general/delta_backward.cuh"
#include "cuda/launch.h"

namespace fenwick::cuda::general {
namespace {

template <typename T>
struct ReadMemory {
  TileMemory<T> tiles;
  T row_scale[kChunk];
};

template <typename T>
__device__ void LoadLevelScale(const Problem& problem, const ChunkAt& chunk, int h, int bit,
                               T* scale) {
  if (threadIdx.x >= kChunk) return;
  scale[threadIdx.x] = LoadToken<T>(problem.level_scales, chunk.span,
                                    chunk.first_row() + threadIdx.x, h, NodeLevel(problem, bit));
}

// Number of transitions between absolute chunk `chunk` and its node of 2^bit chunks.
__device__ int OrderOf(const Problem& problem, const Span& span, std::int64_t chunk, int head,
                       int bit) {
  int found = 0;
  ForEachDeltaRead(problem, span, chunk, head, [&](int b, std::int64_t, const NodeAt&, int order) {
    if (b == bit) found = order;
  });
  return found;
}

// dQ^ before the node of 2^bit chunks; block = (chunk, head, 64 columns of K). Nodes of the initial
// state share one order: their sum is formed in place.
template <typename Math>
__global__ void __launch_bounds__(kThreads)
    QueryGradients(const __grid_constant__ Problem problem,
                   const __grid_constant__ DeltaStates<typename Math::Scalar> states,
                   const __grid_constant__ DeltaGradients<typename Math::Scalar> gradients,
                   const __grid_constant__ TokenRows d_o, int bit) {
  using T = typename Math::Scalar;
  auto& shared = SharedAs<ReadMemory<T>>();
  FlatIndex index{blockIdx.x};
  const int k0 = index.Take((problem.K + kTile - 1) / kTile) * kTile;
  const int head = index.Take(problem.heads);
  const ChunkAt chunk(problem.geometry, index.rest);
  if (chunk.first_query() >= chunk.rows() || (chunk.absolute() >> bit) % 2 == 0) return;
  const Span& span = chunk.span;
  const std::int64_t end = chunk.absolute() >> bit << bit;
  const NodeAt node(problem, span, head, bit, end);
  const int h = problem.Head(head), order = __popcll(chunk.absolute() & ((1ll << bit) - 1));
  const bool of_call = end > span.first_chunk();
  const std::int64_t item = ItemOf(problem, index.rest, head);
  const bool older = (end & (end - 1)) != 0;
  // All initial nodes have the order of the first of them.
  const int place = of_call ? order : OrderOfInitial(span, chunk.absolute());

  typename Math::Tile tile;
  Clear(tile);
  if (of_call && older) {
    const MatrixSource<T> behind{gradients.Query(problem, item, order + 1), kChunk, problem.K};
    const MatrixSource<T> phi{states.phi.Find(problem, span, head, bit, end), problem.K, problem.K,
                              k0};
    Product<Math>(tile, shared.tiles, problem.K, Left(behind), RightT(phi));
  } else if (!of_call && older) {
    LoadTile<Math>(tile, gradients.Query(problem, item, place), 0, kChunk, k0, problem.K);
  }
  if (node.exists()) {
    LoadLevelScale(problem, chunk, h, bit, shared.row_scale);
    const TokenSource<T> d_output{&d_o, &span, chunk.first_row(), h, 0, shared.row_scale};
    const MatrixSource<T> state{FindState(problem, node, static_cast<const T*>(states.states)),
                                problem.K, problem.V, k0};
    Product<Math>(tile, shared.tiles, problem.V, Left(d_output), RightT(state));
  }
  StoreTile<Math>(tile, gradients.Query(problem, item, place), 0, kChunk, k0, problem.K);
}

// Sums over the readers of the nodes of 2^bit chunks, or over one run of them: dS (columns of V)
// and dPhi (columns of K); block = (run, head, 64 rows of K, 64 columns of V, then of K).
template <typename Math>
__global__ void __launch_bounds__(kThreads)
    ReaderSums(const __grid_constant__ Problem problem,
               const __grid_constant__ DeltaStates<typename Math::Scalar> states,
               const __grid_constant__ DeltaGradients<typename Math::Scalar> gradients,
               const __grid_constant__ TokenRows d_o, int bit) {
  using T = typename Math::Scalar;
  auto& shared = SharedAs<ReadMemory<T>>();
  FlatIndex index{blockIdx.x};
  const int k_tiles = (problem.K + kTile - 1) / kTile, v_tiles = (problem.V + kTile - 1) / kTile;
  const int column_tile = index.Take(v_tiles + k_tiles);
  const int k0 = index.Take(k_tiles) * kTile;
  const int head = index.Take(problem.heads);
  const int shift = bit < kDeltaRunShift ? bit : kDeltaRunShift;
  const RunAt run(problem.geometry, shift, index.rest);
  const Span& span = run.span;
  if ((run.begin >> bit) % 2 == 0) return;
  const std::int64_t end = run.begin >> bit << bit, first_chunk = span.first_chunk();
  const std::int64_t run_end = run.begin + (std::int64_t{1} << shift) - 1;
  const std::int64_t first = run.begin > first_chunk ? run.begin : first_chunk;
  const std::int64_t last = run_end < span.last_chunk() ? run_end : span.last_chunk();
  const NodeAt node(problem, span, head, bit, end);
  const bool of_state = column_tile < v_tiles, older = (end & (end - 1)) != 0;
  if (first > last || !node.exists()) return;
  if (!of_state && (node.item < 0 || !older)) return;  // no transition, or nothing read behind it

  const int h = problem.Head(head);
  const int column0 = (of_state ? column_tile : column_tile - v_tiles) * kTile;
  typename Math::Tile sum;
  Clear(sum);
  for (std::int64_t c = first; c <= last; ++c) {
    const std::int64_t id = span.chunk_begin + c - first_chunk;
    const ChunkAt chunk(problem.geometry, id);
    if (chunk.first_query() >= chunk.rows()) continue;
    const int order = OrderOf(problem, span, c, head, bit);
    const std::int64_t item = ItemOf(problem, id, head);
    const MatrixSource<T> query{states.Query(problem, item, order), kChunk, problem.K, 0, k0};
    if (of_state) {
      LoadLevelScale(problem, chunk, h, bit, shared.row_scale);
      const TokenSource<T> d_output{&d_o, &span, chunk.first_row(), h, column0, shared.row_scale};
      Product<Math>(sum, shared.tiles, kChunk, LeftT(query), Right(d_output));
    } else {
      const MatrixSource<T> behind{gradients.Query(problem, item, order + 1), kChunk, problem.K, 0,
                                   column0};
      Product<Math>(sum, shared.tiles, kChunk, LeftT(query), Right(behind));
    }
  }
  if (bit > kDeltaRunShift) {
    const int columns = problem.V + problem.K, shift_columns = of_state ? 0 : problem.V;
    T* part = gradients.partial + ItemOf(problem, index.rest, head) * problem.K * columns;
    ForEachInside<Math>(sum, k0, problem.K, column0, of_state ? problem.V : problem.K,
                        [&](int i, int j, T value) {
                          part[static_cast<std::int64_t>(i) * columns + shift_columns + j] = value;
                        });
  } else if (of_state) {
    T* to = gradients.State(problem, node);
    if (to != nullptr) StoreTile<Math>(sum, to, k0, problem.K, column0, problem.V);
  } else {
    StoreTile<Math>(sum, gradients.phi.Find(problem, span, head, bit, end), k0, problem.K, column0,
                    problem.K);
  }
}

// The same sums from their parts; block = (node of 2^bit chunks, head).
template <typename T>
__global__ void __launch_bounds__(kThreads)
    SumParts(const __grid_constant__ Problem problem,
             const __grid_constant__ DeltaGradients<T> gradients, int bit) {
  FlatIndex index{blockIdx.x};
  const int head = index.Take(problem.heads);
  const RunAt readers(problem.geometry, bit, index.rest);
  const Span& span = readers.span;
  const std::int64_t end = readers.begin, first_chunk = span.first_chunk();
  if ((end >> bit) % 2 == 0) return;
  const NodeAt node(problem, span, head, bit, end);
  const std::int64_t readers_end = end + (std::int64_t{1} << bit) - 1;
  const std::int64_t first = end > first_chunk ? end : first_chunk;
  const std::int64_t last = readers_end < span.last_chunk() ? readers_end : span.last_chunk();
  if (first > last || !node.exists()) return;
  const std::int64_t parts_begin = (span.chunk_begin >> kDeltaRunShift) +
                                   2 * static_cast<std::int64_t>(span.sequence) -
                                   (first_chunk >> kDeltaRunShift);
  const int columns = problem.V + problem.K;
  const std::int64_t size = static_cast<std::int64_t>(problem.K) * columns;
  T* to_state = gradients.State(problem, node);
  T* to_phi = node.item >= 0 && (end & (end - 1)) != 0
                  ? gradients.phi.Find(problem, span, head, bit, end)
                  : nullptr;
  for (std::int64_t i = threadIdx.x; i < size; i += kThreads) {
    const std::int64_t row = i / columns;
    const int column = static_cast<int>(i % columns);
    T* to = column < problem.V ? to_state : to_phi;
    if (to == nullptr) continue;
    T sum = 0;
    for (std::int64_t part = first >> kDeltaRunShift; part <= last >> kDeltaRunShift; ++part) {
      sum += gradients.partial[ItemOf(problem, parts_begin + part, head) * size + i];
    }
    to[column < problem.V ? row * problem.V + column : row * problem.K + column - problem.V] = sum;
  }
}

// The final state as a reader of the node of 2^bit chunks: dS, dPhi += and dZ; block = (sequence,
// head, 64 rows of K, 64 columns of V, then of K for dPhi, then of K for dZ).
template <typename Math>
__global__ void __launch_bounds__(kThreads)
    FinalReader(const __grid_constant__ Problem problem,
                const __grid_constant__ DeltaStates<typename Math::Scalar> states,
                const __grid_constant__ FinalChain<typename Math::Scalar> final_chain,
                const __grid_constant__ DeltaGradients<typename Math::Scalar> gradients,
                const typename Math::Scalar* d_nodes, int slots, int bit) {
  using T = typename Math::Scalar;
  auto& tiles = SharedAs<TileMemory<T>>();
  FlatIndex index{blockIdx.x};
  const int k_tiles = (problem.K + kTile - 1) / kTile, v_tiles = (problem.V + kTile - 1) / kTile;
  const int column_tile = index.Take(v_tiles + 2 * k_tiles);
  const int k0 = index.Take(k_tiles) * kTile;
  const int head = index.Take(problem.heads);
  const Span span = problem.geometry.SpanOf(static_cast<int>(index.rest));
  const std::int64_t chunk = FinalChunk(span);
  const int slot = bit < problem.top_slot ? bit : problem.top_slot;
  if ((chunk >> bit) % 2 == 0 || slot >= slots) return;
  const std::int64_t end = chunk >> bit << bit;
  const NodeAt node(problem, span, head, bit, end);
  const bool of_call = end > span.first_chunk(), older = (end & (end - 1)) != 0;
  const int order = of_call ? __popcll(chunk & ((1ll << bit) - 1)) : OrderOfInitial(span, chunk);
  const T* d_node = d_nodes + ((index.rest * problem.H + problem.Head(head)) * slots + slot) *
                                  problem.state_size();
  typename Math::Tile tile;
  if (column_tile < v_tiles) {  // dS += Z^T dnode
    T* to = node.exists() ? gradients.State(problem, node) : nullptr;
    if (to == nullptr) return;
    const int v0 = column_tile * kTile;
    LoadTile<Math>(tile, to, k0, problem.K, v0, problem.V);
    if (order == 0) {
      ForEachInside<Math>(tile, k0, problem.K, v0, problem.V, [&](int i, int j, T& value) {
        value += d_node[static_cast<std::int64_t>(i) * problem.V + j];
      });
    } else {
      const MatrixSource<T> z{final_chain.Find(problem, span, head, order), problem.K, problem.K, 0,
                              k0};
      const MatrixSource<T> d{d_node, problem.K, problem.V, 0, v0};
      Product<Math>(tile, tiles, problem.K, LeftT(z), Right(d));
    }
    StoreTile<Math>(tile, to, k0, problem.K, v0, problem.V);
  } else if (column_tile < v_tiles + k_tiles) {  // dPhi += Z^T dZ behind
    if (!of_call || !older) return;
    const int column0 = (column_tile - v_tiles) * kTile;
    T* to = gradients.phi.Find(problem, span, head, bit, end);
    const T* behind = gradients.FinalQuery(problem, span, head, order + 1);
    LoadTile<Math>(tile, to, k0, problem.K, column0, problem.K);
    if (order == 0) {
      ForEachInside<Math>(tile, k0, problem.K, column0, problem.K, [&](int i, int j, T& value) {
        value += behind[static_cast<std::int64_t>(i) * problem.K + j];
      });
    } else {
      const MatrixSource<T> z{final_chain.Find(problem, span, head, order), problem.K, problem.K, 0,
                              k0};
      const MatrixSource<T> d{behind, problem.K, problem.K, 0, column0};
      Product<Math>(tile, tiles, problem.K, LeftT(z), Right(d));
    }
    StoreTile<Math>(tile, to, k0, problem.K, column0, problem.K);
  } else {  // dZ = dnode S^T + dZ behind Phi^T
    const int column0 = (column_tile - v_tiles - k_tiles) * kTile;
    Clear(tile);
    if (of_call && older) {
      const MatrixSource<T> behind{gradients.FinalQuery(problem, span, head, order + 1), problem.K,
                                   problem.K, k0};
      const MatrixSource<T> phi{states.phi.Find(problem, span, head, bit, end), problem.K,
                                problem.K, column0};
      Product<Math>(tile, tiles, problem.K, Left(behind), RightT(phi));
    } else if (!of_call && older) {
      LoadTile<Math>(tile, gradients.FinalQuery(problem, span, head, order), k0, problem.K, column0,
                     problem.K);
    }
    if (node.exists()) {
      const MatrixSource<T> d{d_node, problem.K, problem.V, k0};
      const MatrixSource<T> s{FindState(problem, node, static_cast<const T*>(states.states)),
                              problem.K, problem.V, column0};
      Product<Math>(tile, tiles, problem.V, Left(d), RightT(s));
    }
    StoreTile<Math>(tile, gradients.FinalQuery(problem, span, head, order), k0, problem.K, column0,
                    problem.K);
  }
}

// One level down the tree; block = (merge, head, 64 rows of K, 64 columns of V for dS_l, then of K
// for dPhi_r, then of K for dPhi_l).
template <typename Math>
__global__ void __launch_bounds__(kThreads)
    SplitGradients(const __grid_constant__ Problem problem,
                   const __grid_constant__ DeltaStates<typename Math::Scalar> states,
                   const __grid_constant__ DeltaGradients<typename Math::Scalar> gradients,
                   int bit) {
  using T = typename Math::Scalar;
  auto& tiles = SharedAs<TileMemory<T>>();
  FlatIndex index{blockIdx.x};
  const int k_tiles = (problem.K + kTile - 1) / kTile, v_tiles = (problem.V + kTile - 1) / kTile;
  const int column_tile = index.Take(v_tiles + 2 * k_tiles);
  const int k0 = index.Take(k_tiles) * kTile;
  const int head = index.Take(problem.heads);
  const MergeAt merge(problem.geometry, bit, index.rest);
  if (!merge.needed()) return;
  const Span& span = merge.span;
  const std::int64_t end = merge.end, left_end = end - (std::int64_t{1} << bit);
  const NodeAt left(problem, span, head, bit, left_end);
  const bool left_moves = left_end > span.first_chunk();
  const T* phi_right = states.phi.Find(problem, span, head, bit, end);
  const T* d_parent_phi = gradients.phi.Find(problem, span, head, bit + 1, end);
  const T* d_parent =
      gradients.grads + NodeAt(problem, span, head, bit, end).item * problem.state_size();
  const MatrixSource<T> right_columns{phi_right, problem.K, problem.K, 0, k0};
  typename Math::Tile tile;
  if (column_tile < v_tiles) {
    T* to = left.exists() ? gradients.State(problem, left) : nullptr;
    if (to == nullptr) return;
    const int v0 = column_tile * kTile;
    LoadTile<Math>(tile, to, k0, problem.K, v0, problem.V);
    const MatrixSource<T> d{d_parent, problem.K, problem.V, 0, v0};
    Product<Math>(tile, tiles, problem.K, LeftT(right_columns), Right(d));
    StoreTile<Math>(tile, to, k0, problem.K, v0, problem.V);
  } else if (column_tile < v_tiles + k_tiles) {
    const int column0 = (column_tile - v_tiles) * kTile;
    if (left_moves) {
      Clear(tile);
      const MatrixSource<T> d{d_parent_phi, problem.K, problem.K, k0};
      const MatrixSource<T> phi_left{states.phi.Find(problem, span, head, bit, left_end), problem.K,
                                     problem.K, column0};
      Product<Math>(tile, tiles, problem.K, Left(d), RightT(phi_left));
    } else {
      LoadTile<Math>(tile, d_parent_phi, k0, problem.K, column0, problem.K);
    }
    if (left.exists()) {
      const MatrixSource<T> d{d_parent, problem.K, problem.V, k0};
      const MatrixSource<T> s{FindState(problem, left, static_cast<const T*>(states.states)),
                              problem.K, problem.V, column0};
      Product<Math>(tile, tiles, problem.V, Left(d), RightT(s));
    }
    StoreTile<Math>(tile, gradients.phi.Find(problem, span, head, bit, end), k0, problem.K, column0,
                    problem.K);
  } else {
    if (!left_moves) return;
    const int column0 = (column_tile - v_tiles - k_tiles) * kTile;
    T* to = gradients.phi.Find(problem, span, head, bit, left_end);
    LoadTile<Math>(tile, to, k0, problem.K, column0, problem.K);
    const MatrixSource<T> d{d_parent_phi, problem.K, problem.K, 0, column0};
    Product<Math>(tile, tiles, problem.K, LeftT(right_columns), Right(d));
    StoreTile<Math>(tile, to, k0, problem.K, column0, problem.K);
  }
}

}  // namespace

template <typename Math>
void ComputeDeltaTreeGradients(const Problem& problem, const Plan& plan,
                               const DeltaStates<typename Math::Scalar>& states,
                               const FinalChain<typename Math::Scalar>& final_chain,
                               const DeltaGradients<typename Math::Scalar>& gradients,
                               const TokenRows& d_o, const TensorView& d_final_nodes,
                               cudaStream_t stream) {
  using T = typename Math::Scalar;
  const int N = static_cast<int>(plan.N);
  const std::int64_t items = plan.total_chunks * problem.heads;
  const std::int64_t k_tiles = Tiles(plan.K), v_tiles = Tiles(plan.V);
  ZeroAsync(gradients.grads, items * plan.K * plan.V * sizeof(T), stream);
  ZeroAsync(gradients.query, items * 2 * kChunk * plan.K * sizeof(T), stream);
  ZeroAsync(gradients.phi.data, PyramidNodes(plan) * problem.heads * plan.K * plan.K * sizeof(T),
            stream);
  for (int bit = plan.node_bits - 1; bit >= 0; --bit) {
    const int shift = bit < kDeltaRunShift ? bit : kDeltaRunShift;
    Launch("reader sums", ReaderSums<Math>,
           NumRuns(plan.total_chunks, N, shift) * problem.heads * k_tiles * (k_tiles + v_tiles),
           kThreads, sizeof(ReadMemory<T>), stream, problem, states, gradients, d_o, bit);
    if (bit > kDeltaRunShift) {
      Launch("sum parts", SumParts<T>, NumRuns(plan.total_chunks, N, bit) * problem.heads, kThreads,
             0, stream, problem, gradients, bit);
    }
    Launch("query gradients", QueryGradients<Math>, items * k_tiles, kThreads,
           sizeof(ReadMemory<T>), stream, problem, states, gradients, d_o, bit);
  }
  if (gradients.final_query != nullptr) {
    for (int bit = plan.node_bits - 1; bit >= 0; --bit) {
      Launch("final reader", FinalReader<Math>,
             plan.N * problem.heads * k_tiles * (2 * k_tiles + v_tiles), kThreads,
             sizeof(TileMemory<T>), stream, problem, states, final_chain, gradients,
             static_cast<const T*>(d_final_nodes.data), static_cast<int>(d_final_nodes.size(2)),
             bit);
    }
  }
  for (int bit = plan.merge_levels() - 1; bit >= 0; --bit) {
    Launch("split gradients", SplitGradients<Math>,
           NumMerges(plan.total_chunks, N, bit) * problem.heads * k_tiles * (2 * k_tiles + v_tiles),
           kThreads, sizeof(TileMemory<T>), stream, problem, states, gradients, bit);
  }
}

#define FENWICK_INSTANTIATE(Math)                                                             \
  template void ComputeDeltaTreeGradients<Math>(                                              \
      const Problem&, const Plan&, const DeltaStates<Math::Scalar>&,                          \
      const FinalChain<Math::Scalar>&, const DeltaGradients<Math::Scalar>&, const TokenRows&, \
      const TensorView&, cudaStream_t);
FENWICK_INSTANTIATE(FmaMath<float>)
FENWICK_INSTANTIATE(FmaMath<double>)
FENWICK_INSTANTIATE(TensorMath)
#undef FENWICK_INSTANTIATE

}  // namespace fenwick::cuda::general
