// A ring of stages in shared memory, each with barriers that a producer fills and consumers empty.
#pragma once

#include <cstdint>

namespace fenwick::cuda {

// The stage next to be used and the parity of its barriers' phase. A producer waits for the parity
// before it, which a fresh barrier passes.
struct RingPosition {
  int stage = 0;
  std::uint32_t phase = 0;
  __device__ __forceinline__ void Advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace fenwick::cuda
