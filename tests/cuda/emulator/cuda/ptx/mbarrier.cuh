// src/cuda/ptx/mbarrier.cuh for the emulator.
#pragma once

#include "emulator.h"

namespace fenwick::cuda::ptx {

using emulator::BarrierArrive;
using emulator::BarrierExpect;
using emulator::BarrierInit;
using emulator::BarrierWait;

inline void BarrierInitFence() {}

inline constexpr std::uint32_t kWarpArrivals = 1;

inline void BarrierInitWarps(std::uint32_t barrier, std::uint32_t warps) {
  BarrierInit(barrier, warps);
}

// The lanes of a converged warp have all done what comes before.
inline void BarrierArriveOnce(std::uint32_t barrier) {
  emulator::SyncWarp();
  if (emulator::Lane() == 0) BarrierArrive(barrier);
}

}  // namespace fenwick::cuda::ptx
