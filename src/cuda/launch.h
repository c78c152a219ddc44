// Launching and checking. Nothing here synchronises.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <utility>

#include "fenwick/error.h"

namespace fenwick::cuda {

inline void Check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw Error(std::string("CUDA: ") + what + ": " + cudaGetErrorString(status));
}

// Launches `kernel` on a one-dimensional grid (x is the only axis without the 65,535 limit).
// No blocks: nothing to do.
template <typename... Parameters, typename... Arguments>
void Launch(const char* name, void (*kernel)(Parameters...), std::int64_t blocks, int threads,
            std::size_t shared_bytes, cudaStream_t stream, Arguments&&... arguments) {
  if (blocks == 0) return;
  if (blocks > 0x7fffffff) {
    throw Error(std::string(name) + ": expected at most 2^31 - 1 blocks, got " +
                std::to_string(blocks) + "; split the call");
  }
  constexpr std::size_t kDefaultSharedBytes = 48 << 10;
  if (shared_bytes > kDefaultSharedBytes) {
    Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared_bytes)),
          name);
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  Check(cudaLaunchKernelEx(&config, kernel, Parameters(std::forward<Arguments>(arguments))...),
        name);
}

}  // namespace fenwick::cuda
