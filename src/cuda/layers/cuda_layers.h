// The layers of fenwick/layers.h on CUDA, as their backend table sees them.
#pragma once

#include <cstddef>

#include "fenwick/layers.h"

namespace fenwick::cuda {

void CausalConv1d(const CausalConv& inputs, const TensorView& y, const TensorView& final_state,
                  const Context& context);
void CausalConv1dBackward(const CausalConv& inputs, const TensorView& d_y,
                          const CausalConvGradients& gradients, const Context& context);
std::size_t CausalConv1dBackwardWorkspaceBytes(const CausalConv& inputs,
                                               const CausalConvGradients& gradients);

void GatedRmsNorm(const GatedNorm& inputs, const TensorView& y, const Context& context);
void GatedRmsNormBackward(const GatedNorm& inputs, const TensorView& d_y,
                          const GatedNormGradients& gradients, const Context& context);
std::size_t GatedRmsNormBackwardWorkspaceBytes(const GatedNorm& inputs,
                                               const GatedNormGradients& gradients);

void L2Norm(const TensorView& x, double eps, const TensorView& y, const Context& context);
void L2NormBackward(const TensorView& x, double eps, const TensorView& d_y, const TensorView& d_x,
                    const Context& context);

}  // namespace fenwick::cuda
