#include "support/memory.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <utility>

namespace fenwick::support {

namespace {

constexpr std::size_t kAlignment = 256;

// Blocks of exactly the size asked for, so that AddressSanitizer sees every access past an end.
class HostMemory : public Memory {
 public:
  void* Allocate(std::size_t bytes) override {
    void* data = nullptr;
    if (posix_memalign(&data, kAlignment, bytes) != 0) throw std::bad_alloc();
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

Memory& MemoryOf(Device device) {
  static HostMemory host;
  if (device == Device::kCPU) return host;
#if defined(FENWICK_CUDA)
  if (DeviceAvailable(device)) return CudaMemory();
#endif
  throw Error("device: expected an available one, got " + std::string(DeviceName(device)));
}

std::vector<Device> AvailableDevices() {
  std::vector<Device> devices = {Device::kCPU};
  if (DeviceAvailable(Device::kCUDA)) devices.push_back(Device::kCUDA);
  return devices;
}

const char* DeviceName(Device device) { return device == Device::kCPU ? "cpu" : "cuda"; }

Allocation::Allocation(Device device, std::size_t bytes)
    : device_(device),
      bytes_(bytes),
      data_(bytes == 0 ? nullptr : static_cast<std::byte*>(MemoryOf(device).Allocate(bytes))) {}

Allocation::~Allocation() {
  if (data_ != nullptr) MemoryOf(device_).Free(data_);
}

Allocation::Allocation(Allocation&& other) noexcept
    : device_(other.device_), bytes_(other.bytes_), data_(std::exchange(other.data_, nullptr)) {}

}  // namespace fenwick::support
