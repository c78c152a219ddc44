// Gated delta rule: the matrices of each chunk (delta.cuh has the equations).
#include "cuda/general/delta.cuh"
#include "cuda/launch.h"

namespace fenwick::cuda::general {
namespace {

template <typename T>
struct SolveMemory {
  union {
    TileMemory<T> tiles;
    TileMatrix<T> inverse;  // while no product runs
  };
  TileMatrix<T> lower;  // N, then Tb
  RowFactors<T> rows;
};

// inverse, inverse_beta, scores, mix; block = (chunk, head).
template <typename Math>
__global__ void __launch_bounds__(kThreads)
    SolveChunks(const __grid_constant__ Problem problem,
                const __grid_constant__ DeltaStates<typename Math::Scalar> buffers) {
  using T = typename Math::Scalar;
  auto& shared = SharedAs<SolveMemory<T>>();
  FlatIndex index{blockIdx.x};
  const int head = index.Take(problem.heads);
  const ChunkAt chunk(problem.geometry, index.rest);
  if (!chunk.exists()) return;
  const std::int64_t matrix = ItemOf(problem, index.rest, head) * kChunk * kChunk;
  const T scale = static_cast<T>(problem.scale);
  shared.rows.Load(problem, chunk, problem.Head(head));
  const double* sums = shared.rows.sums;

  const TokenSource<T> q{&problem.q, &chunk.span, chunk.first_row(), problem.Group(head)};
  const TokenSource<T> k{&problem.k, &chunk.span, chunk.first_row(), problem.Group(head)};
  typename Math::Tile tile;
  Clear(tile);
  Product<Math>(tile, shared.tiles, problem.K, Left(k), RightT(k));
  ForEach<Math>(tile, [&](int t, int s, T dot) {
    shared.lower(t, s) = s < t ? dot * shared.rows.beta[t] * Decay<T>(sums, t, s) : T(0);
  });
  __syncthreads();
  // Column j of (I + N)^-1 by forward substitution, one thread a column: no barriers inside.
  if (threadIdx.x < kChunk) {
    const int j = threadIdx.x;
    for (int t = 0; t < kChunk; ++t) {
      T sum = t == j ? T(1) : T(0);
      for (int s = j; s < t; ++s) sum -= shared.lower(t, s) * shared.inverse(s, j);
      shared.inverse(t, j) = sum;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kChunk * kChunk; i += kThreads) {
    const int t = i / kChunk, s = i % kChunk;
    const T value = shared.inverse(t, s), with_beta = value * shared.rows.beta[s];
    shared.lower(t, s) = with_beta;
    buffers.inverse[matrix + i] = value;
    buffers.inverse_beta[matrix + i] = with_beta;
  }
  Clear(tile);
  Product<Math>(tile, shared.tiles, problem.K, Left(q), RightT(k));
  ForEach<Math>(tile, [&](int t, int s, T dot) {
    buffers.scores[matrix + t * kChunk + s] = s <= t ? dot * scale * Decay<T>(sums, t, s) : T(0);
  });
  Clear(tile);
  const MatrixSource<T> scores{buffers.scores + matrix, kChunk, kChunk};
  Product<Math>(tile, shared.tiles, kChunk, Left(scores), Right(SharedSource<T>{&shared.lower}));
  StoreTile<Math>(tile, buffers.mix + matrix, 0, kChunk, 0, kChunk);
}

template <typename T>
struct RowsMemory {
  TileMemory<T> tiles;
  RowFactors<T> rows;
};

// w and u; block = (chunk, head, 64 columns of K, then of V).
template <typename Math>
__global__ void __launch_bounds__(kThreads)
    ApplyInverse(const __grid_constant__ Problem problem,
                 const __grid_constant__ DeltaStates<typename Math::Scalar> buffers) {
  using T = typename Math::Scalar;
  auto& shared = SharedAs<RowsMemory<T>>();
  FlatIndex index{blockIdx.x};
  const int k_tiles = (problem.K + kTile - 1) / kTile, v_tiles = (problem.V + kTile - 1) / kTile;
  const int column_tile = index.Take(k_tiles + v_tiles);
  const int head = index.Take(problem.heads);
  const ChunkAt chunk(problem.geometry, index.rest);
  if (!chunk.exists()) return;
  const std::int64_t item = ItemOf(problem, index.rest, head);
  shared.rows.Load(problem, chunk, problem.Head(head));
  const MatrixSource<T> inverse{buffers.inverse_beta + item * kChunk * kChunk, kChunk, kChunk};
  typename Math::Tile tile;
  Clear(tile);
  if (column_tile < k_tiles) {
    const int k0 = column_tile * kTile;
    const TokenSource<T> k{&problem.k,          &chunk.span, chunk.first_row(),
                           problem.Group(head), k0,          shared.rows.from_start};
    Product<Math>(tile, shared.tiles, kChunk, Left(inverse), Right(k));
    StoreTile<Math>(tile, buffers.w + item * kChunk * problem.K, 0, kChunk, k0, problem.K);
  } else {
    const int v0 = (column_tile - k_tiles) * kTile;
    const TokenSource<T> v{&problem.v, &chunk.span, chunk.first_row(), problem.Head(head), v0};
    Product<Math>(tile, shared.tiles, kChunk, Left(inverse), Right(v));
    StoreTile<Math>(tile, buffers.u + item * kChunk * problem.V, 0, kChunk, v0, problem.V);
  }
}

// q_tilde; block = (chunk, head, 64 columns of K).
template <typename Math>
__global__ void __launch_bounds__(kThreads)
    CorrectQueries(const __grid_constant__ Problem problem,
                   const __grid_constant__ DeltaStates<typename Math::Scalar> buffers) {
  using T = typename Math::Scalar;
  auto& shared = SharedAs<RowsMemory<T>>();
  FlatIndex index{blockIdx.x};
  const int k0 = index.Take((problem.K + kTile - 1) / kTile) * kTile;
  const int head = index.Take(problem.heads);
  const ChunkAt chunk(problem.geometry, index.rest);
  if (!chunk.exists()) return;
  const std::int64_t item = ItemOf(problem, index.rest, head);
  shared.rows.Load(problem, chunk, problem.Head(head));
  const MatrixSource<T> scores{buffers.scores + item * kChunk * kChunk, kChunk, kChunk};
  const MatrixSource<T> w{buffers.w + item * kChunk * problem.K, kChunk, problem.K, 0, k0};
  typename Math::Tile tile;
  Clear(tile);
  Product<Math>(tile, shared.tiles, kChunk, Left(scores), Right(w));
  const TokenSource<T> q{&problem.q, &chunk.span, chunk.first_row(), problem.Group(head), k0};
  ForEachEntry<Math>(q, [&](int i, T x) {
    const T factor = static_cast<T>(problem.scale) * shared.rows.from_start[Math::Row(i)];
    tile.x[i] = factor * x - tile.x[i];
  });
  StoreTile<Math>(tile, buffers.q_tilde + item * kChunk * problem.K, 0, kChunk, k0, problem.K);
}

// M and X; block = (chunk, head, 64 rows, 64 columns of K, then of V).
template <typename Math>
__global__ void __launch_bounds__(kThreads)
    ChunkTransitions(const __grid_constant__ Problem problem,
                     const __grid_constant__ DeltaStates<typename Math::Scalar> buffers) {
  using T = typename Math::Scalar;
  auto& shared = SharedAs<RowsMemory<T>>();
  FlatIndex index{blockIdx.x};
  const int k_tiles = (problem.K + kTile - 1) / kTile, v_tiles = (problem.V + kTile - 1) / kTile;
  const int column_tile = index.Take(k_tiles + v_tiles);
  const int k0 = index.Take(k_tiles) * kTile;
  const int head = index.Take(problem.heads);
  const ChunkAt chunk(problem.geometry, index.rest);
  if (chunk.absolute() >= chunk.span.last_chunk()) return;
  const std::int64_t item = ItemOf(problem, index.rest, head);
  shared.rows.Load(problem, chunk, problem.Head(head));
  const TokenSource<T> k{&problem.k,          &chunk.span, chunk.first_row(),
                         problem.Group(head), k0,          shared.rows.to_end};
  typename Math::Tile tile;
  Clear(tile);
  if (column_tile < k_tiles) {
    const int column0 = column_tile * kTile;
    const MatrixSource<T> w{buffers.w + item * kChunk * problem.K, kChunk, problem.K, 0, column0};
    Product<Math>(tile, shared.tiles, kChunk, LeftT(k), Right(w));
    T* m = buffers.phi.Find(problem, chunk.span, head, 0, chunk.absolute() + 1);
    const T decay = shared.rows.from_start[kChunk - 1];
    ForEachInside<Math>(tile, k0, problem.K, column0, problem.K, [&](int i, int j, T value) {
      m[static_cast<std::int64_t>(i) * problem.K + j] = (i == j ? decay : T(0)) - value;
    });
  } else {
    const int v0 = (column_tile - k_tiles) * kTile;
    const MatrixSource<T> u{buffers.u + item * kChunk * problem.V, kChunk, problem.V, 0, v0};
    Product<Math>(tile, shared.tiles, kChunk, LeftT(k), Right(u));
    StoreTile<Math>(tile, buffers.states + item * problem.state_size(), k0, problem.K, v0,
                    problem.V);
  }
}

}  // namespace

template <typename Math>
void ComputeDeltaChunks(const Problem& problem, const Plan& plan,
                        const DeltaStates<typename Math::Scalar>& buffers, cudaStream_t stream) {
  using T = typename Math::Scalar;
  const std::int64_t items = plan.total_chunks * problem.heads;
  const std::int64_t k_tiles = Tiles(plan.K), columns = k_tiles + Tiles(plan.V);
  Launch("solve chunks", SolveChunks<Math>, items, kThreads, sizeof(SolveMemory<T>), stream,
         problem, buffers);
  Launch("apply inverse", ApplyInverse<Math>, items * columns, kThreads, sizeof(RowsMemory<T>),
         stream, problem, buffers);
  Launch("correct queries", CorrectQueries<Math>, items * k_tiles, kThreads, sizeof(RowsMemory<T>),
         stream, problem, buffers);
  Launch("chunk transitions", ChunkTransitions<Math>, items * k_tiles * columns, kThreads,
         sizeof(RowsMemory<T>), stream, problem, buffers);
}

#define FENWICK_INSTANTIATE(Math)                                     \
  template void ComputeDeltaChunks<Math>(const Problem&, const Plan&, \
                                         const DeltaStates<Math::Scalar>&, cudaStream_t);
FENWICK_INSTANTIATE(FmaMath<float>)
FENWICK_INSTANTIATE(FmaMath<double>)
FENWICK_INSTANTIATE(TensorMath)
#undef FENWICK_INSTANTIATE

}  // namespace fenwick::cuda::general
