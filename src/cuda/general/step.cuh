// Decoding: T new tokens for each sequence, token by token, on a state in place (state.h).
//
//   o[t] = sum over ring tokens s of level_scales[t, level(t, s)] a(t, s) weight[s] v[s]
//        + sum over live nodes b of level_scales[t, level of b] a(t) S_b^T read
//
// weight[s] and read [K] are what the transition makes of q[t] and the ring's keys; a are decays,
// as far as the transition has not applied them itself. A transition is
//   kErases                      a token edits the state under its key before it writes
//   Prepare(block, first, count) what Read and Fold need of ring blocks `first` and on
//   Read(block, count, prepared) fills shared.weight and shared.read; `prepared` ring blocks are
//                                as the token before left them. The caller synchronises.
//   DecaysUpTo(i, count)         weight[i] lacks the decay from token i to this one
//   kReadDecays                  read has its decay
//
// Columns of V never mix: a block owns some tiles of columns of one head of one sequence. The time
// of a step is that of reading the nodes once: loads of 16 bytes, StepShape::kLoads of them in flight
// in each thread. What comes before, the ring's keys, is repeated by the blocks of a head.
//
// One launch does, and nothing has to be reset between launches: blocks count themselves in the
// upper half of their sequence's position, which is below 2^32 otherwise, and the last one writes
// the new position over it. The ring's k, g and beta are shared by blocks. Where nothing is folded
// the new tokens' slots are free, and each is written by one block; otherwise by the last block,
// when all others have folded.
#pragma once

#include <algorithm>

#include "cuda/general/step_fold.cuh"
#include "cuda/ptx/async.cuh"

namespace fenwick::cuda::general {

// Elements of a block's sums, one for each warp and column.
template <typename T, int kTiles>
inline constexpr int kPartialSums = kStepWarps* kTiles* kTileColumns<T>;

// sum[i] += the ring's part of the thread's quad of columns in tile i. Tokens that do not exist
// have weight zero.
template <typename Access, int kTiles, typename T>
__device__ inline void ReadRing(const StepBlock<T>& block, Quad<T> (&sum)[kTiles]) {
  constexpr int kRows = kStateRing / kRowLanes<T>;
  typename Access::Raw raw[kRows][kTiles];
  const int width = block.problem.V - block.v0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const char* row = block.shared.value[block.lane() + r * kRowLanes<T>];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int column = Access::Column(tile * kTileColumns<T> + 4 * block.quad(), width);
      raw[r][tile] = Access::Load(row, block.dtype(), column, width);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const T weight = block.shared.weight[block.lane() + r * kRowLanes<T>];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      AddScaled(sum[tile], weight, Access::Expand(raw[r][tile]));
    }
  }
}

// A thread's rows of the live nodes [slots, K, V], one after another.
template <typename T>
struct NodeRows {
  const StepBlock<T>& block;
  const T* nodes;
  std::uint64_t live;  // nodes that the thread is not through with
  const T* row;        // the current one; after the last one still that, and `exists` is false
  bool exists = false;
  int k, next_k;  // entry of K of the current row, and of the next one from the current node on

  __device__ NodeRows(const StepBlock<T>& block, const T* nodes, std::uint64_t live)
      : block(block), nodes(nodes), live(live), row(nodes), next_k(block.lane()) {
    if (live != 0) row += slot() * block.problem.state_size();
  }

  __device__ void Next() {
    const StepProblem& problem = block.problem;
    while (next_k >= problem.K && live != 0) {
      next_k -= problem.K;
      live &= live - 1;
    }
    exists = live != 0;
    if (!exists) return;
    k = next_k;
    row = nodes + slot() * problem.state_size() + static_cast<std::int64_t>(k) * problem.V;
    next_k += kRowLanes<T>;
  }
  __device__ int slot() const { return __ffsll(live) - 1; }
  // What the row is multiplied by.
  __device__ T Scale() const {
    return exists ? block.shared.node_scale[slot()] * block.shared.read[k] : T(0);
  }
  // First column of the thread's quad in a tile of columns, one that may be read.
  template <typename Access>
  __device__ int Column(int tile) const {
    return Access::Column(block.v0 + tile * kTileColumns<T> + 4 * block.quad(), block.problem.V);
  }
};

