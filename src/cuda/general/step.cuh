// Decoding: T new tokens for each sequence, token by token, on a state in place (state.h).
//
//   o[t] = sum over ring tokens s of level_scales[t, level(t, s)] weight[s] v[s]
//        + sum over live nodes b of level_scales[t, level of b] S_b^T read
//
// weight[s] and read [K] are what the transition makes of q[t], and so is Advance, which carries a
// K x columns piece of a state over the tokens of a chunk when the ring is full and its oldest
// chunk is folded into the nodes. Columns of V never mix: a block owns some columns of one head of
// one sequence. The ring's k, g and beta are shared by blocks, so they are written at the very end
// by the block of the sequence that finishes last; blocks count themselves in the upper half of the
// sequence's position, which is below 2^32 otherwise, and the last one writes the new position over
// it. So one launch does, and nothing has to be reset between launches.
#pragma once

#include "cuda/general/problem.cuh"

namespace fenwick::cuda::general {

// A state that is updated.
struct StepState {
  Rows k, v, g, beta;  // rings
  void* nodes;         // [N, H, slots, K, V]
  int slots;
  std::int64_t* position;  // [N]
  std::int64_t* base;      // [N]
};

inline constexpr int kStepThreads = 128;
static_assert(kStepThreads == kStateRing, "one thread a ring token");
inline constexpr int kMaxKeySize = 512;
// Columns of the tile that is folded at a time: 8 KB of shared memory at K = 128, so that folding,
// which is rare, does not limit the blocks that are resident.
inline constexpr int kFoldColumns = 16;

template <typename T>
struct StepMemory {
  double sums[kStateRing];  // running sums of g from the base, see RingSums
  T decay[kStateRing], beta[kStateRing];
  T weight[kStateRing];  // of v of the ring's tokens
  T read[kMaxKeySize];
  T partial[kStepThreads];
  double warp_sums[kStepThreads / 32];
  unsigned arrived;
};

// The tokens that one block works on, and its place among the columns.
template <typename T>
struct StepBlock {
  const Problem& problem;
  StepMemory<T>& shared;
  T* tile;    // [K, kFoldColumns] in shared memory
  Span span;  // row j is the token at position base at entry + j
  int head, group;
  int v0, columns;    // first column, and how many threads stand side by side in a row
  std::int64_t base;  // of the ring as it is now

  __device__ int column() const { return threadIdx.x % columns; }
  __device__ int lane() const { return threadIdx.x / columns; }
  __device__ int lanes() const { return kStepThreads / columns; }
  __device__ bool owns_column() const { return v0 + column() < problem.V; }
  __device__ std::int64_t RowOf(std::int64_t position) const { return position - span.base; }

  // Sum of x over the threads of a column, given to all of them.
  __device__ T SumLanes(T x) const {
    __syncthreads();
    shared.partial[threadIdx.x] = x;
    __syncthreads();
    T sum = 0;
    for (int i = 0; i < lanes(); ++i) sum += shared.partial[i * columns + column()];
    return sum;
  }

  // Log decay of this thread's ring token, clamped as in gates.cuh; 0 for tokens from `count` on.
  __device__ double Gate(int count) const {
    if (threadIdx.x >= count) return 0;
    const double g = LoadToken<T>(problem.g, span, RowOf(base + threadIdx.x), head);
    return g > kLogZero ? g : kLogZero;
  }

  // shared.sums[i] = g[base] + ... + g[base + i] for i < count.
  __device__ void RingSums(int count) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    double sum = Gate(count);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const double below = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += below;
    }
    __syncthreads();
    if (lane == 31) shared.warp_sums[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warp; ++w) sum += shared.warp_sums[w];
    shared.sums[threadIdx.x] = sum;
    __syncthreads();
  }

  // shared.decay and beta of the ring's first `count` tokens.
  __device__ void LoadFactors(int count) const {
    const T decay = Exp<T>(Gate(count));
    __syncthreads();
    if (threadIdx.x < count) {
      shared.decay[threadIdx.x] = decay;
      shared.beta[threadIdx.x] = LoadToken<T>(problem.beta, span, RowOf(base + threadIdx.x), head);
    }
    __syncthreads();
  }

  // A quad of the key of ring token i.
  __device__ Quad<T> Key(int i, int column) const {
    const RowAt row(problem.k, span, RowOf(base + i), group);
    return LoadQuad<T>(row.rows->data, row.rows->dtype, row.offset + column, problem.K - column,
                       row.rows->quads);
  }
};

__device__ inline bool SlotIsLive(const Problem& problem, std::int64_t base, int slot) {
  const std::int64_t chunk = base / kChunk;
  return slot == problem.top_slot ? (chunk >> slot) != 0
                                  : slot < problem.top_slot && (chunk >> slot) % 2 != 0;
}

// Folds the oldest chunk of the ring into the nodes of a block of kFoldColumns columns; the caller
// moves the base on.
template <typename Transition, typename T>
__device__ inline void Fold(StepBlock<T>& block, T* nodes, int slots) {
  const Problem& problem = block.problem;
  const std::int64_t size = problem.state_size();
  const int carry = __ffsll(block.base / kChunk + 1) - 1;  // trailing ones of the chunk's index
  const int target = carry < problem.top_slot ? carry : problem.top_slot;
  const auto element = [&](int slot, int k) -> T& {
    return nodes[slot * size + static_cast<std::int64_t>(k) * problem.V + block.v0 +
                 block.column()];
  };
  const auto each = [&](auto&& f) {
    for (int k = block.lane(); k < problem.K; k += block.lanes()) {
      f(k, block.tile[k * block.columns + block.column()]);
    }
  };
  Transition::PrepareAdvance(block);
  for (int slot = target; slot < slots; ++slot) {
    const bool live = SlotIsLive(problem, block.base, slot);
    if (slot != target && !live) continue;
    each([&](int k, T& x) {
      x = live && block.owns_column() ? element(slot, k) : T(0);
      for (int merged = 0; slot == target && merged < target && block.owns_column(); ++merged) {
        x += element(merged, k);
      }
    });
    Transition::Advance(block, /*write=*/slot == target);
    if (block.owns_column()) each([&](int k, T& x) { element(slot, k) = x; });
  }
}

