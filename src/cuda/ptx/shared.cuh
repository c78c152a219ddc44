// Dynamic shared memory, and accesses by 32-bit shared addresses (generic pointers held in structs
// cost registers).
#pragma once

#include <cstdint>

namespace fenwick::cuda::ptx {

// The block's dynamic shared memory: as many bytes as the launch asks for.
__device__ __forceinline__ unsigned char* DynamicShared() {
  extern __shared__ __align__(32) unsigned char fenwick_dynamic_shared[];
  return fenwick_dynamic_shared;
}
__device__ __forceinline__ std::uint32_t DynamicSharedAddress() {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(DynamicShared()));
}

__device__ __forceinline__ float LoadSharedF32(std::uint32_t shared) {
  float r;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(r) : "r"(shared));
  return r;
}

__device__ __forceinline__ float2 LoadSharedF32x2(std::uint32_t shared) {
  float2 r;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(r.x), "=f"(r.y) : "r"(shared));
  return r;
}

__device__ __forceinline__ std::uint32_t LoadSharedU32(std::uint32_t shared) {
  std::uint32_t r;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(shared));
  return r;
}

__device__ __forceinline__ uint4 LoadSharedU32x4(std::uint32_t shared) {
  uint4 r;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(shared));
  return r;
}

// One bfloat16, widened.
__device__ __forceinline__ float LoadSharedBF16(std::uint32_t shared) {
  std::uint16_t r;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(r) : "r"(shared));
  return __uint_as_float(static_cast<std::uint32_t>(r) << 16);
}

__device__ __forceinline__ void StoreSharedF32(std::uint32_t shared, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared), "f"(x) : "memory");
}

__device__ __forceinline__ void StoreSharedU32(std::uint32_t shared, std::uint32_t x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared), "r"(x) : "memory");
}

// One 16-bit element, in both halves of a register.
__device__ __forceinline__ std::uint32_t LoadSharedTwice16(std::uint32_t shared) {
  std::uint32_t r;
  asm volatile(
      "{\n"
      ".reg .b16 h;\n"
      "ld.shared.b16 h, [%1];\n"
      "mov.b32 %0, {h, h};\n"
      "}"
      : "=r"(r)
      : "r"(shared));
  return r;
}

// The low half of a register.
__device__ __forceinline__ void StoreSharedU16(std::uint32_t shared, std::uint32_t x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(shared), "h"(static_cast<std::uint16_t>(x))
               : "memory");
}

__device__ __forceinline__ void StoreSharedZero16(std::uint32_t shared) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(shared), "r"(0) : "memory");
}

}  // namespace fenwick::cuda::ptx
