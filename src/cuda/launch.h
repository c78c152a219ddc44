// Launching and checking. Nothing here synchronises.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "fenwick/error.h"

namespace fenwick::cuda {

inline void Check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw Error(std::string("CUDA: ") + what + ": " + cudaGetErrorString(status));
}

#if defined(FENWICK_EMULATE)
// tests/cuda/emulator: the same launches on the host.
template <typename... Parameters, typename... Arguments>
void Launch(const char* /*name*/, void (*kernel)(Parameters...), std::int64_t blocks, int threads,
            std::size_t shared_bytes, cudaStream_t /*stream*/, Arguments&&... arguments) {
  emulator::Run(blocks, threads, shared_bytes, [&] { kernel(Parameters(arguments)...); });
}

template <typename... Parameters, typename... Arguments>
void LaunchDependent(const char* name, void (*kernel)(Parameters...), std::int64_t blocks,
                     int threads, std::size_t shared_bytes, cudaStream_t stream,
                     Arguments&&... arguments) {
  Launch(name, kernel, blocks, threads, shared_bytes, stream,
         std::forward<Arguments>(arguments)...);
}

inline void ZeroAsync(void* data, std::size_t bytes, cudaStream_t /*stream*/) {
  if (bytes > 0) std::memset(data, 0, bytes);
}
#else
// Launches `kernel` on a one-dimensional grid (x is the only axis without the 65,535 limit).
// No blocks: nothing to do. dependent: blocks may start before the stream's previous kernel ends.
template <typename... Parameters, typename... Arguments>
void LaunchGrid(bool dependent, const char* name, void (*kernel)(Parameters...),
                std::int64_t blocks, int threads, std::size_t shared_bytes, cudaStream_t stream,
                Arguments&&... arguments) {
  if (blocks == 0) return;
  if (blocks > 0x7fffffff) {
    throw Error(std::string(name) + ": expected at most 2^31 - 1 blocks, got " +
                std::to_string(blocks) + "; split the call");
  }
  // 48 KB need no asking, static shared memory (below 20 KB in every kernel) included.
  constexpr std::size_t kDefaultSharedBytes = 28 << 10;
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
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  if (dependent) {
    config.attrs = &overlap;
    config.numAttrs = 1;
  }
  Check(cudaLaunchKernelEx(&config, kernel, Parameters(std::forward<Arguments>(arguments))...),
        name);
}

template <typename... Parameters, typename... Arguments>
void Launch(const char* name, void (*kernel)(Parameters...), std::int64_t blocks, int threads,
            std::size_t shared_bytes, cudaStream_t stream, Arguments&&... arguments) {
  LaunchGrid(false, name, kernel, blocks, threads, shared_bytes, stream,
             std::forward<Arguments>(arguments)...);
}

// Programmatic dependent launch (sm_90): the kernel must execute griddepcontrol.wait before it
// touches memory that an earlier kernel of the stream reads or writes.
template <typename... Parameters, typename... Arguments>
void LaunchDependent(const char* name, void (*kernel)(Parameters...), std::int64_t blocks,
                     int threads, std::size_t shared_bytes, cudaStream_t stream,
                     Arguments&&... arguments) {
  LaunchGrid(true, name, kernel, blocks, threads, shared_bytes, stream,
             std::forward<Arguments>(arguments)...);
}

inline void ZeroAsync(void* data, std::size_t bytes, cudaStream_t stream) {
  if (bytes > 0) Check(cudaMemsetAsync(data, 0, bytes, stream), "cudaMemsetAsync");
}
#endif

}  // namespace fenwick::cuda
