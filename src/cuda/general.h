// The general CUDA kernels as the dispatch (backend.cc) sees them: both operators, every shape and
// storage type.
#pragma once

#include <cstddef>

#include "fenwick/ops.h"

namespace fenwick::cuda::general {

std::size_t ForwardWorkspaceBytes(const Inputs& inputs, const StateView& final_state);
void Forward(const Inputs& inputs, const TensorView& o, const StateView& final_state,
             const Context& context);

std::size_t BackwardWorkspaceBytes(const Inputs& inputs, const StateGradView& d_final_state,
                                   const Gradients& gradients);
void Backward(const Inputs& inputs, const TensorView& d_o, const StateGradView& d_final_state,
              const Gradients& gradients, const Context& context);

void Step(const Inputs& inputs, const TensorView& o, const Context& context);

}  // namespace fenwick::cuda::general
