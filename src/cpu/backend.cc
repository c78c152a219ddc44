// The CPU backend: one kernel family for each transition.
#include "core/backend.h"

#include "cpu/cpu_backend.h"
#include "cpu/gated_delta/gated_delta.h"
#include "cpu/scalar_gate/scalar_gate.h"
#include "cpu/step.h"

namespace fenwick {

void ForwardCpu(const Inputs& inputs, const TensorView& o, const StateView& final_state,
                const Context& context) {
  if (inputs.transition == Transition::kGatedDelta) {
    cpu::GatedDeltaForward(inputs, o, final_state, context);
  } else {
    cpu::ScalarGateForward(inputs, o, final_state, context);
  }
}

void BackwardCpu(const Inputs& inputs, const TensorView& d_o, const StateGradView& d_final_state,
                 const Gradients& gradients, const Context& context) {
  if (inputs.transition == Transition::kGatedDelta) {
    cpu::GatedDeltaBackward(inputs, d_o, d_final_state, gradients, context);
  } else {
    cpu::ScalarGateBackward(inputs, d_o, d_final_state, gradients, context);
  }
}

void StepCpu(const Inputs& inputs, const TensorView& o, const Context& context) {
  cpu::Step(inputs, o, context);
}

std::size_t ForwardCpuWorkspaceBytes(const Inputs& inputs, const StateView& final_state) {
  return 0;
}

std::size_t BackwardCpuWorkspaceBytes(const Inputs& inputs, const StateGradView& d_final_state,
                                      const Gradients& gradients) {
  return 0;
}

const Backend& CpuBackend() {
  static constexpr Backend kBackend = {ForwardCpu, BackwardCpu, StepCpu, ForwardCpuWorkspaceBytes,
                                       BackwardCpuWorkspaceBytes};
  return kBackend;
}

}  // namespace fenwick
