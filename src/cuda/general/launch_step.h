// Host side of a decoding step: one launch.
#pragma once

#include "cuda/general/call.h"
#include "cuda/general/step.cuh"
#include "cuda/launch.h"

namespace fenwick::cuda::general {

template <typename Transition, typename T>
void LaunchStep(const Inputs& inputs, const TensorView& o, const Context& context) {
  const Plan plan = MakePlan(inputs);
  const StateView& view = inputs.initial_state;
  const Problem problem = MakeProblem(inputs, plan, Tables());
  StepState state;
  state.k = MakeRows(view.k);
  state.v = MakeRows(view.v);
  state.g = MakeRows(view.g);
  state.beta = MakeRows(view.beta);
  state.nodes = view.nodes.data;
  state.slots = plan.initial_slots;
  state.position = static_cast<std::int64_t*>(view.position.data);
  state.base = static_cast<std::int64_t*>(view.base.data);
  const int columns = StepColumns(plan.N, problem);
  const std::int64_t blocks = plan.N * plan.H * ((plan.V + columns - 1) / columns);
  Launch("step", StepTokens<Transition, T>, blocks, kStepThreads,
         problem.K * kFoldColumns * sizeof(T), static_cast<cudaStream_t>(context.stream), problem,
         state, MakeRows(o), columns);
}

}  // namespace fenwick::cuda::general
