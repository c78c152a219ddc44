// Entry points of the CPU kernels. Arguments are valid (core/validate.h) and there is something to
// do; kernels run on core/thread_pool.h.
#pragma once

#include <cstddef>

#include "fenwick/ops.h"

namespace fenwick {

void ForwardCpu(const Inputs& inputs, const TensorView& o, const StateView& final_state,
                const Context& context);
void BackwardCpu(const Inputs& inputs, const TensorView& d_o, const StateGradView& d_final_state,
                 const Gradients& gradients, const Context& context);
void StepCpu(const Inputs& inputs, const TensorView& o, const Context& context);
std::size_t ForwardCpuWorkspaceBytes(const Inputs& inputs, const StateView& final_state);
std::size_t BackwardCpuWorkspaceBytes(const Inputs& inputs, const StateGradView& d_final_state,
                                      const Gradients& gradients);

}  // namespace fenwick
