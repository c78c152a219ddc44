#include "cuda/device.h"

#include <cuda_runtime.h>

#include <array>
#include <mutex>

#include "cuda/launch.h"
#include "fenwick/error.h"

namespace fenwick::cuda {
namespace {

constexpr int kMaxDevices = 64;

int Attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  Check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

DeviceTraits Query(int device) {
  DeviceTraits traits;
  traits.major = Attribute(cudaDevAttrComputeCapabilityMajor, device);
  traits.minor = Attribute(cudaDevAttrComputeCapabilityMinor, device);
  traits.multiprocessors = Attribute(cudaDevAttrMultiProcessorCount, device);
  traits.shared_memory_bytes = Attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  traits.l2_bytes = Attribute(cudaDevAttrL2CacheSize, device);
  return traits;
}

}  // namespace

const DeviceTraits& CurrentDevice() {
  static std::array<DeviceTraits, kMaxDevices> traits;
  static std::array<std::once_flag, kMaxDevices> queried;
  int device = 0;
  Check(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= kMaxDevices) throw Error("CUDA: expected at most 64 devices");
  std::call_once(queried[device], [device] { traits[device] = Query(device); });
  return traits[device];
}

bool AnyUsableDevice() {
  static const bool usable = [] {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) {
      (void)cudaGetLastError();
      return false;
    }
    for (int device = 0; device < count; ++device) {
      if (Attribute(cudaDevAttrComputeCapabilityMajor, device) >= 8) return true;
    }
    return false;
  }();
  return usable;
}

}  // namespace fenwick::cuda
