// The bulk copy engine (TMA): global <-> shared, tiled by a tensor map or plain bytes.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace fenwick::cuda::ptx {

// Tile of a rank-4 tensor map at (x, y, z, w), innermost coordinate first; signals `barrier`.
__device__ __forceinline__ void LoadTile(std::uint32_t shared, const CUtensorMap* map,
                                         std::uint32_t barrier, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4, %5, %6}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

__device__ __forceinline__ void StoreTile(const CUtensorMap* map, std::uint32_t shared, int x,
                                          int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          map),
      "r"(shared), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// `bytes` and both addresses are multiples of 16.
__device__ __forceinline__ void LoadBytes(std::uint32_t shared, const void* global,
                                          std::uint32_t bytes, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void StoreBytes(void* global, std::uint32_t shared,
                                           std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void CommitStores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's store groups still read shared memory.
template <int kPending>
__device__ __forceinline__ void WaitStoresRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

template <int kPending>
__device__ __forceinline__ void WaitStores() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace fenwick::cuda::ptx
