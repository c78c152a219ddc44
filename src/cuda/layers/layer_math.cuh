// Pieces that the layers share.
#pragma once

#include <cmath>

#include "cuda/general/elements.cuh"
#include "cuda/launch.h"

namespace fenwick::cuda {

using general::LoadElement;
using general::StoreElement;

inline constexpr int kLayerThreads = 256;

template <typename T>
__device__ inline T Sigmoid(T x) {
  if constexpr (sizeof(T) == 8) {
    return T(1) / (T(1) + exp(-x));
  } else {
    return T(1) / (T(1) + expf(-x));
  }
}
template <typename T>
__device__ inline T Silu(T x) {
  return x * Sigmoid(x);
}
// d silu(x) / dx.
template <typename T>
__device__ inline T SiluSlope(T x) {
  const T s = Sigmoid(x);
  return s * (T(1) + x * (T(1) - s));
}

// out[j * out_stride] = sum over parts of partial[part][j], in a fixed order; block = 32 columns,
// 8 threads a column.
template <typename T>
__global__ void __launch_bounds__(kLayerThreads)
    SumParts(const T* partial, std::int64_t parts, std::int64_t columns, void* out, DType dtype,
             std::int64_t out_stride, std::int64_t partial_stride) {
  __shared__ T sums[kLayerThreads];
  const int column = threadIdx.x % 32, lane = threadIdx.x / 32;
  const std::int64_t j = static_cast<std::int64_t>(blockIdx.x) * 32 + column;
  T sum = 0;
  if (j < columns) {
    for (std::int64_t part = lane; part < parts; part += kLayerThreads / 32) {
      sum += partial[part * partial_stride + j];
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (lane != 0 || j >= columns) return;
  for (int i = 1; i < kLayerThreads / 32; ++i) sum += sums[i * 32 + column];
  StoreElement<T>(out, dtype, j * out_stride, sum);
}

}  // namespace fenwick::cuda
