// Picks the operator and the arithmetic of the general kernels.
#include "cuda/general.h"

#include "cuda/general/entries.h"

namespace fenwick::cuda::general {
namespace {

// f.template operator()<Math>() for the arithmetic of a storage type: float64 and float32 are
// computed as such; 16-bit types on tensor cores, in tf32 with float32 sums.
template <typename F>
auto WithMath(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat64: return f.template operator()<FmaMath<double>>();
    case DType::kFloat32: return f.template operator()<FmaMath<float>>();
    default: return f.template operator()<TensorMath>();
  }
}

bool IsDelta(const Inputs& inputs) { return inputs.transition == Transition::kGatedDelta; }

}  // namespace

std::size_t ForwardWorkspaceBytes(const Inputs& inputs, const StateView& final_state) {
  return WithMath(inputs.q.dtype, [&]<typename Math>() {
    return IsDelta(inputs) ? DeltaForwardBytes<Math>(inputs, final_state)
                           : ScalarForwardBytes<Math>(inputs);
  });
}

void Forward(const Inputs& inputs, const TensorView& o, const StateView& final_state,
             const Context& context) {
  WithMath(inputs.q.dtype, [&]<typename Math>() {
    if (IsDelta(inputs)) {
      DeltaForward<Math>(inputs, o, final_state, context);
    } else {
      ScalarForward<Math>(inputs, o, final_state, context);
    }
  });
}

std::size_t BackwardWorkspaceBytes(const Inputs& inputs, const StateGradView& d_final_state,
                                   const Gradients& /*gradients*/) {
  return WithMath(inputs.q.dtype, [&]<typename Math>() {
    return IsDelta(inputs) ? DeltaBackwardBytes<Math>(inputs, d_final_state)
                           : ScalarBackwardBytes<Math>(inputs);
  });
}

void Backward(const Inputs& inputs, const TensorView& d_o, const StateGradView& d_final_state,
              const Gradients& gradients, const Context& context) {
  WithMath(inputs.q.dtype, [&]<typename Math>() {
    if (IsDelta(inputs)) {
      DeltaBackward<Math>(inputs, d_o, d_final_state, gradients, context);
    } else {
      ScalarBackward<Math>(inputs, d_o, d_final_state, gradients, context);
    }
  });
}

void Step(const Inputs& inputs, const TensorView& o, const Context& context) {
  const auto step = [&]<typename T>() {
    if (IsDelta(inputs)) {
      DeltaStep<T>(inputs, o, context);
    } else {
      ScalarStep<T>(inputs, o, context);
    }
  };
  if (inputs.q.dtype == DType::kFloat64) {
    step.template operator()<double>();
  } else {
    step.template operator()<float>();
  }
}

}  // namespace fenwick::cuda::general
