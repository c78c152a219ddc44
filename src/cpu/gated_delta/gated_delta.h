// The log-linear gated delta rule on the CPU: see docs/mathematics.md for the
// chunk form and its derivative.
#pragma once

#include "fenwick/ops.h"

namespace fenwick::cpu {

void GatedDeltaForward(const Inputs& inputs, const TensorView& o, const StateView& final_state,
                       const Context& context);
void GatedDeltaBackward(const Inputs& inputs, const TensorView& d_o,
                        const StateGradView& d_final_state, const Gradients& gradients,
                        const Context& context);

}  // namespace fenwick::cpu
