// What the blocks of a decoding step are given, and what one knows (step.cuh).
#pragma once

#include "cuda/general/gates.cuh"
#include "cuda/general/step_access.cuh"
#include "cuda/general/tile.cuh"
#include "cuda/ptx/async.cuh"
#include "fenwick/partition.h"
#include "fenwick/state.h"

namespace fenwick::cuda::general {

// A tensor's new tokens [N, T, heads, width] and the ring [N, kStateRing, heads, width] that they
// are appended to. Strides in bytes; `width` is contiguous. Rings are contiguous.
struct StepTensor {
  const char* call = nullptr;
  char* ring = nullptr;  // null: old tokens are not kept (q, level_scales)
  DType dtype = DType::kFloat32;
  int row_bytes = 0;
  std::int64_t batch_stride = 0, token_stride = 0, head_stride = 0;  // of the call
  std::int64_t ring_token_stride = 0;
};

struct StepProblem {
  StepTensor q, k;  // [N, T, G, K]
  StepTensor v, o;  // [N, T, H, V]
  StepTensor g, beta;
  StepTensor level_scales;           // [N, T, H, L]
  void* nodes = nullptr;             // [N, H, slots, K, V]
  std::int64_t* position = nullptr;  // [N]
  std::int64_t* base = nullptr;      // [N]
  int slots = 0;
  int top_slot = 0;  // slots beyond are merged into this one (saturation); kNoTop: none are
  std::int64_t sequences = 0, tokens = 0;
  int K = 0, V = 0, L = 0, H = 0, heads_per_group = 1;
  double scale = 1.0;

  __device__ std::int64_t state_size() const { return static_cast<std::int64_t>(K) * V; }
};

inline constexpr int kStepThreads = 256;
inline constexpr int kStepWarps = kStepThreads / 32;
inline constexpr int kMaxSlots = 64;
static_assert(kStepThreads >= kStateRing + kMaxSlots, "a thread for each ring token and each slot");
inline constexpr int kMaxKeySize = 512;

// Ring tokens that the delta rule works on at a time.
inline constexpr int kTokenBlock = 8;
inline constexpr int kRingBlocks = kStateRing / kTokenBlock;

// The threads of a block stand side by side on the quads of a row of kTileColumns columns, and
// below each other on kRowLanes rows. A thread has the same rows and columns of a tile, whatever
// the width of a block in tiles: that is why sums do not depend on it.
template <typename T>
inline constexpr int kTileColumns = sizeof(T) == 8 ? 8 : 32;
template <typename T>
inline constexpr int kTileQuads = kTileColumns<T> / 4;
template <typename T>
inline constexpr int kRowLanes = kStepThreads / kTileQuads<T>;

// A tensor's rows of one sequence and head: ring token i is the token at position base + i.
struct TokenFinder {
  const char* call;
  const char* ring;
  std::int64_t token_stride, ring_token_stride;

  __device__ TokenFinder(const StepTensor& tensor, int n, int head)
      : call(tensor.call + n * tensor.batch_stride + head * tensor.head_stride),
        ring(tensor.ring + n * kStateRing * tensor.ring_token_stride + head * tensor.row_bytes),
        token_stride(tensor.token_stride),
        ring_token_stride(tensor.ring_token_stride) {}

  __device__ const char* New(std::int64_t j) const { return call + j * token_stride; }
  // `old` of the ring's tokens, which begin at position base, came before the call.
  __device__ const char* At(int i, std::int64_t base, std::int64_t old) const {
    if (i >= old) return New(i - old);
    return ring + (static_cast<int>(base) + i) % kStateRing * ring_token_stride;
  }
};

template <typename T>
struct StepMemory {
  double sums[kStateRing];  // g[base] + ... + g[base + i]
  double warp_sums[kStateRing / 32];
  const char* key[kStateRing];    // rows of the ring's tokens
  const char* value[kStateRing];  // the same, from the block's first column on
  T beta[kStateRing];
  T weight[kStateRing];             // of v of the ring's tokens
  T node_scale[kMaxSlots];          // of the nodes
  alignas(32) T read[kMaxKeySize];  // the vector that reads the nodes
  // Gated delta rule, for each block of tokens: (I + diag(beta) L)^-1 diag(beta), L the products of
  // the keys below the diagonal.
  T solve[kRingBlocks][kTokenBlock][kTokenBlock];
  unsigned arrived;
};

template <typename T>
struct StepBlock {
  const StepProblem& problem;
  StepMemory<T>& shared;
  T* scratch;  // shared memory, see ScratchBytes
  int n, head;
  int v0;                 // first column
  std::int64_t position;  // of the first new token
  std::int64_t base;      // of the ring

  __device__ static int quad() { return threadIdx.x % kTileQuads<T>; }
  __device__ static int lane() { return threadIdx.x / kTileQuads<T>; }
  __device__ int group() const { return head / problem.heads_per_group; }
  __device__ std::int64_t old() const { return position - base; }
  __device__ DType dtype() const { return problem.q.dtype; }
  __device__ const char* Query(int count) const {
    return TokenFinder(problem.q, n, group()).At(count - 1, base, old());
  }

  // What is in shared memory of the ring's first `count` tokens: rows, beta and sums. For tokens
  // from `count` on the row is the last one's, beta is zero. A barrier is inside; sums are complete
  // after the next one.
  __device__ void LoadRing(int count) const {
    const int i = threadIdx.x, lane = i % 32, warp = i / 32;
    double sum = 0;
    if (i < kStateRing) {
      const int token = i < count ? i : count - 1;
      shared.key[i] = TokenFinder(problem.k, n, group()).At(token, base, old());
      shared.value[i] =
          TokenFinder(problem.v, n, head).At(token, base, old()) + v0 * ElementSize(dtype());
      // The walks over keys and values begin later.
      for (int at = 0; at < problem.k.row_bytes; at += 128) ptx::Prefetch(shared.key[i] + at);
      ptx::Prefetch(shared.value[i]);
      const double g = LoadElement<T>(TokenFinder(problem.g, n, head).At(token, base, old()),
                                      problem.g.dtype, 0);
      if (i < count) sum = g > kLogZero ? g : kLogZero;
      if (problem.beta.call != nullptr) {
        const T beta = LoadElement<T>(TokenFinder(problem.beta, n, head).At(token, base, old()),
                                      problem.beta.dtype, 0);
        shared.beta[i] = i < count ? beta : T(0);
      }
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const double below = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += below;
      }
      if (lane == 31) shared.warp_sums[warp] = sum;
    }
    __syncthreads();
    if (i < kStateRing) {
      for (int w = 0; w < warp; ++w) sum += shared.warp_sums[w];
      shared.sums[i] = sum;
    }
  }

  // Decay over the ring tokens from `begin` to `last`, both of them acting.
  __device__ T DecayOver(int begin, int last) const {
    return Exp<T>(shared.sums[last] - (begin > 0 ? shared.sums[begin - 1] : 0.0));
  }
};

// Bit b is set where node slot b is live.
__device__ inline std::uint64_t LiveSlots(const StepProblem& problem, std::int64_t base) {
  const auto chunk = static_cast<std::uint64_t>(base / kChunk);
  if (problem.top_slot >= kMaxSlots) return chunk;
  const std::uint64_t top = std::uint64_t{1} << problem.top_slot;
  return (chunk & (top - 1)) | (chunk >= top ? top : 0);
}

}  // namespace fenwick::cuda::general
