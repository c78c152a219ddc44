// wgmma: a warpgroup multiplies a 64-row tile, D = A B (+ D). D and, in the Registers form, A are
// register fragments; the other operands are tiles in shared memory named by descriptors
// (tile/descriptor.cuh). N is 2 x (registers of D per thread). A transposed operand is stored with
// its M (A) or N (B) axis contiguous instead of K. Element: tile/element.cuh.
#pragma once

#include <cstdint>

namespace fenwick::cuda::ptx {

// Before the first wgmma after registers of D or A were written by other instructions.
__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses to D across a WgmmaFence or WgmmaWait.
template <int kCount>
__device__ __forceinline__ void PinRegisters(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The same for fragments of A: they must be complete before the fence.
template <int kCount>
__device__ __forceinline__ void PinRegisters(std::uint32_t (&a)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(a[i][j])::"memory");
  }
}

// clang-format off
#define FENWICK_WGMMA_D32 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"

#define FENWICK_WGMMA_OUT32 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), \
  "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
  "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), \
  "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
  "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])

#define FENWICK_WGMMA_D64 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"

#define FENWICK_WGMMA_OUT64 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), \
  "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
  "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), \
  "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
  "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), \
  "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), \
  "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), \
  "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
  "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), \
  "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
// clang-format on

template <typename Element, bool kTransposeA, bool kTransposeB>
__device__ __forceinline__ void WgmmaShared(float (&d)[32], std::uint64_t a, std::uint64_t b,
                                            bool accumulate) {
  if constexpr (Element::kIsBFloat16) {
    asm volatile(
        "{\n"
        ".reg .pred keep;\n"
        "setp.ne.b32 keep, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " FENWICK_WGMMA_D32
        ", %32, %33, keep, 1, 1, %35, %36;\n"
        "}"
        : FENWICK_WGMMA_OUT32
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kTransposeA)),
          "n"(static_cast<int>(kTransposeB)));
  } else {
    asm volatile(
        "{\n"
        ".reg .pred keep;\n"
        "setp.ne.b32 keep, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " FENWICK_WGMMA_D32
        ", %32, %33, keep, 1, 1, %35, %36;\n"
        "}"
        : FENWICK_WGMMA_OUT32
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kTransposeA)),
          "n"(static_cast<int>(kTransposeB)));
  }
}

template <typename Element, bool kTransposeB>
__device__ __forceinline__ void WgmmaRegisters(float (&d)[32], const std::uint32_t (&a)[4],
                                               std::uint64_t b, bool accumulate) {
  if constexpr (Element::kIsBFloat16) {
    asm volatile(
        "{\n"
        ".reg .pred keep;\n"
        "setp.ne.b32 keep, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " FENWICK_WGMMA_D32
        ", {%32, %33, %34, %35}, %36, keep, 1, 1, %38;\n"
        "}"
        : FENWICK_WGMMA_OUT32
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
          "n"(static_cast<int>(kTransposeB)));
  } else {
    asm volatile(
        "{\n"
        ".reg .pred keep;\n"
        "setp.ne.b32 keep, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " FENWICK_WGMMA_D32
        ", {%32, %33, %34, %35}, %36, keep, 1, 1, %38;\n"
        "}"
        : FENWICK_WGMMA_OUT32
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
          "n"(static_cast<int>(kTransposeB)));
  }
}

template <typename Element, bool kTransposeA, bool kTransposeB>
__device__ __forceinline__ void WgmmaShared(float (&d)[64], std::uint64_t a, std::uint64_t b,
                                            bool accumulate) {
  if constexpr (Element::kIsBFloat16) {
    asm volatile(
        "{\n"
        ".reg .pred keep;\n"
        "setp.ne.b32 keep, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " FENWICK_WGMMA_D64
        ", %64, %65, keep, 1, 1, %67, %68;\n"
        "}"
        : FENWICK_WGMMA_OUT64
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kTransposeA)),
          "n"(static_cast<int>(kTransposeB)));
  } else {
    asm volatile(
        "{\n"
        ".reg .pred keep;\n"
        "setp.ne.b32 keep, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " FENWICK_WGMMA_D64
        ", %64, %65, keep, 1, 1, %67, %68;\n"
        "}"
        : FENWICK_WGMMA_OUT64
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kTransposeA)),
          "n"(static_cast<int>(kTransposeB)));
  }
}

template <typename Element, bool kTransposeB>
__device__ __forceinline__ void WgmmaRegisters(float (&d)[64], const std::uint32_t (&a)[4],
                                               std::uint64_t b, bool accumulate) {
  if constexpr (Element::kIsBFloat16) {
    asm volatile(
        "{\n"
        ".reg .pred keep;\n"
        "setp.ne.b32 keep, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " FENWICK_WGMMA_D64
        ", {%64, %65, %66, %67}, %68, keep, 1, 1, %70;\n"
        "}"
        : FENWICK_WGMMA_OUT64
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
          "n"(static_cast<int>(kTransposeB)));
  } else {
    asm volatile(
        "{\n"
        ".reg .pred keep;\n"
        "setp.ne.b32 keep, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " FENWICK_WGMMA_D64
        ", {%64, %65, %66, %67}, %68, keep, 1, 1, %70;\n"
        "}"
        : FENWICK_WGMMA_OUT64
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
          "n"(static_cast<int>(kTransposeB)));
  }
}

#undef FENWICK_WGMMA_D32
#undef FENWICK_WGMMA_OUT32
#undef FENWICK_WGMMA_D64
#undef FENWICK_WGMMA_OUT64

}  // namespace fenwick::cuda::ptx
