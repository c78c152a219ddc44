// The device that the emulator is, and its memory, which is the host's.
#include "cuda/device.h"

#include "support/memory.h"

namespace fenwick {

// A Hopper device of few multiprocessors, so that small calls are cut in several parts.
const cuda::DeviceTraits& cuda::CurrentDevice() {
  static constexpr DeviceTraits kTraits = {.major = 9,
                                           .minor = 0,
                                           .multiprocessors = 4,
                                           .shared_memory_bytes = 232448,
                                           .l2_bytes = 50 << 20};
  return kTraits;
}

bool cuda::AnyUsableDevice() { return true; }

support::Memory& support::CudaMemory() { return MemoryOf(Device::kCPU); }

}  // namespace fenwick
