// src/cuda/ptx/sync.cuh for the emulator: one kernel runs after the other, memory is consistent.
#pragma once

#include "emulator.h"

namespace fenwick::cuda::ptx {

using emulator::NamedBarrier;

inline void FenceAsyncShared() {}
template <int kRegisters>
void RaiseRegisters() {}
template <int kRegisters>
void LowerRegisters() {}
inline void WaitForPreviousKernel() {}
inline void AllowNextKernel() {}

}  // namespace fenwick::cuda::ptx
