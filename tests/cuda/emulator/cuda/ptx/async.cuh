// src/cuda/ptx/async.cuh for the emulator.
#pragma once

#include "emulator.h"

namespace fenwick::cuda::ptx {

inline void CopyAsync(float* to, const float* from, bool exists) {
  for (int j = 0; j < 4; ++j) to[j] = exists ? from[j] : 0.f;
}
inline void WaitForCopies() {}

inline void Prefetch(const void*) {}

}  // namespace fenwick::cuda::ptx
