// What a backend provides for the layers. layers.cc validates, then calls through this table.
#pragma once

#include <cstddef>

#include "fenwick/layers.h"

namespace fenwick {

// Views of rank 1 to kMaxRank in the norms. Nothing is called without elements to compute, except
// that a final state or a gradient of weights may be all there is to write.
struct LayerBackend {
  void (*causal_conv1d)(const CausalConv&, const TensorView& y, const TensorView& final_state,
                        const Context&);
  void (*causal_conv1d_backward)(const CausalConv&, const TensorView& d_y,
                                 const CausalConvGradients&, const Context&);
  void (*gated_rms_norm)(const GatedNorm&, const TensorView& y, const Context&);
  void (*gated_rms_norm_backward)(const GatedNorm&, const TensorView& d_y,
                                  const GatedNormGradients&, const Context&);
  void (*l2_norm)(const TensorView& x, double eps, const TensorView& y, const Context&);
  void (*l2_norm_backward)(const TensorView& x, double eps, const TensorView& d_y,
                           const TensorView& d_x, const Context&);
  std::size_t (*causal_conv1d_backward_workspace_bytes)(const CausalConv&,
                                                        const CausalConvGradients&);
  std::size_t (*gated_rms_norm_backward_workspace_bytes)(const GatedNorm&,
                                                         const GatedNormGradients&);
};

const LayerBackend& CpuLayerBackend();
// Null where the build has no CUDA layers or the machine no usable GPU. A build whose CUDA sources
// define it says so with FENWICK_CUDA_LAYERS.
const LayerBackend* CudaLayerBackend();

}  // namespace fenwick
