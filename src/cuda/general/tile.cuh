// C += A B on a 64 x 64 tile by one block of 128 threads: the only matrix product of the general
// kernels.
//
// Operands pass through shared memory, 32 steps of depth at a time, both depth-major:
// a[d][m] and b[d][n]. Rows of 72 elements make every access of every arithmetic free of bank
// conflicts (72 mod 32 = 8: four depths times eight columns of an mma fragment touch 32 banks) and
// keep quads aligned.
//
// Arithmetic is one of
//   FmaMath<float>, FmaMath<double>   plain multiply-adds: float32 and float64 storage
//   TensorMath                        mma.sync on tf32 operands, float32 sums: 16-bit storage,
//   whose
//                                     values tf32 holds exactly (8-bit exponent, 11-bit
//                                     significand)
#pragma once

#include "cuda/general/elements.cuh"
#include "cuda/general/entries.h"

namespace fenwick::cuda::general {

inline constexpr int kTile = 64;
inline constexpr int kDepth = 32;
inline constexpr int kPitch = kTile + 8;
inline constexpr int kThreads = 128;

// The block's dynamic shared memory as one struct; kernels are launched with sizeof(Shared) bytes.
template <typename Shared>
__device__ inline Shared& SharedAs() {
#if defined(FENWICK_EMULATE)
  return *reinterpret_cast<Shared*>(emulator::SharedMemory());
#else
  extern __shared__ __align__(32) unsigned char fenwick_shared_memory[];
  return *reinterpret_cast<Shared*>(fenwick_shared_memory);
#endif
}

template <typename T>
struct TileMemory {
  alignas(32) T a[kDepth * kPitch];  // [depth][m]
  alignas(32) T b[kDepth * kPitch];  // [depth][n]
};

// A 64 x 64 matrix that stays in shared memory.
template <typename T>
struct TileMatrix {
  alignas(32) T x[kTile * kPitch];
  __device__ T& operator()(int row, int column) { return x[row * kPitch + column]; }
  __device__ const T& operator()(int row, int column) const { return x[row * kPitch + column]; }
};

template <typename T>
struct FmaMath {
  using Scalar = T;
  struct Tile {
    T x[32];
  };

  static constexpr int kRows = 8;         // rows that a thread has entries of: i / 4
  static constexpr int kRowThreads = 16;  // neighbouring threads that share a row
  __device__ static int RowSlot(int i) { return i / 4; }
  __device__ static int Row(int i) { return threadIdx.x / 16 * 8 + i / 4; }
  __device__ static int Column(int i) { return threadIdx.x % 16 * 4 + i % 4; }
  __device__ static T Round(T value) { return value; }

  __device__ static void Multiply(Tile& c, const TileMemory<T>& memory) {
    const T* a = memory.a + threadIdx.x / 16 * 8;
    const T* b = memory.b + threadIdx.x % 16 * 4;
#pragma unroll 8
    for (int d = 0; d < kDepth; ++d) {
      const Quad<T> a0 = *reinterpret_cast<const Quad<T>*>(a + d * kPitch);
      const Quad<T> a1 = *reinterpret_cast<const Quad<T>*>(a + d * kPitch + 4);
      const Quad<T> b0 = *reinterpret_cast<const Quad<T>*>(b + d * kPitch);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          c.x[4 * i + j] += a0.x[i] * b0.x[j];
          c.x[16 + 4 * i + j] += a1.x[i] * b0.x[j];
        }
      }
    }
  }
};

#if defined(FENWICK_EMULATE)
using emulator::MmaTf32;
using emulator::RoundTf32;
#else
// c[4] += a[4] b[2] of mma.m16n8k8, tf32 operands.
__device__ inline void MmaTf32(float* c, const float* a, const float* b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}

__device__ inline float RoundTf32(float value) {
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return __uint_as_float(bits);
}
#endif

struct TensorMath {
  using Scalar = float;
  struct Tile {
    float x[32];
  };

  static constexpr int kRows = 2;
  static constexpr int kRowThreads = 4;
  __device__ static int RowSlot(int i) { return i / 2 % 2; }
  // Warp w owns rows 16 w .. 16 w + 15; x[4 n + ...] is the accumulator of columns 8 n .. 8 n + 7.
  __device__ static int Row(int i) {
    return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
  }
  __device__ static int Column(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }
  __device__ static float Round(float value) { return RoundTf32(value); }

  __device__ static void Multiply(Tile& c, const TileMemory<float>& memory) {
    const int lane = threadIdx.x % 32;
    const float* a = memory.a + lane % 4 * kPitch + threadIdx.x / 32 * 16 + lane / 4;
    const float* b = memory.b + lane % 4 * kPitch + lane / 4;
#pragma unroll
    for (int d = 0; d < kDepth; d += 8) {
      const float* ad = a + d * kPitch;
      const float fragment[4] = {ad[0], ad[8], ad[4 * kPitch], ad[4 * kPitch + 8]};
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float* bd = b + d * kPitch + 8 * n;
        const float column[2] = {bd[0], bd[4 * kPitch]};
        MmaTf32(c.x + 4 * n, fragment, column);
      }
    }
  }
};

template <typename Tile>
__device__ inline void Clear(Tile& tile) {
#pragma unroll
  for (int i = 0; i < 32; ++i) tile.x[i] = 0;
}

// f(row, column, value) for the 32 entries that this thread holds; value may be changed.
template <typename Math, typename F>
__device__ inline void ForEach(typename Math::Tile& tile, F&& f) {
#pragma unroll
  for (int i = 0; i < 32; ++i) f(Math::Row(i), Math::Column(i), tile.x[i]);
}

