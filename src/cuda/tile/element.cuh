// 16-bit storage types of matrix operands and their packed arithmetic.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/ptx/math.cuh"

namespace fenwick::cuda {

struct BFloat16 {
  using Storage = __nv_bfloat16;
  static constexpr bool kIsBFloat16 = true;
  static __device__ __forceinline__ std::uint32_t Pack(float low, float high) {
    return ptx::PackBF16(low, high);
  }
  static __device__ __forceinline__ float Low(std::uint32_t pair) {
    return __uint_as_float(pair << 16);
  }
  static __device__ __forceinline__ float High(std::uint32_t pair) {
    return __uint_as_float(pair & 0xffff0000u);
  }
  static __device__ __forceinline__ std::uint32_t Multiply(std::uint32_t a, std::uint32_t b) {
    return ptx::MultiplyBF16x2(a, b);
  }
  static __device__ __forceinline__ std::uint32_t FromBF16(std::uint32_t pair) { return pair; }
};

struct Float16 {
  using Storage = __half;
  static constexpr bool kIsBFloat16 = false;
  static __device__ __forceinline__ std::uint32_t Pack(float low, float high) {
    return ptx::PackF16(low, high);
  }
  static __device__ __forceinline__ float Low(std::uint32_t pair) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(pair)));
  }
  static __device__ __forceinline__ float High(std::uint32_t pair) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16)));
  }
  static __device__ __forceinline__ std::uint32_t Multiply(std::uint32_t a, std::uint32_t b) {
    return ptx::MultiplyF16x2(a, b);
  }
  static __device__ __forceinline__ std::uint32_t FromBF16(std::uint32_t pair) {
    return Pack(BFloat16::Low(pair), BFloat16::High(pair));
  }
};

__device__ __forceinline__ float ToFloat(float x) { return x; }
__device__ __forceinline__ float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float ToFloat(__half x) { return __half2float(x); }

}  // namespace fenwick::cuda
