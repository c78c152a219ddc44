// Host side of a decoding step: one launch.
#pragma once

#include "cuda/general/call.h"
#include "cuda/general/step.cuh"
#include "cuda/launch.h"

namespace fenwick::cuda::general {

// About one for each multiprocessor of a large GPU. Fewer and wider blocks repeat less of what
// precedes the nodes.
inline constexpr std::int64_t kEnoughBlocks = 132;

inline StepTensor MakeStepTensor(const TensorView& call, const TensorView& ring) {
  StepTensor tensor;
  if (!call.given()) return tensor;
  const std::int64_t bytes = ElementSize(call.dtype);
  tensor.call = static_cast<const char*>(call.data);
  tensor.dtype = call.dtype;
  tensor.row_bytes = static_cast<int>((call.rank == 4 ? call.size(3) : 1) * bytes);
  tensor.batch_stride = call.stride(0) * bytes;
  tensor.token_stride = call.stride(1) * bytes;
  tensor.head_stride = call.stride(2) * bytes;
  if (ring.given()) {
    tensor.ring = static_cast<char*>(ring.data);
    tensor.ring_token_stride = ring.stride(1) * bytes;
  }
  return tensor;
}

template <typename Transition, typename Access, int kTiles>
void LaunchStepBlocks(const StepProblem& problem, cudaStream_t stream) {
  using T = typename Access::Scalar;
  constexpr int kColumns = kTiles * kTileColumns<T>;
  const std::int64_t blocks =
      problem.sequences * problem.H * ((problem.V + kColumns - 1) / kColumns);
  Launch("step", StepTokens<Transition, Access, kTiles>, blocks, kStepThreads,
         ScratchBytes<Transition, Access, kTiles>(problem.K), stream, problem);
}

template <typename Transition, typename Storage>
void LaunchWideStep(const StepProblem& problem, cudaStream_t stream) {
  const auto pays = [&](int tiles) {
    const int columns = tiles * kTileColumns<float>;
    const std::int64_t blocks =
        problem.sequences * problem.H * ((problem.V + columns - 1) / columns);
    return columns / 2 < problem.V && blocks >= kEnoughBlocks;
  };
  if (pays(4)) {
    LaunchStepBlocks<Transition, WideRows<Storage>, 4>(problem, stream);
  } else if (pays(2)) {
    LaunchStepBlocks<Transition, WideRows<Storage>, 2>(problem, stream);
  } else {
    LaunchStepBlocks<Transition, WideRows<Storage>, 1>(problem, stream);
  }
}

template <typename Transition, typename T>
void LaunchStep(const Inputs& inputs, const TensorView& o, const Context& context) {
  const Plan plan = MakePlan(inputs);
  const StateView& state = inputs.initial_state;
  const TensorView none;
  StepProblem problem;
  problem.q = MakeStepTensor(inputs.q, none);
  problem.k = MakeStepTensor(inputs.k, state.k);
  problem.v = MakeStepTensor(inputs.v, state.v);
  problem.o = MakeStepTensor(o, none);
  problem.g = MakeStepTensor(inputs.g, state.g);
  problem.beta = MakeStepTensor(inputs.beta, state.beta);
  problem.level_scales = MakeStepTensor(inputs.level_scales, none);
  problem.nodes = state.nodes.data;
  problem.position = static_cast<std::int64_t*>(state.position.data);
  problem.base = static_cast<std::int64_t*>(state.base.data);
  problem.slots = plan.initial_slots;
  problem.top_slot =
      inputs.level_policy == LevelPolicy::kSaturate ? TopSlot(static_cast<int>(plan.L)) : kNoTop;
  problem.sequences = plan.N;
  problem.tokens = plan.tokens;
  problem.K = static_cast<int>(plan.K);
  problem.V = static_cast<int>(plan.V);
  problem.L = static_cast<int>(plan.L);
  problem.H = static_cast<int>(plan.H);
  problem.heads_per_group = static_cast<int>(plan.heads_per_group());
  problem.scale = inputs.scale;
  const auto stream = static_cast<cudaStream_t>(context.stream);
  if constexpr (sizeof(T) == 4) {
    const bool wide = MakeRows(inputs.q).quads && MakeRows(inputs.k).quads &&
                      MakeRows(inputs.v).quads && MakeRows(state.k).quads &&
                      MakeRows(state.v).quads &&
                      reinterpret_cast<std::uintptr_t>(state.nodes.data) % 16 == 0;
    if (wide) {
      switch (inputs.q.dtype) {
        case DType::kBFloat16: return LaunchWideStep<Transition, __nv_bfloat16>(problem, stream);
        case DType::kFloat16: return LaunchWideStep<Transition, __half>(problem, stream);
        default: return LaunchWideStep<Transition, float>(problem, stream);
      }
    }
  }
  LaunchStepBlocks<Transition, AnyRows<T>, 1>(problem, stream);
}

}  // namespace fenwick::cuda::general
