// Elements in memory (any storage type) <-> numbers in registers (float, or double for float64
// storage). The storage type is a run-time value, the same for a whole launch: kernels are compiled
// per arithmetic, not per storage type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "fenwick/tensor_view.h"

#if defined(FENWICK_EMULATE)
#define FENWICK_NOINLINE
#else
#define FENWICK_NOINLINE __noinline__
#endif

namespace fenwick::cuda::general {

template <typename T>
struct alignas(4 * sizeof(T)) Quad {
  T x[4];
};

template <typename T>
__device__ inline T LoadElement(const void* data, DType dtype, std::int64_t i) {
  if constexpr (sizeof(T) == 8) {
    return static_cast<const double*>(data)[i];
  } else {
    switch (dtype) {
      case DType::kBFloat16: return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
      case DType::kFloat16: return __half2float(static_cast<const __half*>(data)[i]);
      default: return static_cast<const float*>(data)[i];
    }
  }
}

template <typename T>
__device__ inline void StoreElement(void* data, DType dtype, std::int64_t i, T value) {
  if constexpr (sizeof(T) == 8) {
    static_cast<double*>(data)[i] = value;
  } else {
    switch (dtype) {
      case DType::kBFloat16:
        static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(value);
        break;
      case DType::kFloat16: static_cast<__half*>(data)[i] = __float2half_rn(value); break;
      default: static_cast<float*>(data)[i] = value;
    }
  }
}

// Elements i .. i+3, of which the first `count` exist (the rest read as zero), one by one. Out of
// line: it runs at ragged edges only, and inlined everywhere it would be most of the code.
template <typename T>
__device__ FENWICK_NOINLINE Quad<T> LoadQuadSlowly(const void* data, DType dtype, std::int64_t i,
                                                   int count) {
  Quad<T> quad{};
  for (int j = 0; j < 4 && j < count; ++j) quad.x[j] = LoadElement<T>(data, dtype, i + j);
  return quad;
}

// The same; `aligned` says that i and the tensor allow one wide access where count >= 4.
template <typename T>
__device__ inline Quad<T> LoadQuad(const void* data, DType dtype, std::int64_t i, int count,
                                   bool aligned) {
  if (count <= 0) return Quad<T>{};
  if (!aligned || count < 4) return LoadQuadSlowly<T>(data, dtype, i, count);
  Quad<T> quad;
  if constexpr (sizeof(T) == 8) {
    const double2* from = reinterpret_cast<const double2*>(static_cast<const double*>(data) + i);
    const double2 a = from[0], b = from[1];
    quad.x[0] = a.x, quad.x[1] = a.y, quad.x[2] = b.x, quad.x[3] = b.y;
  } else if (dtype == DType::kFloat32) {
    const float4 a = *reinterpret_cast<const float4*>(static_cast<const float*>(data) + i);
    quad.x[0] = a.x, quad.x[1] = a.y, quad.x[2] = a.z, quad.x[3] = a.w;
  } else {
    const uint2 bits = *reinterpret_cast<const uint2*>(static_cast<const std::uint16_t*>(data) + i);
    const std::uint16_t raw[4] = {
        static_cast<std::uint16_t>(bits.x), static_cast<std::uint16_t>(bits.x >> 16),
        static_cast<std::uint16_t>(bits.y), static_cast<std::uint16_t>(bits.y >> 16)};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (dtype == DType::kBFloat16) {
        __nv_bfloat16_raw value;
        value.x = raw[j];
        quad.x[j] = __bfloat162float(__nv_bfloat16(value));
      } else {
        __half_raw value;
        value.x = raw[j];
        quad.x[j] = __half2float(__half(value));
      }
    }
  }
  return quad;
}

// Calls f(S()) with the storage type S of `dtype`: what f reads or writes through S* has no branch
// inside, so that its loads are in flight together.
template <typename T, typename F>
__device__ inline void WithStorage(DType dtype, F&& f) {
  if constexpr (sizeof(T) == 8) {
    f(double());
  } else {
    switch (dtype) {
      case DType::kBFloat16: return f(__nv_bfloat16());
      case DType::kFloat16: return f(__half());
      default: return f(float());
    }
  }
}

template <typename T, typename S>
__device__ inline T Widen(S x) {
  if constexpr (std::is_same_v<S, __nv_bfloat16>) {
    return __bfloat162float(x);
  } else if constexpr (std::is_same_v<S, __half>) {
    return __half2float(x);
  } else {
    return x;
  }
}

template <typename S, typename T>
__device__ inline S Narrow(T x) {
  if constexpr (std::is_same_v<S, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else if constexpr (std::is_same_v<S, __half>) {
    return __float2half_rn(x);
  } else {
    return x;
  }
}

// Bytes of an element.
__device__ inline int Width(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

// Four consecutive elements as they lie in memory; 16-bit ones fill half of it.
template <typename T>
struct alignas(4 * sizeof(T)) RawQuad {
  unsigned words[sizeof(T)];
};

// Aligned to four elements.
template <typename T>
__device__ inline RawQuad<T> LoadRawQuad(const void* from, bool half_width) {
  if constexpr (sizeof(T) == 4) {
    if (half_width) {
      const uint2 bits = *static_cast<const uint2*>(from);
      return {bits.x, bits.y, 0, 0};
    }
  }
  return *static_cast<const RawQuad<T>*>(from);
}

template <typename T>
__device__ inline RawQuad<T> Raw(const Quad<T>& quad, DType dtype) {
  RawQuad<T> raw{};
  WithStorage<T>(dtype, [&](auto zero) {
    using S = decltype(zero);
    S x[4];
    for (int j = 0; j < 4; ++j) x[j] = Narrow<S>(quad.x[j]);
    memcpy(static_cast<void*>(&raw), x, sizeof(x));
  });
  return raw;
}

template <typename T>
__device__ inline Quad<T> Widen(const RawQuad<T>& raw, DType dtype) {
  Quad<T> quad;
  WithStorage<T>(dtype, [&](auto zero) {
    decltype(zero) x[4];
    memcpy(static_cast<void*>(x), &raw, sizeof(x));
#pragma unroll
    for (int j = 0; j < 4; ++j) quad.x[j] = Widen<T>(x[j]);
  });
  return quad;
}

}  // namespace fenwick::cuda::general
