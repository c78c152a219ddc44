// Gated delta rule, backward: everything inside the chunks (delta_backward.cuh has the equations).
#include "cuda/general/delta_backward.cuh"
#include "cuda/launch.h"

namespace fenwick::cuda::general {
namespace {

template <typename T>
struct LevelMemory {
  TileMemory<T> tiles;
  TileMatrix<T> pairs;  // [t][s]
  ChunkLevels<T> levels;
  ChunkLevelGradients<T> d_levels;
  T dots[kChunk];
};

// dlevel_scales, and dB; block = (chunk, head).
template <typename Math>
__global__ void __launch_bounds__(kThreads)
    LevelGradients(const __grid_constant__ Problem problem,
                   const __grid_constant__ DeltaStates<typename Math::Scalar> states,
                   const __grid_constant__ DeltaGradients<typename Math::Scalar> gradients,
                   const __grid_constant__ TokenRows d_o, const __grid_constant__ Rows d_levels) {
  using T = typename Math::Scalar;
  auto& shared = SharedAs<LevelMemory<T>>();
  FlatIndex index{blockIdx.x};
  const int head = index.Take(problem.heads), row = threadIdx.x;
  const ChunkAt chunk(problem.geometry, index.rest);
  if (!chunk.exists()) return;
  const Span& span = chunk.span;
  const int h = problem.Head(head);
  const std::int64_t item = ItemOf(problem, index.rest, head);
  T* d_mix = gradients.d_mix + item * kChunk * kChunk;
  shared.d_levels.Clear();
  shared.levels.Load(problem, chunk, h);

  const TokenSource<T> v{&problem.v, &span, chunk.first_row(), h};
  const TokenSource<T> d_output{&d_o, &span, chunk.first_row(), h};
  typename Math::Tile tile;
  Clear(tile);
  Product<Math>(tile, shared.tiles, problem.V, Left(d_output), RightT(v));
  const MatrixSource<T> mix{states.mix + item * kChunk * kChunk, kChunk, kChunk};
  ForEachEntry<Math>(mix, [&](int i, T value) {
    const int t = Math::Row(i), s = Math::Column(i);
    d_mix[t * kChunk + s] = s <= t ? tile.x[i] * shared.levels.At(t, s) : T(0);
    shared.pairs(t, s) = s <= t ? tile.x[i] * value : T(0);
  });
  __syncthreads();
  if (row < kChunk) {
    for (int s = 0; s <= row; ++s) {
      shared.d_levels.x[row][LevelOf(problem, row, s)] += shared.pairs(row, s);
    }
  }
  if (d_levels.data == nullptr || chunk.first_query() >= chunk.rows()) return;

  ForEachDeltaRead(
      problem, span, chunk.absolute(), head,
      [&](int bit, std::int64_t, const NodeAt& node, int order) {
        __syncthreads();
        if (row < kChunk) shared.dots[row] = 0;
        const MatrixSource<T> query{states.Query(problem, item, order), kChunk, problem.K};
        for (int v0 = 0; v0 < problem.V; v0 += kTile) {
          const MatrixSource<T> state{
              FindState(problem, node, static_cast<const T*>(states.states)), problem.K, problem.V,
              0, v0};
          Clear(tile);
          Product<Math>(tile, shared.tiles, problem.K, Left(query), Right(state));
          AddRowDots<Math>(tile, TokenSource<T>{&d_o, &span, chunk.first_row(), h, v0},
                           shared.dots);
        }
        __syncthreads();
        if (row < kChunk) shared.d_levels.x[row][NodeLevel(problem, bit)] += shared.dots[row];
      });
  __syncthreads();
  shared.d_levels.Store(problem, chunk, h, d_levels);
}

template <typename T>
struct RowsMemory {
  TileMemory<T> tiles;
  RowFactors<T> rows;
};

// dw and du; block = (chunk, head, 64 columns of K, then of V).
template <typename Math>
__global__ void __launch_bounds__(kThreads)
    InnerGradients(const __grid_constant__ Problem problem,
                   const __grid_constant__ DeltaStates<typename Math::Scalar> states,
                   const __grid_constant__ DeltaGradients<typename Math::Scalar> gradients) {
  using T = typename Math::Scalar;
  auto& shared = SharedAs<RowsMemory<T>>();
  FlatIndex index{blockIdx.x};
  const int k_tiles = (problem.K + kTile - 1) / kTile, v_tiles = (problem.V + kTile - 1) / kTile;
  const int column_tile = index.Take(k_tiles + v_tiles);
  const int head = index.Take(problem.heads);
  const ChunkAt chunk(problem.geometry, index.rest);
  if (!chunk.exists()) return;
  const std::int64_t item = ItemOf(problem, index.rest, head);
  const bool carries = chunk.absolute() < chunk.span.last_chunk();
  shared.rows.Load(problem, chunk, problem.Head(head));
  const TokenSource<T> k{&problem.k,          &chunk.span, chunk.first_row(),
                         problem.Group(head), 0,           shared.rows.to_end};
  typename Math::Tile tile;
  Clear(tile);
  if (column_tile < k_tiles) {
    const int k0 = column_tile * kTile;
    const MatrixSource<T> scores{states.scores + item * kChunk * kChunk, kChunk, kChunk};
    const MatrixSource<T> d_query{gradients.Query(problem, item, 0), kChunk, problem.K, 0, k0};
    Product<Math>(tile, shared.tiles, kChunk, LeftT(scores), Right(d_query));
    if (carries) {
      const MatrixSource<T> dm{
          gradients.phi.Find(problem, chunk.span, head, 0, chunk.absolute() + 1), problem.K,
          problem.K, 0, k0};
      Product<Math>(tile, shared.tiles, problem.K, Left(k), Right(dm));
    }
    Negate<Math>(tile);
    StoreTile<Math>(tile, gradients.dw + item * kChunk * problem.K, 0, kChunk, k0, problem.K);
  } else {
    const int v0 = (column_tile - k_tiles) * kTile;
    if (carries) {
      const MatrixSource<T> dx{gradients.grads + item * problem.state_size(), problem.K, problem.V,
                               0, v0};
      Product<Math>(tile, shared.tiles, problem.K, Left(k), Right(dx));
    }
    StoreTile<Math>(tile, gradients.du + item * kChunk * problem.V, 0, kChunk, v0, problem.V);
  }
}

template <typename T>
struct PairMemory {
  TileMemory<T> tiles;
  TileMatrix<T> pairs;  // [t][s] flow of each pair
  RowFactors<T> rows;
  T d_beta[kChunk];
};

// From dB, dw, du, dQ~: what dE and dN give to queries and keys (d_mix, d_solve), d_beta, row_flow;
// block = (chunk, head).
template <typename Math>
__global__ void __launch_bounds__(kThreads)
    PairGradients(const __grid_constant__ Problem problem,
                  const __grid_constant__ DeltaStates<typename Math::Scalar> states,
                  const __grid_constant__ DeltaGradients<typename Math::Scalar> gradients) {
  using T = typename Math::Scalar;
  auto& shared = SharedAs<PairMemory<T>>();
  FlatIndex index{blockIdx.x};
  const int head = index.Take(problem.heads), row = threadIdx.x;
  const ChunkAt chunk(problem.geometry, index.rest);
  if (!chunk.exists()) return;
  const std::int64_t item = ItemOf(problem, index.rest, head);
  const int h = problem.Head(head);
  const T scale = static_cast<T>(problem.scale);
  shared.rows.Load(problem, chunk, h);
  const double* sums = shared.rows.sums;
  if (row < kChunk) shared.d_beta[row] = 0;

  const auto square = [&](T* data) { return data + item * kChunk * kChunk; };
  T *d_mix = square(gradients.d_mix), *scratch = square(gradients.d_solve);
  const MatrixSource<T> scores{square(states.scores), kChunk, kChunk};
  const MatrixSource<T> inverse{square(states.inverse), kChunk, kChunk};
  const MatrixSource<T> inverse_beta{square(states.inverse_beta), kChunk, kChunk};
  const MatrixSource<T> d_mix_source{d_mix, kChunk, kChunk},
      scratch_source{scratch, kChunk, kChunk};
  const MatrixSource<T> d_query{gradients.Query(problem, item, 0), kChunk, problem.K};
  const MatrixSource<T> w{states.w + item * kChunk * problem.K, kChunk, problem.K};
  const MatrixSource<T> dw{gradients.dw + item * kChunk * problem.K, kChunk, problem.K};
  const MatrixSource<T> du{gradients.du + item * kChunk * problem.V, kChunk, problem.V};
  const TokenSource<T> k{&problem.k, &chunk.span, chunk.first_row(), problem.Group(head)};
  TokenSource<T> k_from_start = k;
  k_from_start.scale = shared.rows.from_start;
  const TokenSource<T> v{&problem.v, &chunk.span, chunk.first_row(), h};

  // dTb, and its part of d_beta: column sums of Ti dTb.
  typename Math::Tile tile;
  Clear(tile);
  Product<Math>(tile, shared.tiles, kChunk, LeftT(scores), Right(d_mix_source));
  Product<Math>(tile, shared.tiles, problem.K, Left(dw), RightT(k_from_start));
  Product<Math>(tile, shared.tiles, problem.V, Left(du), RightT(v));
  ForEachEntry<Math>(inverse, [&](int i, T entry) {
    const int t = Math::Row(i), s = Math::Column(i);
    const T value = s <= t ? tile.x[i] : T(0);
    scratch[t * kChunk + s] = value;
    shared.pairs(t, s) = value * entry;
  });
  __syncthreads();
  if (row < kChunk) {
    for (int t = row; t < kChunk; ++t) shared.d_beta[row] += shared.pairs(t, row);
  }

  // dE: its pairs' flow, and D dE scale.
  typename Math::Tile d_scores;
  Clear(d_scores);
  Product<Math>(d_scores, shared.tiles, problem.K, Left(d_query), RightT(w));
  Negate<Math>(d_scores);
  Product<Math>(d_scores, shared.tiles, kChunk, Left(d_mix_source), RightT(inverse_beta));
  __syncthreads();
  ForEachEntry<Math>(scores, [&](int i, T entry) {
    const int t = Math::Row(i), s = Math::Column(i);
    const T value = s <= t ? d_scores.x[i] : T(0);
    shared.pairs(t, s) = value * entry;
    d_mix[t * kChunk + s] = s <= t ? value * scale * Decay<T>(sums, t, s) : T(0);
  });

  // dN = -Ti^T dTb Tb^T.
  Clear(tile);
  Product<Math>(tile, shared.tiles, kChunk, Left(scratch_source), RightT(inverse_beta));
  __syncthreads();
  StoreTile<Math>(tile, scratch, 0, kChunk, 0, kChunk);
  Clear(tile);
  Product<Math>(tile, shared.tiles, kChunk, LeftT(inverse), Right(scratch_source));
  typename Math::Tile dots;
  Clear(dots);
  Product<Math>(dots, shared.tiles, problem.K, Left(k), RightT(k));
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int t = Math::Row(i), s = Math::Column(i);
    const T decay = s < t ? Decay<T>(sums, t, s) : T(0);
    const T d_lower = s < t ? -tile.x[i] : T(0), product = decay * dots.x[i];
    scratch[t * kChunk + s] = d_lower * shared.rows.beta[t] * decay;
    shared.pairs(t, s) += d_lower * shared.rows.beta[t] * product;
    dots.x[i] = d_lower * product;
  }
  AddRowSums<Math>(dots, shared.d_beta);
  __syncthreads();

