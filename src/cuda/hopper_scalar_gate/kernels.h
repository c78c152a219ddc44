// The passes of the forward, instantiated one storage type (and key size) a file.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "cuda/hopper_scalar_gate/params.h"
#include "fenwick/tensor_view.h"

namespace fenwick::cuda::hopper {

struct ForwardMaps {
  CUtensorMap q, k, v, o;  // o is unused where ForwardParams::o_mapped is false
  CUtensorMap scales;      // unused where ForwardParams::scales_tile_heads is 0
};

// Passes 0, 1, 1b and 1c. scales: type of level_scales.
template <typename Element>
void LaunchStates(const ForwardParams& params, DType scales, const ForwardMaps& maps,
                  cudaStream_t stream);

// Pass 2.
template <typename Element, int kKeySize>
void LaunchOutput(const ForwardParams& params, const ForwardMaps& maps, cudaStream_t stream);

}  // namespace fenwick::cuda::hopper
