// The public layers: validate, then call the backend of the device.
#include "fenwick/layers.h"

#include <string>

#include "core/layer_backend.h"
#include "core/require.h"

namespace fenwick {
namespace {

const LayerBackend& BackendFor(Device device) {
  const LayerBackend* backend = device == Device::kCPU ? &CpuLayerBackend() : CudaLayerBackend();
  if (backend == nullptr) {
    Fail("device", "one that this build and machine have layer kernels for", "cuda");
  }
  return *backend;
}

// The view has the shape and type of `like`.
void RequireLike(const std::string& name, const TensorView& view, const std::string& like_name,
                 const TensorView& like) {
  RequireGiven(name, view);
  bool same = view.rank == like.rank;
  for (int i = 0; same && i < view.rank; ++i) same = view.size(i) == like.size(i);
  if (!same) Fail(name, "the shape of " + like_name + ", " + ShapeText(like), ShapeText(view));
  RequireDType(name, view, like.dtype);
  RequireMemory(name, view);
}

void RequireWritableLike(const std::string& name, const TensorView& view,
                         const std::string& like_name, const TensorView& like) {
  RequireLike(name, view, like_name, like);
  RequireDistinctElements(name, view);
}

// The same where the view is given; it may then only be given where its input is.
void RequireGradient(const std::string& name, const TensorView& view, const std::string& like_name,
                     const TensorView& like) {
  if (!view.given()) return;
  if (!like.given()) RequireNotGiven(name, view, ("without " + like_name).c_str());
  RequireWritableLike(name, view, like_name, like);
}

void ValidateConv(const CausalConv& inputs) {
  const TensorView& x = inputs.x;
  RequireShape("x", "[B, T, D]", x, {kAnySize, kAnySize, kAnySize});
  RequireFloating("x", x.dtype);
  RequireMemory("x", x);
  const std::int64_t channels = x.size(2);
  const TensorView& weight = inputs.weight;
  RequireShape("weight", "[D, W]", weight, {channels, kAnySize});
  RequireStorageOrWide("weight", weight, x.dtype);
  RequireMemory("weight", weight);
  const std::int64_t width = weight.size(1);
  if (width < 1 || width > kMaxConvWidth) {
    Fail("weight", "width W in 1.." + std::to_string(kMaxConvWidth), std::to_string(width));
  }
  if (inputs.bias.given()) {
    RequireShape("bias", "[D]", inputs.bias, {channels});
    RequireStorageOrWide("bias", inputs.bias, x.dtype);
    RequireMemory("bias", inputs.bias);
  }
  RequireSequences(inputs.cu_seqlens, x.size(0), x.size(1));
  if (inputs.initial_state.given()) {
    RequireShape("initial_state", "[N, D, W-1]", inputs.initial_state,
                 {inputs.num_sequences(), channels, width - 1});
    RequireDType("initial_state", inputs.initial_state, x.dtype);
    RequireMemory("initial_state", inputs.initial_state);
  }
}

void ValidateConvGradients(const CausalConv& inputs, const CausalConvGradients& gradients) {
  RequireGradient("d_x", gradients.x, "x", inputs.x);
  RequireGradient("d_weight", gradients.weight, "weight", inputs.weight);
  RequireGradient("d_bias", gradients.bias, "bias", inputs.bias);
  RequireGradient("d_initial_state", gradients.initial_state, "initial_state",
                  inputs.initial_state);
}

void ValidateRows(const TensorView& x) {
  RequireGiven("x", x);
  if (x.rank < 1) Fail("x", "at least 1 axis", "none");
  if (x.size(x.rank - 1) < 1) Fail("x", "a last axis of at least 1", ShapeText(x));
  RequireFloating("x", x.dtype);
  RequireMemory("x", x);
}

void RequireEpsilon(double eps) {
  // The negation also catches NaN.
  if (!(eps >= 0)) Fail("eps", "a number >= 0", std::to_string(eps));
}

void ValidateNorm(const GatedNorm& inputs) {
  ValidateRows(inputs.x);
  if (inputs.gate.given()) RequireLike("gate", inputs.gate, "x", inputs.x);
  RequireShape("weight", "[D]", inputs.weight, {inputs.x.size(inputs.x.rank - 1)});
  RequireStorageOrWide("weight", inputs.weight, inputs.x.dtype);
  RequireMemory("weight", inputs.weight);
  RequireEpsilon(inputs.eps);
}

void ValidateNormGradients(const GatedNorm& inputs, const GatedNormGradients& gradients) {
  RequireGradient("d_x", gradients.x, "x", inputs.x);
  RequireGradient("d_gate", gradients.gate, "gate", inputs.gate);
  RequireGradient("d_weight", gradients.weight, "weight", inputs.weight);
}

}  // namespace

void CausalConv1d(const CausalConv& inputs, const TensorView& y, const TensorView& final_state,
                  const Context& context) {
  const LayerBackend& backend = BackendFor(context.device);
  RequireThreads("num_threads", context.num_threads);
  ValidateConv(inputs);
  RequireWritableLike("y", y, "x", inputs.x);
  if (final_state.given()) {
    RequireShape("final_state", "[N, D, W-1]", final_state,
                 {inputs.num_sequences(), inputs.x.size(2), inputs.weight.size(1) - 1});
    RequireDType("final_state", final_state, inputs.x.dtype);
    RequireMemory("final_state", final_state);
    RequireDistinctElements("final_state", final_state);
  }
  backend.causal_conv1d(inputs, y, final_state, context);
}

void CausalConv1dBackward(const CausalConv& inputs, const TensorView& d_y,
                          const CausalConvGradients& gradients, const Context& context) {
  const LayerBackend& backend = BackendFor(context.device);
  RequireThreads("num_threads", context.num_threads);
  ValidateConv(inputs);
  RequireLike("d_y", d_y, "x", inputs.x);
  ValidateConvGradients(inputs, gradients);
  RequireWorkspace(context, backend.causal_conv1d_backward_workspace_bytes(inputs, gradients));
  backend.causal_conv1d_backward(inputs, d_y, gradients, context);
}

void GatedRmsNorm(const GatedNorm& inputs, const TensorView& y, const Context& context) {
  const LayerBackend& backend = BackendFor(context.device);
  RequireThreads("num_threads", context.num_threads);
  ValidateNorm(inputs);
  RequireWritableLike("y", y, "x", inputs.x);
  if (inputs.x.num_elements() == 0) return;
  backend.gated_rms_norm(inputs, y, context);
}

void GatedRmsNormBackward(const GatedNorm& inputs, const TensorView& d_y,
                          const GatedNormGradients& gradients, const Context& context) {
  const LayerBackend& backend = BackendFor(context.device);
  RequireThreads("num_threads", context.num_threads);
  ValidateNorm(inputs);
  RequireLike("d_y", d_y, "x", inputs.x);
  ValidateNormGradients(inputs, gradients);
  RequireWorkspace(context, backend.gated_rms_norm_backward_workspace_bytes(inputs, gradients));
  backend.gated_rms_norm_backward(inputs, d_y, gradients, context);
}

void L2Norm(const TensorView& x, double eps, const TensorView& y, const Context& context) {
  const LayerBackend& backend = BackendFor(context.device);
  RequireThreads("num_threads", context.num_threads);
  ValidateRows(x);
  RequireEpsilon(eps);
  RequireWritableLike("y", y, "x", x);
  if (x.num_elements() == 0) return;
  backend.l2_norm(x, eps, y, context);
}

void L2NormBackward(const TensorView& x, double eps, const TensorView& d_y, const TensorView& d_x,
                    const Context& context) {
  const LayerBackend& backend = BackendFor(context.device);
  RequireThreads("num_threads", context.num_threads);
  ValidateRows(x);
  RequireEpsilon(eps);
  RequireLike("d_y", d_y, "x", x);
  RequireWritableLike("d_x", d_x, "x", x);
  if (x.num_elements() == 0) return;
  backend.l2_norm_backward(x, eps, d_y, d_x, context);
}

std::size_t CausalConv1dBackwardWorkspaceBytes(const CausalConv& inputs,
                                               const CausalConvGradients& gradients,
                                               Device device) {
  const LayerBackend& backend = BackendFor(device);
  ValidateConv(inputs);
  ValidateConvGradients(inputs, gradients);
  return backend.causal_conv1d_backward_workspace_bytes(inputs, gradients);
}

std::size_t GatedRmsNormBackwardWorkspaceBytes(const GatedNorm& inputs,
                                               const GatedNormGradients& gradients, Device device) {
  const LayerBackend& backend = BackendFor(device);
  ValidateNorm(inputs);
  ValidateNormGradients(inputs, gradients);
  return backend.gated_rms_norm_backward_workspace_bytes(inputs, gradients);
}

#if !defined(FENWICK_CUDA_LAYERS)
const LayerBackend* CudaLayerBackend() { return nullptr; }
#endif

}  // namespace fenwick
