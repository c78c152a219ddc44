#include "core/layer_backend.h"

#include "cpu/layers/cpu_layers.h"

namespace fenwick {

const LayerBackend& CpuLayerBackend() {
  static constexpr LayerBackend kBackend = {
      .causal_conv1d = cpu::CausalConv1d,
      .causal_conv1d_backward = cpu::CausalConv1dBackward,
      .gated_rms_norm = cpu::GatedRmsNorm,
      .gated_rms_norm_backward = cpu::GatedRmsNormBackward,
      .l2_norm = cpu::L2Norm,
      .l2_norm_backward = cpu::L2NormBackward,
      .causal_conv1d_backward_workspace_bytes =
          [](const CausalConv&, const CausalConvGradients&) -> std::size_t { return 0; },
      .gated_rms_norm_backward_workspace_bytes =
          [](const GatedNorm&, const GatedNormGradients&) -> std::size_t { return 0; },
  };
  return kBackend;
}

}  // namespace fenwick
