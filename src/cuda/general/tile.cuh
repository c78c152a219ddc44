// C += A B on a 64 x 64 tile by one block of 128 threads: the only matrix product of the general
// kernels.
//
// Operands pass through shared memory, 32 steps of depth at a time. While the block multiplies one
// stage the next is under way: float32 matrices in global memory as asynchronous copies (cp.async),
// everything else (16-bit tokens, scaled rows, ragged columns) through registers.
//
// Arithmetic is one of
//   FmaMath<float>, FmaMath<double>   plain multiply-adds: float32 and float64 storage
//   TensorMath                        mma.sync on tf32 operands, float32 sums: 16-bit storage,
//                                     whose values tf32 holds exactly (8-bit exponent, 11-bit
//                                     significand)
#pragma once

#include "cuda/general/elements.cuh"
#include "cuda/general/entries.h"
#include "cuda/ptx/async.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared.cuh"

namespace fenwick::cuda::general {

inline constexpr int kTile = 64;
inline constexpr int kDepth = 32;
inline constexpr int kThreads = 128;

// How one stage of an operand lies in shared memory, m or n being its outer axis. Either way four
// depths times eight outer elements of an mma fragment touch 32 banks, and quads stay aligned.
enum class Order {
  kDepthMajor,  // [depth][outer], rows of 72
  kOuterMajor,  // [outer][depth], rows of 36
};
inline constexpr int kPitch = kTile + 8;
inline constexpr int kOuterPitch = kDepth + 4;
inline constexpr int kStage = kDepth * kPitch;  // elements
static_assert(kStage == kTile * kOuterPitch);

// The block's dynamic shared memory as one struct; kernels are launched with sizeof(Shared) bytes.
template <typename Shared>
__device__ inline Shared& SharedAs() {
  return *reinterpret_cast<Shared*>(ptx::DynamicShared());
}

// Two stages of each operand; one in float64, where two would leave too little of sm_86's 99 KB.
template <typename T>
struct TileMemory {
  static constexpr int kStages = sizeof(T) == 8 ? 1 : 2;
  alignas(32) T a[kStages][kStage];
  alignas(32) T b[kStages][kStage];
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

  // Rows whose outer axis is m or n are transposed on their way: threads read quads of m and n.
  static constexpr Order kOuterRows = Order::kDepthMajor;