// out[row] += sum over the row's columns of f(row, column, value); the same thread owns out[row] in
// every call.
template <typename Math, typename F>
__device__ inline void AddRowSums(typename Math::Tile& tile, typename Math::Scalar* out, F&& f) {
  typename Math::Scalar sums[Math::kRows] = {};
#pragma unroll
  for (int i = 0; i < 32; ++i)
    sums[Math::RowSlot(i)] += f(Math::Row(i), Math::Column(i), tile.x[i]);
#pragma unroll
  for (int r = 0; r < Math::kRows; ++r) {
#pragma unroll
    for (int mask = 1; mask < Math::kRowThreads; mask *= 2) {
      sums[r] += __shfl_xor_sync(0xffffffffu, sums[r], mask);
    }
  }
  if (threadIdx.x % Math::kRowThreads != 0) return;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    if (i == 0 || Math::RowSlot(i) > Math::RowSlot(i - 1))
      out[Math::Row(i)] += sums[Math::RowSlot(i)];
    if (Math::RowSlot(i) == Math::kRows - 1) break;
  }
}

// One operand as its block stages it, kDepth of depth at a time: how its matrix lies is either
// "rows are the tile's outer axis" (m or n) or "rows are the depth" (sources.cuh says what a source
// is). Each thread moves four quads, from memory to registers (Fetch), then to shared memory (Put),
// so that a fetch can be in flight while the block multiplies.
inline constexpr int kQuadsPerThread = kTile * kDepth / 4 / kThreads;

template <typename T>
struct Fetched {
  Quad<T> quads[kQuadsPerThread];
};

template <typename Source>
struct RowsOuter {
  Source source;

  // A thread's row is the same at every depth.
  __device__ auto Begin() const { return source.RowOf(threadIdx.x % kTile); }
  template <typename T, typename Cursor>
  __device__ void Fetch(const Cursor& row, int depth_begin, Fetched<T>& fetched) const {
#pragma unroll
    for (int i = 0; i < kQuadsPerThread; ++i) {
      fetched.quads[i] =
          row(depth_begin + 4 * static_cast<int>(threadIdx.x / kTile + i * (kThreads / kTile)));
    }
  }
  template <typename Math>
  __device__ static void Put(const Fetched<typename Math::Scalar>& fetched,
                             typename Math::Scalar* to) {
#pragma unroll
    for (int i = 0; i < kQuadsPerThread; ++i) {
      const int depth = 4 * (threadIdx.x / kTile + i * (kThreads / kTile));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        to[(depth + j) * kPitch + threadIdx.x % kTile] = Math::Round(fetched.quads[i].x[j]);
      }
    }
  }
};

template <typename Source>
struct RowsDepth {
  static constexpr int kQuadsPerRow = kTile / 4;
  Source source;

  __device__ int Begin() const { return threadIdx.x % kQuadsPerRow * 4; }  // its columns
  template <typename T>
  __device__ void Fetch(int column, int depth_begin, Fetched<T>& fetched) const {
#pragma unroll
    for (int i = 0; i < kQuadsPerThread; ++i) {
      const int depth = threadIdx.x / kQuadsPerRow + i * (kThreads / kQuadsPerRow);
      fetched.quads[i] = source.RowOf(depth_begin + depth)(column);
    }
  }
  template <typename Math>
  __device__ static void Put(const Fetched<typename Math::Scalar>& fetched,
                             typename Math::Scalar* to) {
    using T = typename Math::Scalar;
#pragma unroll
    for (int i = 0; i < kQuadsPerThread; ++i) {
      const int depth = threadIdx.x / kQuadsPerRow + i * (kThreads / kQuadsPerRow);
      Quad<T> quad = fetched.quads[i];
#pragma unroll
      for (int j = 0; j < 4; ++j) quad.x[j] = Math::Round(quad.x[j]);
      *reinterpret_cast<Quad<T>*>(to + depth * kPitch + threadIdx.x % kQuadsPerRow * 4) = quad;
    }
  }
};

// C = A B is Product(c, memory, depth, Left(a), Right(b)); T stands for "transposed".
template <typename S>
__device__ RowsOuter<S> Left(const S& s) {
  return {s};
}
template <typename S>
__device__ RowsDepth<S> LeftT(const S& s) {
  return {s};
}
template <typename S>
__device__ RowsDepth<S> Right(const S& s) {
  return {s};
}
template <typename S>
__device__ RowsOuter<S> RightT(const S& s) {
  return {s};
}

// c += A B. Every thread of the block calls it. Operands in shared memory may have been written
// just before; the first barrier is inside.
template <typename Math, typename A, typename B>
__device__ inline void Product(typename Math::Tile& c, TileMemory<typename Math::Scalar>& memory,
                               int depth, const A& a, const B& b) {
  using T = typename Math::Scalar;
  __syncthreads();
  const auto a_row = a.Begin();
  const auto b_row = b.Begin();
  Fetched<T> a_next, b_next;
  a.Fetch(a_row, 0, a_next);
  b.Fetch(b_row, 0, b_next);
#pragma unroll 1
  for (int d = 0; d < depth; d += kDepth) {
    A::template Put<Math>(a_next, memory.a);
    B::template Put<Math>(b_next, memory.b);
    __syncthreads();
    if (d + kDepth < depth) {
      a.Fetch(a_row, d + kDepth, a_next);
      b.Fetch(b_row, d + kDepth, b_next);
    }
    Math::Multiply(c, memory);
    __syncthreads();
  }
}

}  // namespace fenwick::cuda::general
