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

template <typename T>
__device__ inline T LoadElement(const void* data, DType dtype, std::int64_t i) {
  T value;
  WithStorage<T>(dtype,
                 [&](auto zero) { value = Widen<T>(static_cast<const decltype(zero)*>(data)[i]); });
  return value;
}

template <typename T>
__device__ inline void StoreElement(void* data, DType dtype, std::int64_t i, T value) {
  WithStorage<T>(dtype, [&](auto zero) {
    using S = decltype(zero);
    static_cast<S*>(data)[i] = Narrow<S>(value);
  });
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
