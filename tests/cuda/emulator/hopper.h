// Hopper's asynchronous machinery: the copy engine, mbarriers and wgmma. What a kernel may not rely
// on is delayed at random: copies happen some time after they were asked for, and wgmma reads its
// tiles and writes its accumulators only when it is waited for.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>

namespace emulator {

// Stands in for the driver's cuTensorMapEncodeTiled and checks what that one checks. Rank 4,
// elements of 2 bytes.
CUresult EncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                     const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                     const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                     CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                     CUtensorMapFloatOOBfill fill);

// Coordinates: innermost first.
void LoadTile(std::uint32_t shared, const CUtensorMap* map, std::uint32_t barrier,
              const std::array<int, 4>& at);
void StoreTile(const CUtensorMap* map, std::uint32_t shared, const std::array<int, 4>& at);
void LoadBytes(std::uint32_t shared, const void* global, std::uint32_t bytes,
               std::uint32_t barrier);
void StoreBytes(void* global, std::uint32_t shared, std::uint32_t bytes);
void CommitStores();
// Until at most `pending` of this thread's groups of stores are under way.
void WaitStores(int pending);

void BarrierInit(std::uint32_t barrier, std::uint32_t arrivals);
void BarrierArrive(std::uint32_t barrier);
void BarrierExpect(std::uint32_t barrier, std::uint32_t bytes);
void BarrierWait(std::uint32_t barrier, std::uint32_t parity);

// One thread's part of a warpgroup's 64 x N x 16 product.
struct Wgmma {
  float* d;
  int columns;  // N
  bool bfloat16, transpose_a, transpose_b, accumulate;
  bool registers;  // A comes from registers, not from shared memory
  std::array<std::uint32_t, 4> fragment;
  std::uint64_t a, b;  // descriptors of tiles in the 128-byte swizzle
};
void WgmmaStart(const Wgmma& product);
void WgmmaCommit();
void WgmmaWait(int pending);

// After each block: nothing that it asked for may still be under way.
void EndBlock();

}  // namespace emulator