// What suits blocks of kTiles tiles of columns (measured, docs/performance-cuda.md). Wide blocks of a
// transition that erases have more registers, for its folds.
template <typename Transition, typename Access, int kTiles>
struct StepShape {
  static constexpr bool kWide = Access::kWholeQuads && kTiles == 4;
  static constexpr bool kErases = Transition::kErases;
  static constexpr int kBlocksPerSM = !Access::kWholeQuads ? 1
                                      : kTiles == 2        ? 4
                                      : kWide && !kErases  ? 3
                                                           : 2;
  // Loads of nodes in flight in a thread.
  static constexpr int kLoads = kTiles == 1 || (kWide && kErases) ? 16 : 8;
  // Rows of nodes that are on their way to shared memory while the ring is worked on, 16 bytes a
  // copy, each thread's to places of its own.
  static constexpr int kStagedRows = kWide && kErases ? 2 : 0;
  static constexpr int kStagedBytes = kStagedRows * kTiles * kStepThreads * 16;
};

template <int kTiles, typename T>
__device__ inline T* StagedQuad(T* staged, int row, int tile) {
  return staged + ((row * kTiles + tile) * kStepThreads + threadIdx.x) * 4;
}

template <typename Shape, typename Access, int kTiles, typename T>
__device__ inline void StageNodes(const StepBlock<T>& block, const T* nodes, std::uint64_t live,
                                  T* staged) {
  if constexpr (Shape::kStagedRows > 0) {
    NodeRows<T> rows(block, nodes, live);
#pragma unroll
    for (int r = 0; r < Shape::kStagedRows; ++r) {
      rows.Next();
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        ptx::CopyAsync(StagedQuad<kTiles>(staged, r, tile),
                       rows.row + rows.template Column<Access>(tile), rows.exists);
      }
    }
  }
}

// sum[i] += the nodes' part of the thread's quad of columns in tile i. Where a thread has no more
// rows, its last one is read again, with weight zero.
template <typename Shape, typename Access, int kTiles, typename T>
__device__ inline void ReadNodes(const StepBlock<T>& block, const T* nodes, std::uint64_t live,
                                 const T* staged, Quad<T> (&sum)[kTiles]) {
  NodeRows<T> rows(block, nodes, live);
  constexpr int kRows = Shape::kLoads / kTiles, kStaged = Shape::kStagedRows;
  T staged_scale[kStaged + 1];
#pragma unroll
  for (int r = 0; r < kStaged; ++r) {
    rows.Next();
    staged_scale[r] = rows.Scale();
  }
  bool adds_staged = kStaged > 0;
  const auto add_staged = [&] {  // while the first of the others are on their way
    if (!adds_staged) return;
    adds_staged = false;
    ptx::WaitForCopies();
#pragma unroll
    for (int r = 0; r < kStaged; ++r) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const auto* x = reinterpret_cast<const Quad<T>*>(StagedQuad<kTiles>(staged, r, tile));
        AddScaled(sum[tile], staged_scale[r], *x);
      }
    }
  };
  while (rows.live != 0) {
    Quad<T> x[kRows][kTiles];
    T scale[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      rows.Next();
      scale[r] = rows.Scale();
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        x[r][tile] =
            Access::LoadNode(rows.row, rows.template Column<Access>(tile), block.problem.V);
      }
    }
    add_staged();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) AddScaled(sum[tile], scale[r], x[r][tile]);
    }
  }
  add_staged();
}

