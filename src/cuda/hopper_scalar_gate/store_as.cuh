// Rounding stores to the types of gradients.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace fenwick::cuda::hopper {

__device__ __forceinline__ void StoreAs(float* to, float x) { *to = x; }
__device__ __forceinline__ void StoreAs(__nv_bfloat16* to, float x) { *to = __float2bfloat16(x); }
__device__ __forceinline__ void StoreAs(__half* to, float x) { *to = __float2half(x); }

}  // namespace fenwick::cuda::hopper
