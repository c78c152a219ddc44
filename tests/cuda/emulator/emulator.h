// Runs CUDA kernels on the host, one block after another, each thread a fiber: the general kernels
// are tested without a GPU. A source compiled as C++ with this header included first and
// FENWICK_EMULATE defined launches its kernels here (src/cuda/launch.h). Only what the general
// kernels use is there. Within a block, each thread runs from barrier to barrier in one go, in an
// order that is drawn anew for every turn: a missing barrier shows as a wrong or changing result.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#undef __shared__
#define __shared__ static
#undef __launch_bounds__
#define __launch_bounds__(...)

inline uint3 threadIdx;  // of the fiber that runs
inline uint3 blockIdx;
inline dim3 blockDim;
inline dim3 gridDim;

namespace emulator {

void SyncThreads();
void SyncWarp();
// Every lane of the warp gives `value`; returns what lane `source` gave.
std::uint64_t Exchange(std::uint64_t value, int source);
unsigned char* SharedMemory();
void Run(std::int64_t blocks, int threads, std::size_t shared_bytes,
         const std::function<void()>& body);

template <typename T>
T ShuffleFrom(T value, int source) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t));
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = Exchange(bits, source);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

inline int Lane() { return static_cast<int>(threadIdx.x % 32); }

float RoundTf32(float value);
// mma.m16n8k8 on the fragments of the warp's lanes.
void MmaTf32(float* c, const float* a, const float* b);

}  // namespace emulator

inline void __syncthreads() { emulator::SyncThreads(); }
inline void __syncwarp(unsigned = 0xffffffffu) { emulator::SyncWarp(); }
inline void __threadfence() {}

template <typename T>
T __shfl_sync(unsigned, T value, int source) {
  return emulator::ShuffleFrom(value, source);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulator::ShuffleFrom(value, emulator::Lane() ^ mask);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int delta) {
  const int lane = emulator::Lane();
  return emulator::ShuffleFrom(value, lane >= delta ? lane - delta : lane);
}
inline unsigned atomicAdd(unsigned* address, unsigned value) {
  const unsigned old = *address;
  *address += value;
  return old;
}
template <typename T>
T __ldg(const T* address) {
  return *address;
}
template <typename T>
T __ldcs(const T* address) {
  return *address;
}
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