  template <Order, Order>
  __device__ static void Multiply(Tile& c, const T* a, const T* b) {
    a += threadIdx.x / 16 * 8;
    b += threadIdx.x % 16 * 4;
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
  static constexpr Order kOuterRows = Order::kOuterMajor;

  template <Order kA, Order kB>
  __device__ static void Multiply(Tile& c, const float* a, const float* b) {
    constexpr int kDepthA = kA == Order::kDepthMajor ? kPitch : 1;
    constexpr int kDepthB = kB == Order::kDepthMajor ? kPitch : 1;
    constexpr int kRowA = kA == Order::kDepthMajor ? 1 : kOuterPitch;
    constexpr int kColumnB = kB == Order::kDepthMajor ? 1 : kOuterPitch;
    const int lane = threadIdx.x % 32;
    a += lane % 4 * kDepthA + (threadIdx.x / 32 * 16 + lane / 4) * kRowA;
    b += lane % 4 * kDepthB + lane / 4 * kColumnB;
#pragma unroll
    for (int d = 0; d < kDepth; d += 8) {
      const float* ad = a + d * kDepthA;
      const float fragment[4] = {ptx::RoundTf32(ad[0]), ptx::RoundTf32(ad[8 * kRowA]),
                                 ptx::RoundTf32(ad[4 * kDepthA]),
                                 ptx::RoundTf32(ad[4 * kDepthA + 8 * kRowA])};
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float* bd = b + d * kDepthB + 8 * n * kColumnB;
        const float column[2] = {ptx::RoundTf32(bd[0]), ptx::RoundTf32(bd[4 * kDepthB])};
        ptx::MmaTf32(c.x + 4 * n, fragment, column);
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

// out[row] += the sum of `sums` over the threads that share the row; the same thread owns out[row]
// in every call.
template <typename Math>
__device__ inline void AddToRows(typename Math::Scalar (&sums)[Math::kRows],
                                 typename Math::Scalar* out) {
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

// out[row] += the sum over the row's columns.
template <typename Math>
__device__ inline void AddRowSums(const typename Math::Tile& tile, typename Math::Scalar* out) {
  typename Math::Scalar sums[Math::kRows] = {};
#pragma unroll
  for (int i = 0; i < 32; ++i) sums[Math::RowSlot(i)] += tile.x[i];
  AddToRows<Math>(sums, out);
}

// One operand as its block stages it: how its matrix lies is either "rows are the tile's outer
// axis" (m or n) or "rows are the depth" (sources.cuh says what a source is). Each thread moves
// four quads a stage: Start sets out, Finish has the stage in place once the block synchronises.
// What passes through registers stays as it lies in memory until Finish, so that nothing waits for
// it earlier.
inline constexpr int kQuadsPerThread = kTile * kDepth / 4 / kThreads;

template <typename T>
struct Fetched {
  RawQuad<T> quads[kQuadsPerThread];
};

template <typename Source>
struct RowsOuter {
  using T = typename Source::Scalar;
  Source source;
  template <typename Math>
  static constexpr Order kOrder = Math::kOuterRows;

  __device__ auto Begin() const { return source.window(); }

  template <typename Math, typename Window>
  __device__ void Start(const Window& window, int depth_begin, T* to, Fetched<T>& fetched) const {
    if constexpr (kOrder<Math> == Order::kOuterMajor) {
      if (source.copyable()) {
        constexpr int kQuadsPerRow = kDepth / 4;
        const int quad = threadIdx.x % kQuadsPerRow * 4;
#pragma unroll
        for (int i = 0; i < kQuadsPerThread; ++i) {
          const int row = threadIdx.x / kQuadsPerRow + i * (kThreads / kQuadsPerRow);
          source.Copy(row, depth_begin + quad, to + row * kOuterPitch + quad);
        }
        return;
      }
    }
    // A thread's row is the same at every depth.
    const DType dtype = source.dtype();
    if (window.holds(kTile, depth_begin + kDepth)) {
      const unsigned char* from =
          window.data + Row() * window.stride + (depth_begin + Depth(0)) * Width(dtype);
#pragma unroll
      for (int i = 0; i < kQuadsPerThread; ++i) {
        fetched.quads[i] =
            LoadRawQuad<T>(from + (Depth(i) - Depth(0)) * Width(dtype), Width(dtype) == 2);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kQuadsPerThread; ++i) {
      fetched.quads[i] = Raw(source.Slowly(Row(), depth_begin + Depth(i)), dtype);
    }
  }

  template <typename Math>
  __device__ void Finish(int /*depth_begin*/, const Fetched<T>& fetched, T* to) const {
    if (kOrder<Math> == Order::kOuterMajor && source.copyable()) return;
    const T scale = source.scale == nullptr ? T(1) : source.scale[Row()];
#pragma unroll
    for (int i = 0; i < kQuadsPerThread; ++i) {
      Quad<T> quad = Widen<T>(fetched.quads[i], source.dtype());
#pragma unroll
      for (int j = 0; j < 4; ++j) quad.x[j] *= scale;
      if constexpr (kOrder<Math> == Order::kOuterMajor) {
        *reinterpret_cast<Quad<T>*>(to + Row() * kOuterPitch + Depth(i)) = quad;
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) to[(Depth(i) + j) * kPitch + Row()] = quad.x[j];
      }
    }
  }

 private:
  __device__ static int Row() { return static_cast<int>(threadIdx.x % kTile); }
  __device__ static int Depth(int i) {
    return 4 * static_cast<int>(threadIdx.x / kTile + i * (kThreads / kTile));
  }
};

template <typename Source>
struct RowsDepth {
  using T = typename Source::Scalar;
  static constexpr int kQuadsPerRow = kTile / 4;
  Source source;
  template <typename Math>
  static constexpr Order kOrder = Order::kDepthMajor;

  __device__ auto Begin() const { return source.window(); }

  template <typename Math, typename Window>
  __device__ void Start(const Window& window, int depth_begin, T* to, Fetched<T>& fetched) const {
    if constexpr (TileMemory<T>::kStages == 2) {
      if (source.copyable()) {
#pragma unroll
        for (int i = 0; i < kQuadsPerThread; ++i) {
          source.Copy(depth_begin + Depth(i), Column(), to + Depth(i) * kPitch + Column());
        }
        return;
      }
    }
    const DType dtype = source.dtype();
    if (window.holds(depth_begin + kDepth, kTile)) {
      const unsigned char* from = window.data + Column() * Width(dtype);
#pragma unroll
      for (int i = 0; i < kQuadsPerThread; ++i) {
        fetched.quads[i] =
            LoadRawQuad<T>(from + (depth_begin + Depth(i)) * window.stride, Width(dtype) == 2);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kQuadsPerThread; ++i) {
      fetched.quads[i] = Raw(source.Slowly(depth_begin + Depth(i), Column()), dtype);
    }
  }

  template <typename Math>
  __device__ void Finish(int depth_begin, const Fetched<T>& fetched, T* to) const {
    if (TileMemory<T>::kStages == 2 && source.copyable()) return;
#pragma unroll
    for (int i = 0; i < kQuadsPerThread; ++i) {
      Quad<T> quad = Widen<T>(fetched.quads[i], source.dtype());
      if (source.scale != nullptr) {
#pragma unroll
        for (int j = 0; j < 4; ++j) quad.x[j] *= source.scale[depth_begin + Depth(i)];
      }
      *reinterpret_cast<Quad<T>*>(to + Depth(i) * kPitch + Column()) = quad;
    }
  }

 private:
  __device__ static int Column() { return static_cast<int>(threadIdx.x % kQuadsPerRow * 4); }
  __device__ static int Depth(int i) {
    return static_cast<int>(threadIdx.x / kQuadsPerRow) + i * (kThreads / kQuadsPerRow);
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

// c += A B. Every thread of the block calls it. Operands in memory may have been written just
// before (a barrier comes first), and be written anew right after; `memory` may not, until the
// block has synchronised.
template <typename Math, typename A, typename B>
__device__ inline void Product(typename Math::Tile& c, TileMemory<typename Math::Scalar>& memory,
                               int depth, const A& a, const B& b) {
  using T = typename Math::Scalar;
  constexpr int kStages = TileMemory<T>::kStages;
  __syncthreads();
  const auto a_window = a.Begin();
  const auto b_window = b.Begin();
  Fetched<T> a_next, b_next;
  a.template Start<Math>(a_window, 0, memory.a[0], a_next);
  b.template Start<Math>(b_window, 0, memory.b[0], b_next);
  int stage = 0;
#pragma unroll 1
  for (int d = 0; d < depth; d += kDepth) {
    a.template Finish<Math>(d, a_next, memory.a[stage]);
    b.template Finish<Math>(d, b_next, memory.b[stage]);
    ptx::WaitForCopies();
    __syncthreads();
    const int next = (stage + 1) % kStages;
    if (d + kDepth < depth) {
      a.template Start<Math>(a_window, d + kDepth, memory.a[next], a_next);
      b.template Start<Math>(b_window, d + kDepth, memory.b[next], b_next);
    }
    Math::template Multiply<A::template kOrder<Math>, B::template kOrder<Math>>(c, memory.a[stage],
                                                                                memory.b[stage]);
    if (kStages == 1) __syncthreads();
    stage = next;
  }
}

// c += diag(scale) A B, with scale[64] in shared memory; the block synchronises before it changes.
template <typename Math, typename A, typename B>
__device__ inline void ScaledProduct(typename Math::Tile& c,
                                     TileMemory<typename Math::Scalar>& memory, int depth,
                                     const typename Math::Scalar* scale, const A& a, const B& b) {
  typename Math::Tile product;
  Clear(product);
  Product<Math>(product, memory, depth, a, b);
#pragma unroll
  for (int i = 0; i < 32; ++i) c.x[i] += scale[Math::Row(i)] * product.x[i];
}

}  // namespace fenwick::cuda::general
