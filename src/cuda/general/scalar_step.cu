// Scalar gate, decoding: weight[s] = scale q[t] k[s], read = scale q[t].
#include "cuda/general/entries.h"
#include "cuda/general/launch_step.h"
#include "cuda/general/step.cuh"

namespace fenwick::cuda::general {
namespace {

struct ScalarGateStep {
  static constexpr bool kErases = false;
  static constexpr bool kReadDecays = false;
  __device__ static int DecaysUpTo(int /*i*/, int count) { return count - 1; }

  template <typename Access, typename T>
  __device__ static void Prepare(const StepBlock<T>& /*block*/, int /*first*/, int /*count*/) {}

  // Eight threads a token.
  template <typename Access, typename T>
  __device__ static void Read(const StepBlock<T>& block, int count, int /*prepared*/) {
    const StepProblem& problem = block.problem;
    constexpr int kTokens = kStepThreads / 8, kPasses = kStateRing / kTokens;
    const T scale = static_cast<T>(problem.scale);
    const char* query = block.Query(count);
    const int first = threadIdx.x / 8;
    T dots[kPasses] = {};
#pragma unroll 4
    for (int k = threadIdx.x % 8 * 4; k < problem.K; k += 32) {
      const Quad<T> q = Access::Expand(Access::Load(query, block.dtype(), k, problem.K));
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int i = first + pass * kTokens;
        const auto key = Access::Load(block.shared.key[i], block.dtype(), k, problem.K);
        dots[pass] = Dot(q, Access::Expand(key), dots[pass]);
      }
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int mask = 4; mask > 0; mask /= 2) {
        dots[pass] += __shfl_xor_sync(0xffffffffu, dots[pass], mask);
      }
      if (threadIdx.x % 8 == 0) block.shared.weight[first + pass * kTokens] = scale * dots[pass];
    }
    for (int k = threadIdx.x; k < problem.K; k += kStepThreads) {
      block.shared.read[k] = scale * LoadElement<T>(query, block.dtype(), k);
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
