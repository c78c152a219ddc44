// Memory of a device, so that one test body or check runs on every device.
#pragma once

#include <cstddef>
#include <vector>

#include "fenwick/ops.h"

namespace fenwick::support {

class Memory {
 public:
  virtual ~Memory() = default;
  virtual void* Allocate(std::size_t bytes) = 0;  // aligned to 256 bytes
  virtual void Free(void* data) = 0;
  // Both return when the copy is done and after all work queued before it.
  virtual void CopyIn(void* device, const void* host, std::size_t bytes) = 0;
  virtual void CopyOut(void* host, const void* device, std::size_t bytes) = 0;
  // Waits for all queued work; throws Error if it failed.
  virtual void Synchronize() = 0;
};

// The memory of an available device; throws Error for one that is not.
Memory& MemoryOf(Device device);

#if defined(FENWICK_CUDA)
// That of the current CUDA device (cuda_memory.cc, or the tests' emulator).
Memory& CudaMemory();
#endif

// Devices that this build and machine have kernels for, the CPU first.
std::vector<Device> AvailableDevices();
const char* DeviceName(Device device);  // "cpu", "cuda"

// Memory held for the lifetime of the object.
class Allocation {
 public:
  Allocation(Device device, std::size_t bytes);
  ~Allocation();
  Allocation(Allocation&& other) noexcept;
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;
  Allocation& operator=(Allocation&&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  Device device() const { return device_; }

 private:
  Device device_;
  std::size_t bytes_;
  std::byte* data_;
};

}  // namespace fenwick::support
