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
  // One warp: every step needs the sum of the step before.
  template <typename T>
  __device__ static void Read(const StepBlock<T>& block, int count) {
    constexpr int kPerLane = kMaxKeySize / 32;
    const Problem& problem = block.problem;
    const int lane = threadIdx.x;
    __syncthreads();
    if (lane >= 32) return;
    const std::int64_t t = block.RowOf(block.base + count - 1);
    T read[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int k = lane + 32 * i;
      read[i] = k < problem.K ? static_cast<T>(problem.scale) *
                                    LoadToken<T>(problem.q, block.span, t, block.group, k)
                              : T(0);
    }
    for (int s = count - 1; s >= 0; --s) {
      const std::int64_t row = block.RowOf(block.base + s);
      T key[kPerLane];
      T dot = 0;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int k = lane + 32 * i;
        key[i] = k < problem.K ? LoadToken<T>(problem.k, block.span, row, block.group, k) : T(0);
        dot += key[i] * read[i];
      }
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, mask);
      dot *= LoadToken<T>(problem.beta, block.span, row, block.head);
      if (lane == 0) block.shared.weight[s] = dot;
      const T decay = Gate(block, row);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) read[i] = decay * (read[i] - dot * key[i]);
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (lane + 32 * i < problem.K) block.shared.read[lane + 32 * i] = read[i];
    }
  }

  template <typename T>
  __device__ static void PrepareAdvance(const StepBlock<T>&) {}

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
      const T decay = Gate(block, s);
      T change = -decay * dot;
      if (write && block.owns_column()) {
        change += LoadToken<T>(problem.v, block.span, s, block.head, block.v0 + block.column());
      }
      change *= LoadToken<T>(problem.beta, block.span, s, block.head);
      for (int k = block.lane(); k < problem.K; k += block.lanes()) {
        T& x = block.tile[k * block.columns + block.column()];
        x = decay * x + change * LoadToken<T>(problem.k, block.span, s, block.group, k);
      }
    }
  }

 private:
  template <typename T>
  __device__ static T Gate(const StepBlock<T>& block, std::int64_t row) {
    const double g = LoadToken<T>(block.problem.g, block.span, row, block.head);
    return Exp<T>(g > kLogZero ? g : kLogZero);
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