  // F + F^T, each element and its mirror by one thread.
  for (int i = row; i < kChunk * kChunk; i += kThreads) {
    const int t = i / kChunk, s = i % kChunk;
    if (s < t) scratch[s * kChunk + t] = scratch[i];
  }
  // pairs(t, r) = sum over s < r, r <= t; then over t >= r.
  if (row < kChunk) {
    T before = 0;
    for (int s = 0; s < kChunk; ++s) {
      const T pair = shared.pairs(row, s);
      shared.pairs(row, s) = s <= row ? before : T(0);
      before += pair;
    }
  }
  __syncthreads();
  if (row >= kChunk) return;
  T over = 0;
  for (int t = row; t < kChunk; ++t) over += shared.pairs(t, row);
  if (chunk.absolute() < chunk.span.last_chunk()) {
    const T* dm = gradients.phi.Find(problem, chunk.span, head, 0, chunk.absolute() + 1);
    T trace = 0;
    for (int i = 0; i < problem.K; ++i) trace += dm[static_cast<std::int64_t>(i) * problem.K + i];
    over += shared.rows.from_start[kChunk - 1] * trace;
  }
  gradients.row_flow[item * kChunk + row] = over;
  gradients.d_beta[item * kChunk + row] = shared.d_beta[row];
}

template <typename T>
struct ValueMemory {
  TileMemory<T> tiles;
  TileMatrix<T> weights;  // [t][s]
  ChunkLevels<T> levels;
};

// dv; block = (chunk, head, 64 columns of V).
template <typename Math>
__global__ void __launch_bounds__(kThreads)
    ValueGradients(const __grid_constant__ Problem problem,
                   const __grid_constant__ DeltaStates<typename Math::Scalar> states,
                   const __grid_constant__ DeltaGradients<typename Math::Scalar> gradients,
                   const __grid_constant__ TokenRows d_o,
                   const __grid_constant__ TokenGradients dv) {
  using T = typename Math::Scalar;
  auto& shared = SharedAs<ValueMemory<T>>();
  FlatIndex index{blockIdx.x};
  const int v0 = index.Take((problem.V + kTile - 1) / kTile) * kTile;
  const int head = index.Take(problem.heads);
  const ChunkAt chunk(problem.geometry, index.rest);
  if (!chunk.exists()) return;
  const std::int64_t item = ItemOf(problem, index.rest, head);
  const int h = problem.Head(head);
  shared.levels.Load(problem, chunk, h);
  __syncthreads();
  typename Math::Tile tile;
  LoadEntries<Math>(tile, MatrixSource<T>{states.mix + item * kChunk * kChunk, kChunk, kChunk});
  ForEach<Math>(tile, [&](int t, int s, T mix) {
    shared.weights(t, s) = s <= t ? mix * shared.levels.At(t, s) : T(0);
  });
  const TokenSource<T> d_output{&d_o, &chunk.span, chunk.first_row(), h, v0};
  const MatrixSource<T> inverse_beta{states.inverse_beta + item * kChunk * kChunk, kChunk, kChunk};
  const MatrixSource<T> du{gradients.du + item * kChunk * problem.V, kChunk, problem.V, 0, v0};
  Clear(tile);
  Product<Math>(tile, shared.tiles, kChunk, LeftT(SharedSource<T>{&shared.weights}),
                Right(d_output));
  Product<Math>(tile, shared.tiles, kChunk, LeftT(inverse_beta), Right(du));
  StoreGradients<Math>(tile, dv, chunk.span, chunk.first_row(), h, v0, problem.V);
}

template <typename T>
struct KeyMemory {
  TileMemory<T> tiles;
  RowFactors<T> rows;
  T start_flow[kChunk], end_flow[kChunk];
};

// dq, dk, start_flow, end_flow; block = (chunk, group, 64 columns of K), summing over the heads of
// the group.
template <typename Math>
__global__ void __launch_bounds__(kThreads)
    KeyGradients(const __grid_constant__ Problem problem,
                 const __grid_constant__ DeltaStates<typename Math::Scalar> states,
                 const __grid_constant__ DeltaGradients<typename Math::Scalar> gradients,
                 const __grid_constant__ TokenGradients dq,
                 const __grid_constant__ TokenGradients dk) {
  using T = typename Math::Scalar;
  auto& shared = SharedAs<KeyMemory<T>>();
  FlatIndex index{blockIdx.x};
  const int k_tiles = (problem.K + kTile - 1) / kTile;
  const int k_tile = index.Take(k_tiles), k0 = k_tile * kTile;
  const int group = index.Take(problem.groups);
  const ChunkAt chunk(problem.geometry, index.rest);
  if (!chunk.exists()) return;
  const Span& span = chunk.span;
  const T scale = static_cast<T>(problem.scale);
  const int global_group = problem.group_begin + group;
  const TokenSource<T> q{&problem.q, &span, chunk.first_row(), global_group, k0};
  const TokenSource<T> k{&problem.k, &span, chunk.first_row(), global_group, k0};
  const bool carries = chunk.absolute() < span.last_chunk();

  typename Math::Tile dq_tile, dk_tile, tile;
  Clear(dq_tile);
  Clear(dk_tile);
  for (int i = 0; i < problem.heads_per_group; ++i) {
    const int head = group * problem.heads_per_group + i;
    const std::int64_t item = ItemOf(problem, index.rest, head);
    __syncthreads();
    shared.rows.Load(problem, chunk, problem.Head(head));
    if (threadIdx.x < kChunk) {
      shared.start_flow[threadIdx.x] = 0;
      shared.end_flow[threadIdx.x] = 0;
    }
    const MatrixSource<T> d_scores{gradients.d_mix + item * kChunk * kChunk, kChunk, kChunk};
    const MatrixSource<T> d_dots{gradients.d_solve + item * kChunk * kChunk, kChunk, kChunk};
    const MatrixSource<T> inverse_beta{states.inverse_beta + item * kChunk * kChunk, kChunk,
                                       kChunk};
    const MatrixSource<T> dw{gradients.dw + item * kChunk * problem.K, kChunk, problem.K, 0, k0};
    Product<Math>(dq_tile, shared.tiles, kChunk, Left(d_scores), Right(k));
    Product<Math>(dk_tile, shared.tiles, kChunk, LeftT(d_scores), Right(q));
    Product<Math>(dk_tile, shared.tiles, kChunk, Left(d_dots), Right(k));

    // Rows that use exp(a): Q~ and W.
    LoadEntries<Math>(tile,
                      MatrixSource<T>{gradients.Query(problem, item, 0), kChunk, problem.K, 0, k0});
#pragma unroll
    for (int e = 0; e < 32; ++e) {
      tile.x[e] *= scale * shared.rows.from_start[Math::Row(e)];
      dq_tile.x[e] += tile.x[e];
    }
    AddRowDots<Math>(tile, q, shared.start_flow);
    const auto add_key = [&](T* flow, const T* factor) {
      ForEach<Math>(tile, [&](int s, int, T& value) { value *= factor[s]; });
#pragma unroll
      for (int e = 0; e < 32; ++e) dk_tile.x[e] += tile.x[e];
      AddRowDots<Math>(tile, k, flow);
    };
    Clear(tile);
    Product<Math>(tile, shared.tiles, kChunk, LeftT(inverse_beta), Right(dw));
    add_key(shared.start_flow, shared.rows.from_start);
    if (carries) {  // rows that use exp(A - a): K~
      const MatrixSource<T> u{states.u + item * kChunk * problem.V, kChunk, problem.V};
      const MatrixSource<T> w{states.w + item * kChunk * problem.K, kChunk, problem.K};
      const MatrixSource<T> dx{gradients.grads + item * problem.state_size(), problem.K, problem.V,
                               k0};
      const MatrixSource<T> dm{gradients.phi.Find(problem, span, head, 0, chunk.absolute() + 1),
                               problem.K, problem.K, k0};
      Clear(tile);
      Product<Math>(tile, shared.tiles, problem.K, Left(w), RightT(dm));
      Negate<Math>(tile);
      Product<Math>(tile, shared.tiles, problem.V, Left(u), RightT(dx));
      add_key(shared.end_flow, shared.rows.to_end);
    }
    __syncthreads();
    if (threadIdx.x < kChunk) {
      const std::int64_t at = (item * k_tiles + k_tile) * kChunk + threadIdx.x;
      gradients.start_flow[at] = shared.start_flow[threadIdx.x];
      gradients.end_flow[at] = shared.end_flow[threadIdx.x];
    }
  }
  StoreGradients<Math>(dq_tile, dq, span, chunk.first_row(), global_group, k0, problem.K);
  StoreGradients<Math>(dk_tile, dk, span, chunk.first_row(), global_group, k0, problem.K);
}

// dg, dbeta; block of 64 threads = (chunk, head).
template <typename T>
__global__ void __launch_bounds__(kChunk)
    GateGradients(const __grid_constant__ Problem problem,
                  const __grid_constant__ DeltaGradients<T> gradients,
                  const __grid_constant__ TokenGradients dg,
                  const __grid_constant__ TokenGradients d_beta) {
  __shared__ T start_flow[kChunk], end_flow[kChunk];
  FlatIndex index{blockIdx.x};
  const int head = index.Take(problem.heads), row = threadIdx.x, h = problem.Head(head);
  const ChunkAt chunk(problem.geometry, index.rest);
  if (!chunk.exists()) return;
  const std::int64_t item = ItemOf(problem, index.rest, head);
  const int k_tiles = (problem.K + kTile - 1) / kTile;
  T start = 0, end = 0;
  for (int tile = 0; tile < k_tiles; ++tile) {
    start += gradients.start_flow[(item * k_tiles + tile) * kChunk + row];
    end += gradients.end_flow[(item * k_tiles + tile) * kChunk + row];
  }
  start_flow[row] = start;
  end_flow[row] = end;
  __syncthreads();
  T flow = gradients.row_flow[item * kChunk + row];
  for (int t = row; t < kChunk; ++t) flow += start_flow[t];
  for (int s = 0; s < row; ++s) flow += end_flow[s];
  StoreGradient(dg, chunk.span, chunk.first_row() + row, h, 0, flow);
  StoreGradient(d_beta, chunk.span, chunk.first_row() + row, h, 0,
                gradients.d_beta[item * kChunk + row]);
}

}  // namespace

