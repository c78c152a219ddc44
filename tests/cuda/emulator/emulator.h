// Runs CUDA kernels on the host, one block after another, each thread a fiber: all kernels are
// tested without a GPU. A source compiled as C++ with this header included first and
// FENWICK_EMULATE defined launches its kernels here (src/cuda/launch.h). Only what our kernels use
// is there; the headers in cuda/ptx, found before those of src, take the place of the ones that are
// written in PTX. Within a block, each thread runs from wait to wait in one go, in an order that is
// drawn anew for every turn: a missing barrier shows as a wrong or changing result.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <bit>
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

inline constexpr int kWarp = 32;

// Calls body() for every thread of every block.
void Run(std::int64_t blocks, int threads, std::size_t shared_bytes,
         const std::function<void()>& body);

// The calling thread goes on once ready() is true. Others run until then.
void WaitUntil(const std::function<bool()>& ready);
void SyncThreads();
void SyncWarp();
// Returns once `threads` threads of the block have called it with this id.
void NamedBarrier(int id, int threads);
// What every lane of the warp gives.
std::array<std::uint64_t, kWarp> Gather(std::uint64_t value);

unsigned Random();

// Calls operation() at some time from now on: between two turns of the block's threads.
void Later(std::function<void()> operation);

// Dynamic shared memory of the block; it starts at an address that is a multiple of 32 only.
unsigned char* SharedMemory();
// The same by 32-bit addresses: ends the program where they are outside of it or not aligned.
inline constexpr std::uint32_t kSharedStart = 544;
unsigned char* Shared(std::uint32_t address, std::uint32_t bytes, std::uint32_t alignment);

// Ends the program: a kernel did what no kernel may do.
[[noreturn]] void Fail(const char* what);

inline int Lane() { return static_cast<int>(threadIdx.x % kWarp); }
inline int Warp() { return static_cast<int>(threadIdx.x / kWarp); }

template <typename T>
T ShuffleFrom(T value, int source) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t));
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = Gather(bits)[source];
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

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
template <typename T>
T atomicAdd(T* address, T value) {
  const T old = *address;
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
template <typename T>
void __stcs(T* address, T value) {
  *address = value;
}
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __clz(int value) { return std::countl_zero(static_cast<unsigned>(value)); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline int min(int a, int b) { return std::min(a, b); }
inline int max(int a, int b) { return std::max(a, b); }

#include "hopper.h"