// Adds up the threads of a column and stores them in the row o of the head.
template <int kTiles, typename T>
__device__ inline void StoreSums(const StepBlock<T>& block, Quad<T> (&sum)[kTiles], char* o) {
  constexpr int kColumns = kTiles * kTileColumns<T>;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      T x = sum[tile].x[j];
#pragma unroll
      for (int mask = 16; mask >= kTileQuads<T>; mask /= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, mask);
      }
      if (threadIdx.x % 32 < kTileQuads<T>) {
        block.scratch[threadIdx.x / 32 * kColumns + tile * kTileColumns<T> + 4 * block.quad() + j] =
            x;
      }
    }
  }
  __syncthreads();
  const int column = threadIdx.x;
  if (column < kColumns && block.v0 + column < block.problem.V) {
    T x = 0;
#pragma unroll
    for (int w = 0; w < kStepWarps; ++w) x += block.scratch[w * kColumns + column];
    StoreElement(o, block.problem.o.dtype, block.v0 + column, x);
  }
}

// Copies `bytes` of the new tokens' rows of `heads` heads, from byte `first` on, into the ring.
__device__ inline void Append(const StepProblem& problem, const StepTensor& tensor, int n, int head,
                              int heads, std::int64_t position, int first, int bytes) {
  using Unit = std::uint16_t;  // no element is smaller
  const TokenFinder rows(tensor, n, head);
  const int units = bytes / static_cast<int>(sizeof(Unit));
#pragma unroll 1
  for (std::int64_t j = 0; j < problem.tokens; ++j) {
    char* to = const_cast<char*>(rows.ring) +
               (position + j) % kStateRing * tensor.ring_token_stride + first;
    const char* from = rows.New(j) + first;
#pragma unroll 1
    for (int i = threadIdx.x; i < heads * units; i += kStepThreads) {
      const int h = i / units, at = i % units * static_cast<int>(sizeof(Unit));
      *reinterpret_cast<Unit*>(to + h * tensor.row_bytes + at) =
          __ldg(reinterpret_cast<const Unit*>(from + h * tensor.head_stride + at));
    }
  }
}

// Of what the blocks of a sequence share, the part that comes with `heads` heads.
__device__ inline void AppendShared(const StepProblem& problem, int n, int head, int heads,
                                    std::int64_t position) {
  const auto append = [&](const StepTensor& tensor, int at, int count) {
    Append(problem, tensor, n, at, count, position, 0, tensor.row_bytes);
  };
  const int groups = (heads + problem.heads_per_group - 1) / problem.heads_per_group;
  if (head % problem.heads_per_group == 0) {
    append(problem.k, head / problem.heads_per_group, groups);
  }
  append(problem.g, head, heads);
  if (problem.beta.ring != nullptr) append(problem.beta, head, heads);
}

// Bytes of StepBlock::scratch: what a fold needs, or sums and staged nodes.
template <typename Transition, typename Access, int kTiles>
std::size_t ScratchBytes(int K) {
  using T = typename Access::Scalar;
  const std::size_t reads =
      sizeof(T) * kPartialSums<T, kTiles> + StepShape<Transition, Access, kTiles>::kStagedBytes;
  return std::max(FoldBytes<T>(K), reads);
}

