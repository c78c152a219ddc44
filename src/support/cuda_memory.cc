// Memory of the current CUDA device, on its default stream.
#include <cuda_runtime.h>

#include <string>

#include "support/memory.h"

namespace fenwick::support {
namespace {

void Check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  throw Error(std::string(call) + ": expected success, got " + cudaGetErrorString(status));
}

class DeviceMemory : public Memory {
 public:
  void* Allocate(std::size_t bytes) override {
    void* data = nullptr;
    Check(cudaMalloc(&data, bytes), "cudaMalloc");
    return data;
  }
  void Free(void* data) override { cudaFree(data); }
  void CopyIn(void* device, const void* host, std::size_t bytes) override {
    Check(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  void CopyOut(void* host, const void* device, std::size_t bytes) override {
    Check(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
  }
  void Synchronize() override { Check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }
};

}  // namespace

Memory& CudaMemory() {
  static DeviceMemory memory;
  return memory;
}

}  // namespace fenwick::support
