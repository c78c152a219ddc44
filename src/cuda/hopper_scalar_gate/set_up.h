// The forward's parameters, which the backward starts from as well.
#pragma once

#include <cuda_runtime.h>

#include "cuda/hopper_scalar_gate/params.h"
#include "cuda/hopper_scalar_gate/plan.h"

namespace fenwick::cuda::hopper {

// Everything but the output and the head group; copies a packed batch's tables to the workspace.
ForwardParams SetUpForward(const ForwardPlan& plan, const ForwardWorkspace& places,
                           const Inputs& inputs, char* workspace, cudaStream_t stream);

}  // namespace fenwick::cuda::hopper
