#include "core/layer_backend.h"

#include "cuda/device.h"
#include "cuda/layers/cuda_layers.h"

namespace fenwick {

const LayerBackend* CudaLayerBackend() {
  static constexpr LayerBackend kBackend = {
      .causal_conv1d = cuda::CausalConv1d,
      .causal_conv1d_backward = cuda::CausalConv1dBackward,
      .gated_rms_norm = cuda::GatedRmsNorm,
      .gated_rms_norm_backward = cuda::GatedRmsNormBackward,
      .l2_norm = cuda::L2Norm,
      .l2_norm_backward = cuda::L2NormBackward,
      .causal_conv1d_backward_workspace_bytes = cuda::CausalConv1dBackwardWorkspaceBytes,
      .gated_rms_norm_backward_workspace_bytes = cuda::GatedRmsNormBackwardWorkspaceBytes,
  };
  return cuda::AnyUsableDevice() ? &kBackend : nullptr;
}

}  // namespace fenwick
