// mbarrier: arrival counts and transaction bytes in shared memory. Addresses are 32-bit shared.
#pragma once

#include <cstdint>

namespace fenwick::cuda::ptx {

__device__ __forceinline__ void BarrierInit(std::uint32_t barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes freshly initialised barriers visible to the copy engine.
__device__ __forceinline__ void BarrierInitFence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void BarrierExpect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void BarrierArrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrivals of a warp, see BarrierArriveOnce. compute-sanitizer's racecheck takes into account only
// what the arriving thread itself has done: built for it, all lanes arrive.
#if defined(FENWICK_RACECHECK)
inline constexpr std::uint32_t kWarpArrivals = 32;
#else
inline constexpr std::uint32_t kWarpArrivals = 1;
#endif

__device__ __forceinline__ void BarrierInitWarps(std::uint32_t barrier, std::uint32_t warps) {
  BarrierInit(barrier, warps * kWarpArrivals);
}

// One arrival for the whole, converged warp and all that its lanes have done.
__device__ __forceinline__ void BarrierArriveOnce(std::uint32_t barrier) {
  __syncwarp();
  if constexpr (kWarpArrivals > 1) return BarrierArrive(barrier);
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "@elected mbarrier.arrive.shared::cta.b64 _, [%0];\n"
      "}" ::"r"(barrier)
      : "memory");
}

// Returns once the phase of the given parity has completed.
__device__ __forceinline__ void BarrierWait(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "TRY_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE_%=;\n"
      "bra TRY_%=;\n"
      "DONE_%=:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace fenwick::cuda::ptx
