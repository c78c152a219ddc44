// torch.ops.fenwick.causal_conv1d*, .gated_rms_norm* and .l2_norm*: schemas and kernels over
// fenwick/layers.h.
#include <optional>
#include <tuple>

#include "boxed.h"
#include "fenwick/layers.h"
#include "views.h"

namespace fenwick_torch {
namespace {

using fenwick::TensorView;

// View of an input on the device of `x`.
TensorView Input(const Tensor& tensor, const char* name, const Tensor& x) {
  CheckDevice(tensor, name, x, "x");
  return ReadView(tensor, name);
}

TensorView OptionalInput(const std::optional<Tensor>& tensor, const char* name, const Tensor& x) {
  return tensor.has_value() ? Input(*tensor, name, x) : TensorView();
}

std::optional<Tensor> WithDenseLastAxis(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? std::optional(fenwick_torch::WithDenseLastAxis(*tensor))
                            : std::nullopt;
}

Tensor EmptyLike(const Tensor& tensor) { return torch::stable::new_empty(tensor, tensor.sizes()); }

// Gradient of an optional input: shaped like it, or without elements.
Tensor GradientLike(const std::optional<Tensor>& tensor, const Tensor& x) {
  const std::int64_t none[] = {0};
  return tensor.has_value() ? EmptyLike(*tensor) : torch::stable::new_empty(x, {none, 1});
}

TensorView GradientView(const std::optional<Tensor>& input, const Tensor& gradient,
                        const char* name) {
  return input.has_value() ? WriteView(gradient, name) : TensorView();
}

// The tensors of a convolution, with the layout that the core wants, and its views.
struct Conv {
  Conv(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
       const std::optional<Tensor>& initial_state, const std::optional<Tensor>& cu_seqlens,
       bool silu)
      : x(fenwick_torch::WithDenseLastAxis(x)),
        weight(fenwick_torch::WithDenseLastAxis(weight)),
        bias(WithDenseLastAxis(bias)),
        initial_state(WithDenseLastAxis(initial_state)),
        offsets(HostOffsets(cu_seqlens)) {
    inputs.x = ReadView(this->x, "x");
    inputs.weight = Input(this->weight, "weight", x);
    inputs.bias = OptionalInput(this->bias, "bias", x);
    inputs.initial_state = OptionalInput(this->initial_state, "initial_state", x);
    inputs.cu_seqlens = offsets;
    inputs.silu = silu;
  }