// block = (sequence, head, `columns` columns of V).
template <typename Transition, typename T>
__global__ void __launch_bounds__(kStepThreads)
    StepTokens(const __grid_constant__ Problem problem, const __grid_constant__ StepState state,
               const __grid_constant__ Rows o, int columns) {
  __shared__ StepMemory<T> shared;
  FlatIndex index{blockIdx.x};
  const int tiles = (problem.V + columns - 1) / columns;
  const int v0 = index.Take(tiles) * columns;
  const int h = index.Take(problem.H);
  const int n = static_cast<int>(index.rest);
  auto* words = reinterpret_cast<unsigned*>(state.position + n);  // low, high
  const std::int64_t position = static_cast<const volatile unsigned*>(words)[0];

  Span span;
  span.sequence = n;
  span.batch = n;
  span.tokens = problem.geometry.tokens;
  span.base = state.base[n];
  span.ring_tokens = static_cast<int>(position - span.base);
  StepBlock<T> block{problem, shared,  &SharedAs<T>(), span, h, h / problem.heads_per_group,
                     v0,      columns, span.base};
  T* nodes = static_cast<T*>(state.nodes) +
             (static_cast<std::int64_t>(n) * problem.H + h) * state.slots * problem.state_size();

  for (std::int64_t t = position; t < position + span.tokens; ++t) {
    if (t - block.base == kStateRing) {
      for (int first = 0; first < columns; first += kFoldColumns) {
        StepBlock<T> piece = block;
        piece.v0 += first;
        piece.columns = kFoldColumns;
        if (piece.v0 < problem.V) Fold<Transition>(piece, nodes, state.slots);
      }
      block.base += kChunk;
      __syncthreads();
    }
    const int count = static_cast<int>(t - block.base) + 1;
    const std::int64_t row = block.RowOf(t);
    Transition::Read(block, count);
    __syncthreads();
    if (threadIdx.x < count) {
      shared.weight[threadIdx.x] *= LoadToken<T>(problem.level_scales, span, row, h,
                                                 LevelOf(problem, t, block.base + threadIdx.x));
    }
    __syncthreads();
    T sum = 0;
    if (block.owns_column()) {
#pragma unroll 4
      for (int i = block.lane(); i < count; i += block.lanes()) {
        sum += shared.weight[i] *
               LoadToken<T>(problem.v, span, block.RowOf(block.base + i), h, v0 + block.column());
      }
    }
    for (int slot = 0; slot < state.slots; ++slot) {
      if (!SlotIsLive(problem, block.base, slot) || !block.owns_column()) continue;
      const std::int64_t last = ((block.base / kChunk) >> slot << slot) * kChunk - 1;
      const T scale = LoadToken<T>(problem.level_scales, span, row, h, LevelOf(problem, t, last));
      const T* node = nodes + slot * problem.state_size() + v0 + block.column();
      T dot = 0;
#pragma unroll 16
      for (int k = block.lane(); k < problem.K; k += block.lanes()) {
        dot += shared.read[k] * node[static_cast<std::int64_t>(k) * problem.V];
      }
      sum += scale * dot;
    }
    sum = block.SumLanes(sum);
    if (block.lane() == 0 && block.owns_column()) {
      StoreElement(o.data, o.dtype, o.Offset(n, t - position, h) + v0 + block.column(), sum);
    }
  }

  const auto append = [&](const TokenRows& from, const Rows& ring, int head, int first, int width) {
    for (std::int64_t i = threadIdx.x; i < span.tokens * width; i += kStepThreads) {
      const std::int64_t t = position + i / width;
      const int c = first + static_cast<int>(i % width);
      StoreElement(ring.data, ring.dtype, ring.Offset(n, t % kStateRing, head) + c,
                   LoadToken<T>(from, span, block.RowOf(t), head, c));
    }
  };
  append(problem.v, state.v, h, v0, problem.V - v0 < columns ? problem.V - v0 : columns);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) shared.arrived = atomicAdd(words + 1, 1u);
  __syncthreads();
  if (shared.arrived + 1 != static_cast<unsigned>(tiles * problem.H)) return;
  for (int group = 0; group < problem.H / problem.heads_per_group; ++group) {
    append(problem.k, state.k, group, 0, problem.K);
  }
  for (int head = 0; head < problem.H; ++head) {
    append(problem.g, state.g, head, 0, 1);
    if (state.beta.data != nullptr) append(problem.beta, state.beta, head, 0, 1);
  }
  if (threadIdx.x == 0) {
    state.position[n] = position + span.tokens;
    state.base[n] = block.base;
  }
}

// Columns of a block: as many as still give 256 blocks, about two for each multiprocessor of a
// large GPU. What a block does for its head before it reads columns is repeated by every block of
// it.
inline int StepColumns(std::int64_t sequences, const Problem& problem) {
  int columns = 64;
  while (columns > kFoldColumns &&
         (sequences * problem.H * ((problem.V + columns - 1) / columns) < 256 ||
          columns / 2 >= problem.V)) {
    columns /= 2;
  }
  return columns;
}

}  // namespace fenwick::cuda::general
