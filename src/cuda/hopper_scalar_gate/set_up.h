// The forward's parameters, which the backward starts from as well.
#pragma once

#include <cuda_runtime.h>

#include "cuda/hopper_scalar_gate/params.h"
#include "cuda/hopper_scalar_gate/plan.h"
#include "cuda/select.h"

namespace fenwick::cuda::hopper {

// The instructions of sm_90a exist on no other device, newer ones included.
inline bool IsHopper(const DeviceTraits& device) { return device.major == 9 && device.minor == 0; }

// Everything but the output and the head group; copies a packed batch's tables to the workspace.
ForwardParams SetUpForward(const ForwardPlan& plan, const ForwardWorkspace& places,
                           const Inputs& inputs, char* workspace, cudaStream_t stream);

}  // namespace fenwick::cuda::hopper
