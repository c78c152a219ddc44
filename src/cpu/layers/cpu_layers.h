// Entry points of the CPU layers. Arguments are valid (core/layers.cc).
#pragma once

#include "fenwick/layers.h"

namespace fenwick::cpu {

void CausalConv1d(const CausalConv& inputs, const TensorView& y, const TensorView& final_state,
                  const Context& context);
void CausalConv1dBackward(const CausalConv& inputs, const TensorView& d_y,
                          const CausalConvGradients& gradients, const Context& context);
void GatedRmsNorm(const GatedNorm& inputs, const TensorView& y, const Context& context);
void GatedRmsNormBackward(const GatedNorm& inputs, const TensorView& d_y,
                          const GatedNormGradients& gradients, const Context& context);
void L2Norm(const TensorView& x, double eps, const TensorView& y, const Context& context);
void L2NormBackward(const TensorView& x, double eps, const TensorView& d_y, const TensorView& d_x,
                    const Context& context);

inline int NumThreads(const Context& context) {
  return context.num_threads > 0 ? context.num_threads : GetNumThreads();
}

// First byte of the element that lies `offset` elements into the view.
inline std::byte* At(const TensorView& view, std::int64_t offset) {
  return static_cast<std::byte*>(view.data) + offset * ElementSize(view.dtype);
}

}  // namespace fenwick::cpu
