// How a decoding step reads and writes rows in memory, four neighbouring elements at a time: in one
// access (WideRows), or one by one (AnyRows) where rows or widths are no multiples of four
// elements. WideRows is compiled for each storage type: a choice at run time between two loads
// would keep them from being in flight together.
//
// Loads are not guarded: column = Column(c, width) names a quad that may be read for c >= width
// too, though not what comes of it.
#pragma once

#include <cstring>
#include <type_traits>

#include "cuda/general/elements.cuh"

namespace fenwick::cuda::general {

__device__ inline Quad<float> Widen(float4 x) { return {x.x, x.y, x.z, x.w}; }

// Storage: float, __nv_bfloat16 or __half. Widths are multiples of four.
template <typename Storage>
struct WideRows {
  using Scalar = float;
  using Raw = std::conditional_t<sizeof(Storage) == 4, float4, uint2>;
  static constexpr bool kWholeQuads = true;

  __device__ static int Column(int c, int width) { return c < width ? c : width - 4; }
  __device__ static Raw Load(const void* row, DType /*dtype*/, int column, int /*width*/) {
    return __ldg(reinterpret_cast<const Raw*>(static_cast<const Storage*>(row) + column));
  }
  __device__ static Quad<float> Expand(Raw raw) {
    Storage x[4];
    memcpy(static_cast<void*>(x), &raw, sizeof(x));
    return {Widen<float>(x[0]), Widen<float>(x[1]), Widen<float>(x[2]), Widen<float>(x[3])};
  }
  __device__ static float LoadOne(const void* row, DType /*dtype*/, int column) {
    return Widen<float>(static_cast<const Storage*>(row)[column]);
  }
  // Nodes are read once in a step: they need not stay in the caches.
  __device__ static Quad<float> LoadNode(const float* row, int column, int /*width*/) {
    return Widen(__ldcs(reinterpret_cast<const float4*>(row + column)));
  }
};

// Any storage type; T is the arithmetic.
template <typename T>
struct AnyRows {
  using Scalar = T;
  using Raw = Quad<T>;
  static constexpr bool kWholeQuads = false;

  __device__ static int Column(int c, int /*width*/) { return c; }
  __device__ static Raw Load(const void* row, DType dtype, int column, int width) {
    return LoadQuadSlowly<T>(row, dtype, column, width - column);
  }
  __device__ static Quad<T> Expand(const Raw& raw) { return raw; }
  __device__ static T LoadOne(const void* row, DType dtype, int column) {
    return LoadElement<T>(row, dtype, column);
  }
  __device__ static Quad<T> LoadNode(const T* row, int column, int width) {
    Quad<T> quad{};
    for (int j = 0; j < 4 && column + j < width; ++j) quad.x[j] = row[column + j];
    return quad;
  }
};

template <typename T>
__device__ inline T Dot(const Quad<T>& a, const Quad<T>& b, T sum) {
#pragma unroll
  for (int j = 0; j < 4; ++j) sum += a.x[j] * b.x[j];
  return sum;
}

// sum += scale x
template <typename T>
__device__ inline void AddScaled(Quad<T>& sum, T scale, const Quad<T>& x) {
#pragma unroll
  for (int j = 0; j < 4; ++j) sum.x[j] += scale * x.x[j];
}

// One step of summing kCount values over lanes: lanes that differ in bit `mask` of their number add
// up their values, the one with the bit clear the first half of them, the other the second half.
template <int kCount, typename T>
__device__ inline void AddHalves(T* values, int mask) {
  const bool second = (threadIdx.x & mask) != 0;
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const T sent = second ? values[i] : values[i + kCount / 2];
    const T kept = second ? values[i + kCount / 2] : values[i];
    values[i] = kept + __shfl_xor_sync(0xffffffffu, sent, mask);
  }
}

// Sums kCount values over the lanes of a warp whose numbers agree modulo kStop, a power of two.
// Lane l is left with kCount / (32 / kStop) sums, those from value kCount / 32 * (l - l % kStop)
// on.
template <int kCount, int kStop, int kMask = 16, typename T>
__device__ inline void SumOverLanes(T* values) {
  if constexpr (kMask >= kStop) {
    AddHalves<kCount>(values, kMask);
    SumOverLanes<kCount / 2, kStop, kMask / 2>(values);
  }
}

}  // namespace fenwick::cuda::general
