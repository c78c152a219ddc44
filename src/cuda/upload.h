// Tables from host memory to a device.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <vector>

namespace fenwick::cuda {

// Copies `bytes`, a multiple of 4, in the parameters of kernels: unlike cudaMemcpyAsync from
// pageable memory it never synchronises, and a graph that captures it holds the values, not the
// address of memory that is long gone. For tables of some kilobytes: one launch for every 3.5.
void Upload(void* to, const void* from, std::size_t bytes, cudaStream_t stream);
template <typename T>
void Upload(const std::vector<T>& from, T* to, cudaStream_t stream) {
  Upload(to, from.data(), from.size() * sizeof(T), stream);
}

}  // namespace fenwick::cuda
