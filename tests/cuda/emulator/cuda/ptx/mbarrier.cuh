// src/cuda/ptx/mbarrier.cuh for the emulator.
#pragma once

#include "emulator.h"

namespace fenwick::cuda::ptx {

using emulator::BarrierArrive;
using emulator::BarrierExpect;
using emulator::BarrierInit;
using emulator::BarrierWait;

inline void BarrierInitFence() {}

// The lanes of a converged warp have all done what comes before.
inline void BarrierArriveOnce(std::uint32_t barrier) {
  emulator::SyncWarp();
  if (emulator::Lane() == 0) BarrierArrive(barrier);
}

}  // namespace fenwick::cuda::ptx