// block = (sequence, head, kTiles tiles of columns).
template <typename Transition, typename Access, int kTiles>
__global__ void __launch_bounds__(kStepThreads, StepShape<Transition, Access, kTiles>::kBlocksPerSM)
    StepTokens(const __grid_constant__ StepProblem problem) {
  using T = typename Access::Scalar;
  using Shape = StepShape<Transition, Access, kTiles>;
  constexpr int kColumns = kTiles * kTileColumns<T>;
  __shared__ StepMemory<T> shared;
  const unsigned tiles = (problem.V + kColumns - 1) / kColumns, row = blockIdx.x / tiles;
  const int v0 = blockIdx.x % tiles * kColumns, head = row % problem.H, n = row / problem.H;
  auto* words = reinterpret_cast<unsigned*>(problem.position + n);  // low, high
  const std::int64_t position = static_cast<const volatile unsigned*>(words)[0];
  StepBlock<T> block{problem, shared, &SharedAs<T>(), n, head, v0, position, problem.base[n]};
  T* nodes = static_cast<T*>(problem.nodes) + (static_cast<std::int64_t>(n) * problem.H + head) *
                                                  problem.slots * problem.state_size();
  T* staged = block.scratch + kPartialSums<T, kTiles>;
  const bool folds = block.old() + problem.tokens > kStateRing;
  const unsigned blocks = tiles * problem.H;  // of the sequence
  unsigned arrived = 0;                       // before this one

  int prepared = 0;
#pragma unroll 1
  for (std::int64_t j = 0; j < problem.tokens; ++j) {
    const std::int64_t t = position + j;
    if (t - block.base == kStateRing) {
      Fold<Transition, Access>(block, nodes, kColumns);
      block.base += kChunk;
      prepared = 0;
      __syncthreads();
    }
    const int count = static_cast<int>(t - block.base) + 1;
    const std::uint64_t live = LiveSlots(problem, block.base);
    // The thread of a ring token, or of a live node, has its level scale.
    const int slot = static_cast<int>(threadIdx.x) - kStateRing;
    const bool has_token = threadIdx.x < count;
    const bool has_node = slot >= 0 && slot < kMaxSlots && (live >> slot & 1) != 0;
    StageNodes<Shape, Access, kTiles>(block, nodes, live, staged);
    T level_scale = 0;
    if (has_token || has_node) {
      const std::int64_t chunk = block.base / kChunk;
      const std::int64_t source =
          has_token ? block.base + threadIdx.x : (chunk >> slot << slot) * kChunk - 1;
      level_scale =
          LoadElement<T>(TokenFinder(problem.level_scales, n, head).New(j),
                         problem.level_scales.dtype, SaturatedLevel(t, source, problem.L));
    }
    block.LoadRing(count);
    // Behind a barrier: the whole block has read its sequence's position.
    if (j == 0 && !folds && threadIdx.x == kStepThreads - 1) arrived = atomicAdd(words + 1, 1u);
    Transition::template Read<Access>(block, count, prepared);
    prepared = count / kTokenBlock;
    __syncthreads();
    if (threadIdx.x < kStateRing) {
      T& weight = shared.weight[threadIdx.x];
      const int until = Transition::DecaysUpTo(threadIdx.x, count);
      weight = has_token ? weight * level_scale * Decay<T>(shared.sums, until, threadIdx.x) : T(0);
    }
    if (has_node) {
      shared.node_scale[slot] =
          Transition::kReadDecays ? level_scale : level_scale * Exp<T>(shared.sums[count - 1]);
    }
    __syncthreads();
    Quad<T> sum[kTiles] = {};
    ReadRing<Access>(block, sum);
    ReadNodes<Shape, Access>(block, nodes, live, staged, sum);
    StoreSums(block, sum, const_cast<char*>(TokenFinder(problem.o, n, head).New(j)));
  }

  const int columns = problem.V - v0 < kColumns ? problem.V - v0 : kColumns;
  const int bytes = ElementSize(problem.v.dtype);
  Append(problem, problem.v, n, head, 1, position, v0 * bytes, columns * bytes);
  int first_head = head, heads = v0 == 0 ? 1 : 0;
  if (folds) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == kStepThreads - 1) shared.arrived = arrived = atomicAdd(words + 1, 1u);
    __syncthreads();
    first_head = 0, heads = shared.arrived + 1 == blocks ? problem.H : 0;
  }
  if (heads > 0) AppendShared(problem, n, first_head, heads, position);
  if (threadIdx.x == kStepThreads - 1 && arrived + 1 == blocks) {
    problem.position[n] = position + problem.tokens;
    problem.base[n] = block.base;
  }
}

}  // namespace fenwick::cuda::general
