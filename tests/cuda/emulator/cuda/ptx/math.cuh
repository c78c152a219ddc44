// src/cuda/ptx/math.cuh for the emulator.
#pragma once

#include "emulator.h"

namespace fenwick::cuda::ptx {

inline float Exp2(float x) {
  const float y = std::exp2(x);
  return y < std::numeric_limits<float>::min() ? 0.f : y;
}

inline std::uint32_t PackBF16(float low, float high) {
  return std::bit_cast<std::uint16_t>(__float2bfloat16(low)) |
         std::uint32_t{std::bit_cast<std::uint16_t>(__float2bfloat16(high))} << 16;
}
inline std::uint32_t PackF16(float low, float high) {
  return std::bit_cast<std::uint16_t>(__float2half(low)) |
         std::uint32_t{std::bit_cast<std::uint16_t>(__float2half(high))} << 16;
}

// A product of two 16-bit numbers is exact in float32.
inline std::uint32_t MultiplyBF16x2(std::uint32_t a, std::uint32_t b) {
  const auto wide = [](std::uint32_t bits) { return std::bit_cast<float>(bits); };
  return PackBF16(wide(a << 16) * wide(b << 16), wide(a & 0xffff0000u) * wide(b & 0xffff0000u));
}
inline std::uint32_t MultiplyF16x2(std::uint32_t a, std::uint32_t b) {
  const auto wide = [](std::uint32_t bits) {
    return __half2float(std::bit_cast<__half>(static_cast<std::uint16_t>(bits)));
  };
  return PackF16(wide(a) * wide(b), wide(a >> 16) * wide(b >> 16));
}

}  // namespace fenwick::cuda::ptx
