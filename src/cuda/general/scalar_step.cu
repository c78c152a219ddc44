// Scalar gate, decoding. With a[i] the sum of g over the ring up to its token i:
//   weight[s] = scale exp(a[t] - a[s]) q[t] k[s]      read = scale exp(a[t]) q[t]
//   Advance   S <- exp(g[r]) S (+ k[r] v[r]^T) for the tokens r of the chunk
#include "cuda/general/entries.h"
#include "cuda/general/launch_step.h"
#include "cuda/general/step.cuh"

namespace fenwick::cuda::general {
namespace {

struct ScalarGateStep {
  template <typename T>
  __device__ static void Read(const StepBlock<T>& block, int count) {
    const Problem& problem = block.problem;
    block.RingSums(count);
    const std::int64_t t = block.RowOf(block.base + count - 1);
    const double* sums = block.shared.sums;
    const T scale = static_cast<T>(problem.scale);
    for (int k = threadIdx.x; k < problem.K; k += kStepThreads) {
      block.shared.read[k] = scale * LoadToken<T>(problem.q, block.span, t, block.group, k);
    }
    __syncthreads();
    // Eight threads a token.
    for (int first = 0; first < count; first += kStepThreads / 8) {
      const int i = first + threadIdx.x / 8;
      T dot = 0;
      for (int k = threadIdx.x % 8 * 4; i < count && k < problem.K; k += 32) {
        const Quad<T> key = block.Key(i, k);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (k + j < problem.K) dot += block.shared.read[k + j] * key.x[j];
        }
      }
#pragma unroll
      for (int mask = 4; mask > 0; mask /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, mask);
      if (threadIdx.x % 8 == 0 && i < count) {
        block.shared.weight[i] = dot * Decay<T>(sums, count - 1, i);
      }
    }
    __syncthreads();
    const T decay = Exp<T>(sums[count - 1]);
    for (int k = threadIdx.x; k < problem.K; k += kStepThreads) block.shared.read[k] *= decay;
  }

  template <typename T>
  __device__ static void PrepareAdvance(const StepBlock<T>& block) {
    block.RingSums(kChunk);
  }

  template <typename T>
  __device__ static void Advance(const StepBlock<T>& block, bool write) {
    const Problem& problem = block.problem;
    const double* sums = block.shared.sums;
    const T decay = Exp<T>(sums[kChunk - 1]);
    for (int k = block.lane(); k < problem.K; k += block.lanes()) {
      block.tile[k * block.columns + block.column()] *= decay;
    }
    if (!write || !block.owns_column()) return;
    for (int i = 0; i < kChunk; ++i) {
      const std::int64_t s = block.RowOf(block.base + i);
      const T value = Decay<T>(sums, kChunk - 1, i) *
                      LoadToken<T>(problem.v, block.span, s, block.head, block.v0 + block.column());
      for (int k = block.lane(); k < problem.K; k += block.lanes()) {
        block.tile[k * block.columns + block.column()] +=
            value * LoadToken<T>(problem.k, block.span, s, block.group, k);
      }
    }
  }
};

}  // namespace

template <typename T>
void ScalarStep(const Inputs& inputs, const TensorView& o, const Context& context) {
  LaunchStep<ScalarGateStep, T>(inputs, o, context);
}
template void ScalarStep<float>(const Inputs&, const TensorView&, const Context&);
template void ScalarStep<double>(const Inputs&, const TensorView&, const Context&);

}  // namespace fenwick::cuda::general
