// Gated delta rule, decoding. From the newest token of the ring back to the base, with r = scale q:
//   weight[s] = beta[s] (k[s] r)      then    r <- exp(g[s]) (r - beta[s] (k[s] r) k[s])
// and what is left of r reads the nodes.
//   Advance   S <- exp(g[r]) (I - beta[r] k[r] k[r]^T) S (+ beta[r] k[r] v[r]^T) for the tokens r
//             of the chunk
#include "cuda/general/entries.h"
#include "cuda/general/launch_step.h"
#include "cuda/general/step.cuh"

namespace fenwick::cuda::general {
namespace {

struct GatedDeltaStep {
  template <typename T>
  __device__ static void Read(const StepBlock<T>& block, int count) {
    block.LoadFactors(count);
    if (threadIdx.x >= 32) return;
    if (block.problem.K <= 128) {
      WalkBack<1>(block, count);
    } else {
      WalkBack<kMaxKeySize / 128>(block, count);
    }
  }

  // One warp, four columns of every 128 a lane: each step needs the sum of the step before. The
  // next key is on its way meanwhile.
  template <int kQuads, typename T>
  __device__ static void WalkBack(const StepBlock<T>& block, int count) {
    const Problem& problem = block.problem;
    const int column = 4 * threadIdx.x;
    const RowAt query(problem.q, block.span, block.RowOf(block.base + count - 1), block.group);
    Quad<T> read[kQuads], key[kQuads], next[kQuads];
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int c = column + 128 * i;
      read[i] = LoadQuad<T>(query.rows->data, query.rows->dtype, query.offset + c, problem.K - c,
                            query.rows->quads);
      next[i] = block.Key(count - 1, c);
#pragma unroll
      for (int j = 0; j < 4; ++j) read[i].x[j] *= static_cast<T>(problem.scale);
    }
    for (int s = count - 1; s >= 0; --s) {
      T dot = 0;
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        key[i] = next[i];
        if (s > 0) next[i] = block.Key(s - 1, column + 128 * i);
#pragma unroll
        for (int j = 0; j < 4; ++j) dot += key[i].x[j] * read[i].x[j];
      }
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, mask);
      dot *= block.shared.beta[s];
      if (threadIdx.x == 0) block.shared.weight[s] = dot;
      const T decay = block.shared.decay[s];
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) read[i].x[j] = decay * (read[i].x[j] - dot * key[i].x[j]);
      }
    }
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int c = column + 128 * i + j;
        if (c < problem.K) block.shared.read[c] = read[i].x[j];
      }
    }
  }

  template <typename T>
  __device__ static void PrepareAdvance(const StepBlock<T>& block) {
    block.LoadFactors(kChunk);
  }

  template <typename T>
  __device__ static void Advance(const StepBlock<T>& block, bool write) {
    const Problem& problem = block.problem;
    for (int i = 0; i < kChunk; ++i) {
      const std::int64_t s = block.RowOf(block.base + i);
      T dot = 0;
      for (int k = block.lane(); k < problem.K; k += block.lanes()) {
        dot += LoadToken<T>(problem.k, block.span, s, block.group, k) *
               block.tile[k * block.columns + block.column()];
      }
      dot = block.SumLanes(dot);
      const T decay = block.shared.decay[i];
      T change = -decay * dot;
      if (write && block.owns_column()) {
        change += LoadToken<T>(problem.v, block.span, s, block.head, block.v0 + block.column());
      }
      change *= block.shared.beta[i];
      for (int k = block.lane(); k < problem.K; k += block.lanes()) {
        T& x = block.tile[k * block.columns + block.column()];
        x = decay * x + change * LoadToken<T>(problem.k, block.span, s, block.group, k);
      }
    }
  }
};

}  // namespace

template <typename T>
void DeltaStep(const Inputs& inputs, const TensorView& o, const Context& context) {
  LaunchStep<GatedDeltaStep, T>(inputs, o, context);
}
template void DeltaStep<float>(const Inputs&, const TensorView&, const Context&);
template void DeltaStep<double>(const Inputs&, const TensorView&, const Context&);

}  // namespace fenwick::cuda::general
