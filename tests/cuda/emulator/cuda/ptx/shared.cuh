// src/cuda/ptx/shared.cuh for the emulator.
#pragma once

#include "emulator.h"

namespace fenwick::cuda::ptx {

inline unsigned char* DynamicShared() { return emulator::SharedMemory(); }
inline std::uint32_t DynamicSharedAddress() { return emulator::kSharedStart; }

template <typename T>
T LoadShared(std::uint32_t shared) {
  T x;
  std::memcpy(&x, emulator::Shared(shared, sizeof(T), sizeof(T)), sizeof(T));
  return x;
}
template <typename T>
void StoreShared(std::uint32_t shared, T x) {
  std::memcpy(emulator::Shared(shared, sizeof(T), sizeof(T)), &x, sizeof(T));
}

inline float LoadSharedF32(std::uint32_t shared) { return LoadShared<float>(shared); }
inline float2 LoadSharedF32x2(std::uint32_t shared) { return LoadShared<float2>(shared); }
inline std::uint32_t LoadSharedU32(std::uint32_t shared) {
  return LoadShared<std::uint32_t>(shared);
}
inline uint4 LoadSharedU32x4(std::uint32_t shared) { return LoadShared<uint4>(shared); }
inline float LoadSharedBF16(std::uint32_t shared) {
  return __bfloat162float(LoadShared<__nv_bfloat16>(shared));
}
inline std::uint32_t LoadSharedTwice16(std::uint32_t shared) {
  return LoadShared<std::uint16_t>(shared) * 0x10001u;
}
inline void StoreSharedF32(std::uint32_t shared, float x) { StoreShared(shared, x); }
inline void StoreSharedU32(std::uint32_t shared, std::uint32_t x) { StoreShared(shared, x); }
inline void StoreSharedU16(std::uint32_t shared, std::uint32_t x) {
  StoreShared(shared, static_cast<std::uint16_t>(x));
}
inline void StoreSharedZero16(std::uint32_t shared) { StoreShared(shared, uint4{}); }

}  // namespace fenwick::cuda::ptx
