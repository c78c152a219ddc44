// The CUDA backend with its kernels on the emulator: "device" memory is host memory.
#include "core/backend.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include "core/layer_backend.h"
#include "cuda/general.h"
#include "cuda/layers/cuda_layers.h"
#include "support/memory.h"

namespace fenwick {
namespace {

namespace general = cuda::general;

constexpr Backend kEmulated = {general::Forward, general::Backward, general::Step,
                               general::ForwardWorkspaceBytes, general::BackwardWorkspaceBytes};

constexpr LayerBackend kEmulatedLayers = {
    .causal_conv1d = cuda::CausalConv1d,
    .causal_conv1d_backward = cuda::CausalConv1dBackward,
    .gated_rms_norm = cuda::GatedRmsNorm,
    .gated_rms_norm_backward = cuda::GatedRmsNormBackward,
    .l2_norm = cuda::L2Norm,
    .l2_norm_backward = cuda::L2NormBackward,
    .causal_conv1d_backward_workspace_bytes = cuda::CausalConv1dBackwardWorkspaceBytes,
    .gated_rms_norm_backward_workspace_bytes = cuda::GatedRmsNormBackwardWorkspaceBytes,
};

class EmulatedMemory : public support::Memory {
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

const Backend* CudaBackend() { return &kEmulated; }
const LayerBackend* CudaLayerBackend() { return &kEmulatedLayers; }

namespace support {
Memory& CudaMemory() {
  static EmulatedMemory memory;
  return memory;
}
}  // namespace support

}  // namespace fenwick
