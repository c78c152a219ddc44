// The Hopper kernels of the scalar gate as the dispatch (backend.cc) sees them: what shapes they
// cover, what workspace they want, and the two entry points. `Fits` is pure host code and says no
// for everything outside the tiles; the general kernels then run the call.
#pragma once

#include <cstddef>

#include "cuda/select.h"
#include "fenwick/ops.h"

namespace fenwick::cuda::hopper {

bool ForwardFits(const Inputs& inputs, const StateView& final_state, const DeviceTraits& device);
std::size_t ForwardWorkspaceBytes(const Inputs& inputs, const StateView& final_state,
                                  const DeviceTraits& device);
void Forward(const Inputs& inputs, const TensorView& o, const StateView& final_state,
             const Context& context, const DeviceTraits& device);

bool BackwardFits(const Inputs& inputs, const StateGradView& d_final_state,
                  const Gradients& gradients, const DeviceTraits& device);
std::size_t BackwardWorkspaceBytes(const Inputs& inputs, const StateGradView& d_final_state,
                                   const Gradients& gradients, const DeviceTraits& device);
void Backward(const Inputs& inputs, const TensorView& d_o, const StateGradView& d_final_state,
              const Gradients& gradients, const Context& context, const DeviceTraits& device);

// Workspace that later calls of the process aim at before they run heads in groups; 0: the default.
// For tests that want several groups at small sizes.
void AimWorkspaceAt(std::size_t bytes);

}  // namespace fenwick::cuda::hopper