template <typename Math>
void ComputeDeltaChunkGradients(const Problem& problem, const Plan& plan,
                                const DeltaStates<typename Math::Scalar>& states,
                                const DeltaGradients<typename Math::Scalar>& gradients,
                                const TokenRows& d_o, const DeltaOutputs& out,
                                cudaStream_t stream) {
  using T = typename Math::Scalar;
  const std::int64_t items = plan.total_chunks * problem.heads;
  const std::int64_t k_tiles = Tiles(plan.K), v_tiles = Tiles(plan.V);
  Launch("level gradients", LevelGradients<Math>, items, kThreads, sizeof(LevelMemory<T>), stream,
         problem, states, gradients, d_o, out.level_scales);
  Launch("inner gradients", InnerGradients<Math>, items * (k_tiles + v_tiles), kThreads,
         sizeof(RowsMemory<T>), stream, problem, states, gradients);
  Launch("pair gradients", PairGradients<Math>, items, kThreads, sizeof(PairMemory<T>), stream,
         problem, states, gradients);
  Launch("value gradients", ValueGradients<Math>, items * v_tiles, kThreads, sizeof(ValueMemory<T>),
         stream, problem, states, gradients, d_o, out.v);
  Launch("key gradients", KeyGradients<Math>, plan.total_chunks * problem.groups * k_tiles,
         kThreads, sizeof(KeyMemory<T>), stream, problem, states, gradients, out.q, out.k);
  Launch("gate gradients", GateGradients<T>, items, kChunk, 0, stream, problem, gradients, out.g,
         out.beta);
}

#define FENWICK_INSTANTIATE(Math)                                    \
  template void ComputeDeltaChunkGradients<Math>(                    \
      const Problem&, const Plan&, const DeltaStates<Math::Scalar>&, \
      const DeltaGradients<Math::Scalar>&, const TokenRows&, const DeltaOutputs&, cudaStream_t);
FENWICK_INSTANTIATE(FmaMath<float>)
FENWICK_INSTANTIATE(FmaMath<double>)
FENWICK_INSTANTIATE(TensorMath)
#undef FENWICK_INSTANTIATE

}  // namespace fenwick::cuda::general