  Tensor x, weight;
  std::optional<Tensor> bias, initial_state;
  std::vector<std::int64_t> offsets;
  fenwick::CausalConv inputs;
};

Tensor CausalConv1d(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                    const std::optional<Tensor>& initial_state,
                    const std::optional<Tensor>& cu_seqlens, bool silu) {
  const Conv conv(x, weight, bias, initial_state, cu_seqlens, silu);
  const Tensor y = EmptyLike(conv.x);
  const CallContext context(x);
  fenwick::CausalConv1d(conv.inputs, WriteView(y, "y"), {}, context.get());
  return y;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> CausalConv1dBackward(
    const Tensor& d_y, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& initial_state, const std::optional<Tensor>& cu_seqlens,
    bool silu) {
  const Conv conv(x, weight, bias, initial_state, cu_seqlens, silu);
  const Tensor dense_d_y = fenwick_torch::WithDenseLastAxis(d_y);
  const Tensor d_x = EmptyLike(conv.x), d_weight = EmptyLike(conv.weight);
  const Tensor d_bias = GradientLike(bias, x), d_state = GradientLike(initial_state, x);
  const fenwick::CausalConvGradients gradients{
      .x = WriteView(d_x, "d_x"),
      .weight = WriteView(d_weight, "d_weight"),
      .bias = GradientView(bias, d_bias, "d_bias"),
      .initial_state = GradientView(initial_state, d_state, "d_initial_state")};
  CallContext context(x);
  context.Reserve(
      fenwick::CausalConv1dBackwardWorkspaceBytes(conv.inputs, gradients, context.device()));
  fenwick::CausalConv1dBackward(conv.inputs, Input(dense_d_y, "d_y", x), gradients, context.get());
  return {d_x, d_weight, d_bias, d_state};
}

Tensor CausalConv1dStep(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                        const Tensor& state, bool silu) {
  const Conv conv(x, weight, bias, std::nullopt, std::nullopt, silu);
  fenwick::CausalConv inputs = conv.inputs;
  CheckDevice(state, "state", x, "x");
  inputs.initial_state = WriteView(state, "state");
  const Tensor y = EmptyLike(conv.x);
  const CallContext context(x);
  fenwick::CausalConv1d(inputs, WriteView(y, "y"), inputs.initial_state, context.get());
  return y;
}

// The tensors of a gated norm with the layout that the core wants, and its views.
struct Norm {
  Norm(const Tensor& x, const std::optional<Tensor>& gate, const Tensor& weight, double eps,
       bool norm_before_gate)
      : x(fenwick_torch::WithDenseLastAxis(x)),
        weight(fenwick_torch::WithDenseLastAxis(weight)),
        gate(WithDenseLastAxis(gate)) {
    inputs.x = ReadView(this->x, "x");
    inputs.gate = OptionalInput(this->gate, "gate", x);
    inputs.weight = Input(this->weight, "weight", x);
    inputs.eps = eps;
    inputs.norm_before_gate = norm_before_gate;
  }

  Tensor x, weight;
  std::optional<Tensor> gate;
  fenwick::GatedNorm inputs;
};

Tensor GatedRmsNorm(const Tensor& x, const std::optional<Tensor>& gate, const Tensor& weight,
                    double eps, bool norm_before_gate) {
  const Norm norm(x, gate, weight, eps, norm_before_gate);
  const Tensor y = EmptyLike(norm.x);
  const CallContext context(x);
  fenwick::GatedRmsNorm(norm.inputs, WriteView(y, "y"), context.get());
  return y;
}

std::tuple<Tensor, Tensor, Tensor> GatedRmsNormBackward(const Tensor& d_y, const Tensor& x,
                                                        const std::optional<Tensor>& gate,
                                                        const Tensor& weight, double eps,
                                                        bool norm_before_gate) {
  const Norm norm(x, gate, weight, eps, norm_before_gate);
  const Tensor dense_d_y = fenwick_torch::WithDenseLastAxis(d_y);
  const Tensor d_x = EmptyLike(norm.x), d_weight = EmptyLike(norm.weight);
  const Tensor d_gate = GradientLike(gate, x);
  const fenwick::GatedNormGradients gradients{.x = WriteView(d_x, "d_x"),
                                              .gate = GradientView(gate, d_gate, "d_gate"),
                                              .weight = WriteView(d_weight, "d_weight")};
  CallContext context(x);
  context.Reserve(
      fenwick::GatedRmsNormBackwardWorkspaceBytes(norm.inputs, gradients, context.device()));
  fenwick::GatedRmsNormBackward(norm.inputs, Input(dense_d_y, "d_y", x), gradients, context.get());
  return {d_x, d_gate, d_weight};
}

Tensor L2Norm(const Tensor& x, double eps) {
  const Tensor dense_x = fenwick_torch::WithDenseLastAxis(x);
  const TensorView x_view = ReadView(dense_x, "x");  // before y: what is wrong with both is x's
  const Tensor y = EmptyLike(x);
  const CallContext context(x);
  fenwick::L2Norm(x_view, eps, WriteView(y, "y"), context.get());
  return y;
}

Tensor L2NormBackward(const Tensor& d_y, const Tensor& x, double eps) {
  const Tensor dense_x = fenwick_torch::WithDenseLastAxis(x);
  const Tensor dense_d_y = fenwick_torch::WithDenseLastAxis(d_y);
  const Tensor d_x = EmptyLike(x);
  const CallContext context(x);
  fenwick::L2NormBackward(ReadView(dense_x, "x"), eps, Input(dense_d_y, "d_y", x),
                          WriteView(d_x, "d_x"), context.get());
  return d_x;
}

void RegisterKernels(torch::stable::detail::StableLibrary& library) {
  library.impl("causal_conv1d", TORCH_BOX(&CausalConv1d));
  library.impl("causal_conv1d_backward", TORCH_BOX(&CausalConv1dBackward));
  library.impl("causal_conv1d_step", TORCH_BOX(&CausalConv1dStep));
  library.impl("gated_rms_norm", TORCH_BOX(&GatedRmsNorm));
  library.impl("gated_rms_norm_backward", TORCH_BOX(&GatedRmsNormBackward));
  library.impl("l2_norm", TORCH_BOX(&L2Norm));
  library.impl("l2_norm_backward", TORCH_BOX(&L2NormBackward));
}

}  // namespace
}  // namespace fenwick_torch

STABLE_TORCH_LIBRARY_FRAGMENT(fenwick, library) {
  library.def(
      "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, "
      "Tensor? cu_seqlens=None, bool silu=True) -> Tensor");
  // Gradients of inputs that are None have no elements.
  library.def(
      "causal_conv1d_backward(Tensor d_y, Tensor x, Tensor weight, Tensor? bias, "
      "Tensor? initial_state, Tensor? cu_seqlens, bool silu) -> "
      "(Tensor d_x, Tensor d_weight, Tensor d_bias, Tensor d_initial_state)");
  library.def(
      "causal_conv1d_step(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, "
      "bool silu=True) -> Tensor");
  library.def(
      "gated_rms_norm(Tensor x, Tensor? gate, Tensor weight, float eps, bool norm_before_gate) -> "
      "Tensor");
  library.def(
      "gated_rms_norm_backward(Tensor d_y, Tensor x, Tensor? gate, Tensor weight, float eps, "
      "bool norm_before_gate) -> (Tensor d_x, Tensor d_gate, Tensor d_weight)");
  library.def("l2_norm(Tensor x, float eps=1e-6) -> Tensor");
  library.def("l2_norm_backward(Tensor d_y, Tensor x, float eps) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(fenwick, CPU, library) { fenwick_torch::RegisterKernels(library); }

#ifdef USE_CUDA
STABLE_TORCH_LIBRARY_IMPL(fenwick, CUDA, library) { fenwick_torch::RegisterKernels(library); }
#endif
