// Tiles in shared memory: [rows][64] 16-bit elements, 128 bytes a row, in the 128-byte swizzle that
// the copy engine writes and wgmma reads: the 16-byte group c of row r lies at group c ^ (r % 8).
// Tiles start at multiples of 1,024 bytes. Wider matrices are several such tiles side by side.
#pragma once

#include <cstdint>

#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/sync.cuh"

namespace fenwick::cuda {

// First tile in the block's dynamic shared memory, of which kernels ask for 1,024 bytes more.
__device__ __forceinline__ std::uint32_t FirstTile() {
  return (ptx::DynamicSharedAddress() + 1023) & ~1023u;
}

constexpr int kTileColumns = 64;
constexpr int kTileRowBytes = 128;
// Descriptor steps (units of 16 bytes) along the reduction: 16 columns, or 16 rows.
constexpr int kStepColumns16 = 2;
constexpr int kStepRows16 = 16 * kTileRowBytes / 16;

// wgmma descriptor of a swizzled tile: 8-row groups lie 1,024 bytes apart. `tile_stride`: bytes
// between two tiles side by side, for a transposed operand more than 64 columns wide.
__device__ __forceinline__ std::uint64_t TileDescriptor(std::uint32_t tile,
                                                        std::uint32_t tile_stride = 16) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  constexpr std::uint64_t kGroupStride = std::uint64_t{1024 / 16} << 32;
  return ((tile & 0x3FFFF) >> 4) | (std::uint64_t{tile_stride / 16} << 16) | kGroupStride |
         kSwizzle128;
}

// Byte offset of 16-byte group `group` of row `row`.
__device__ __forceinline__ std::uint32_t SwizzledOffset(int row, int group) {
  return row * kTileRowBytes + ((group ^ (row & 7)) << 4);
}

// Row and group of the 16x16 block that lane addresses in a non-transposed ldmatrix / stmatrix.x4:
// registers 0, 1 are rows 0-7 and 8-15 of columns 0-7; 2, 3 those of columns 8-15.
__device__ __forceinline__ int MatrixRow(int lane) { return ((lane >> 3) & 1) * 8 + (lane & 7); }
__device__ __forceinline__ int MatrixGroup(int lane) { return lane >> 4; }

// Stores a warp's 16 x 64 part of an accumulator, packed in pairs, into a swizzled [16][64] tile
// part that starts at `tile`.
__device__ __forceinline__ void StorePacked(std::uint32_t tile, const std::uint32_t (&d)[16],
                                            int lane) {
  const int row = MatrixRow(lane);
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    ptx::StoreMatrix4(tile + SwizzledOffset(row, n + MatrixGroup(lane)), d[2 * n], d[2 * n + 1],
                      d[2 * n + 2], d[2 * n + 3]);
  }
}

// The same from float32, rounded to Element.
template <typename Element>
__device__ __forceinline__ void StoreAccumulator(std::uint32_t tile, const float (&d)[32],
                                                 int lane) {
  std::uint32_t packed[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) packed[i] = Element::Pack(d[2 * i], d[2 * i + 1]);
  StorePacked(tile, packed, lane);
}

// Zeroes rows [begin, end) of a tile; `thread` of `threads` take part.
__device__ __forceinline__ void ZeroRows(std::uint32_t tile, int begin, int end, int thread,
                                         int threads) {
#pragma unroll 1
  for (int i = begin * 8 + thread; i < end * 8; i += threads) {
    ptx::StoreSharedZero16(tile + i * 16);
  }
}

// Zeroes the rows from `begin` on of `count` tiles of `rows` rows, one behind the other. All of the
// block's threads below `threads` call it; behind it (named barrier 1) their products may read the
// tiles.
__device__ __forceinline__ void ZeroTails(std::uint32_t tiles, int count, int rows, int begin,
                                          int threads) {
  for (int i = 0; i < count; ++i) {
    ZeroRows(tiles + i * rows * kTileRowBytes, begin, rows, threadIdx.x, threads);
  }
  ptx::FenceAsyncShared();
  ptx::NamedBarrier(1, threads);
}

}  // namespace fenwick::cuda
