// The CUDA backend table: picks a kernel family (select.h) and calls it.
#include "core/backend.h"

#include <cuda_runtime.h>

#include "cuda/device.h"
#include "cuda/general.h"
#include "cuda/hopper.h"
#include "cuda/select.h"

namespace fenwick {
namespace cuda {
namespace {

void Forward(const Inputs& inputs, const TensorView& o, const StateView& final_state,
             const Context& context) {
  const DeviceTraits& device = CurrentDevice();
  if (SelectForward(inputs, final_state, device, ForcedKernels()) == Kernels::kHopper) {
    hopper::Forward(inputs, o, final_state, context, device);
  } else {
    general::Forward(inputs, o, final_state, context);
  }
}

std::size_t ForwardWorkspaceBytes(const Inputs& inputs, const StateView& final_state) {
  const DeviceTraits& device = CurrentDevice();
  if (SelectForward(inputs, final_state, device, ForcedKernels()) == Kernels::kHopper) {
    return hopper::ForwardWorkspaceBytes(inputs, final_state, device);
  }
  return general::ForwardWorkspaceBytes(inputs, final_state);
}

void Backward(const Inputs& inputs, const TensorView& d_o, const StateGradView& d_final_state,
              const Gradients& gradients, const Context& context) {
  const DeviceTraits& device = CurrentDevice();
  if (SelectBackward(inputs, d_final_state, gradients, device, ForcedKernels()) ==
      Kernels::kHopper) {
    hopper::Backward(inputs, d_o, d_final_state, gradients, context, device);
  } else {
    general::Backward(inputs, d_o, d_final_state, gradients, context);
  }
}

std::size_t BackwardWorkspaceBytes(const Inputs& inputs, const StateGradView& d_final_state,
                                   const Gradients& gradients) {
  const DeviceTraits& device = CurrentDevice();
  if (SelectBackward(inputs, d_final_state, gradients, device, ForcedKernels()) ==
      Kernels::kHopper) {
    return hopper::BackwardWorkspaceBytes(inputs, d_final_state, gradients, device);
  }
  return general::BackwardWorkspaceBytes(inputs, d_final_state, gradients);
}

constexpr Backend kBackend = {Forward, Backward, general::Step, ForwardWorkspaceBytes,
                              BackwardWorkspaceBytes};

}  // namespace
}  // namespace cuda

const Backend* CudaBackend() { return cuda::AnyUsableDevice() ? &cuda::kBackend : nullptr; }

}  // namespace fenwick
