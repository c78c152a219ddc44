// Log-linear attention with a scalar gate on the CPU.
#pragma once

#include "fenwick/ops.h"

namespace fenwick::cpu {

void ScalarGateForward(const Inputs& inputs, const TensorView& o, const StateView& final_state,
                       const Context& context);
void ScalarGateBackward(const Inputs& inputs, const TensorView& d_o,
                        const StateGradView& d_final_state, const Gradients& gradients,
                        const Context& context);

}  // namespace fenwick::cpu
