// The device that the emulator is, and its memory, which is the host's.
#include "cuda/device.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include "support/memory.h"

namespace fenwick {

// A Hopper device of few multiprocessors, so that small calls are cut in several parts.
const cuda::DeviceTraits& cuda::CurrentDevice() {
  static constexpr DeviceTraits kTraits = {.major = 9,
                                           .minor = 0,
                                           .multiprocessors = 3,
                                           .shared_memory_bytes = 232448,
                                           .l2_bytes = 50 << 20};
  return kTraits;
}

bool cuda::AnyUsableDevice() { return true; }

namespace support {
namespace {

class EmulatedMemory : public Memory {
 public:
  void* Allocate(std::size_t bytes) override {
    void* data = nullptr;
    if (posix_memalign(&data, 256, bytes) != 0) throw std::bad_alloc();
    return data;
  }
  void Free(void* data) override { std::free(data); }
  void CopyIn(void* device, const void* host, std::size_t bytes) override {
    std::memcpy(device, host, bytes);
  }
  void CopyOut(void* host, const void* device, std::size_t bytes) override {
    std::memcpy(host, device, bytes);
  }
  void Synchronize() override {}
};

}  // namespace

Memory& CudaMemory() {
  static EmulatedMemory memory;
  return memory;
}

}  // namespace support
}  // namespace fenwick
