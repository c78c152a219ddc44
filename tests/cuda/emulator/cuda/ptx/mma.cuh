// src/cuda/ptx/mma.cuh for the emulator.
#pragma once

#include "emulator.h"

namespace fenwick::cuda::ptx {

using emulator::MmaTf32;
using emulator::RoundTf32;

}  // namespace fenwick::cuda::ptx
