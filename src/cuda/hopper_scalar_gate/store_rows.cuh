// Storing 16 rows of a value tile that a warp has staged in shared memory.
#pragma once

#include <cuda.h>

#include "cuda/hopper_scalar_gate/layout.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/tile/swizzle.cuh"

namespace fenwick::cuda::hopper {

// A tensor [B, T, H, V] of 16-bit elements that is written.
struct RowsTarget {
  const CUtensorMap* map;  // boxes of 16 rows; unused where the copy engine cannot write the tensor
  void* data;
  std::int64_t batch_stride, token_stride, head_stride;
  int value_size;
  bool mapped, packed;
};

// Rows row .. row + 15 of the chunk, from a swizzled [16][64] tile. Rows past the end of a packed
// sequence belong to the next one; past the end of a tensor the copy engine drops them. A later
// reuse of `staging` by this warp must follow WaitStoresRead and __syncwarp.
__device__ __forceinline__ void StoreRows(const RowsTarget& to, const ChunkPlace& place, int head,
                                          int value_tile, int row, std::uint32_t staging,
                                          int lane) {
  if (to.mapped && (row + 16 <= place.valid || !to.packed)) {
    if (lane == 0) {
      ptx::StoreTile(to.map, staging, value_tile * kValueTile, head, place.token + row,
                     place.batch);
      ptx::CommitStores();
    }
    return;
  }
  const int columns = min(kValueTile, to.value_size - value_tile * kValueTile);
  auto* out = static_cast<unsigned short*>(to.data) + place.batch * to.batch_stride +
              (place.token + row) * to.token_stride + head * to.head_stride +
              value_tile * kValueTile;
  const int group = lane % 8, column = 8 * group;
#pragma unroll 1
  for (int r = lane / 8; r < min(16, place.valid - row); r += 4) {
    const std::uint32_t from = staging + SwizzledOffset(r, group);
    unsigned short* target = out + r * to.token_stride + column;
    if (to.mapped && column + 8 <= columns) {  // 16-byte aligned
      *reinterpret_cast<uint4*>(target) = ptx::LoadSharedU32x4(from);
      continue;
    }
#pragma unroll 1
    for (int i = 0; i < min(8, columns - column); ++i) {
      const std::uint32_t pair = ptx::LoadSharedU32(from + 4 * (i / 2));
      target[i] = static_cast<unsigned short>(i & 1 ? pair >> 16 : pair);
    }
  }
  __syncwarp();
}

}  // namespace fenwick::cuda::hopper
