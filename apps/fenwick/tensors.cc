#include "apps/fenwick/tensors.h"

#include <algorithm>
#include <string>

namespace fenwick::app {
namespace {

DType DTypeOf(torch::ScalarType type) {
  switch (type) {
    case torch::kFloat32: return DType::kFloat32;
    case torch::kBFloat16: return DType::kBFloat16;
    case torch::kFloat16: return DType::kFloat16;
    case torch::kFloat64: return DType::kFloat64;
    case torch::kInt64: return DType::kInt64;
    default: throw Error(std::string("dtype: expected a float type, got ") + c10::toString(type));
  }
}

void* Stream(torch::Device device) {
  if (device.is_cpu()) return nullptr;
  const c10::impl::VirtualGuardImpl guard(device.type());
  return reinterpret_cast<void*>(guard.getStream(device).native_handle());
}

}  // namespace

TensorView ViewOf(const torch::Tensor& tensor) {
  TensorView view;
  if (!tensor.defined()) return view;
  view.data = tensor.data_ptr();
  view.dtype = DTypeOf(tensor.scalar_type());
  view.rank = static_cast<int>(tensor.dim());
  std::copy_n(tensor.sizes().begin(), view.rank, view.sizes.begin());
  std::copy_n(tensor.strides().begin(), view.rank, view.strides.begin());
  return view;
}

StateView TorchState::View() const {
  return {ViewOf(k),     ViewOf(v),        ViewOf(g),    ViewOf(beta),
          ViewOf(nodes), ViewOf(position), ViewOf(base), max_position};
}

StateGradView TorchState::GradView() const {
  return {ViewOf(k), ViewOf(v), ViewOf(g), ViewOf(beta), ViewOf(nodes)};
}

Device DeviceKind(torch::Device device) { return device.is_cuda() ? Device::kCUDA : Device::kCPU; }

TorchContext::TorchContext(torch::Device device, std::size_t workspace_bytes) {
  context_.device = DeviceKind(device);
  context_.stream = Stream(device);
  context_.workspace_bytes = workspace_bytes;
  if (workspace_bytes == 0) return;
  workspace_ = torch::empty({static_cast<std::int64_t>(workspace_bytes)},
                            torch::TensorOptions(torch::kUInt8).device(device));
  context_.workspace = workspace_.data_ptr();
}

void CallForward(const Inputs& inputs, const torch::Tensor& o, const TorchState& final_state) {
  const StateView view = final_state.View();
  const TorchContext context(o.device(),
                             ForwardWorkspaceBytes(inputs, view, DeviceKind(o.device())));
  Forward(inputs, ViewOf(o), view, context.get());
}

void CallBackward(const Inputs& inputs, const torch::Tensor& d_o, const TorchState& d_final_state,
                  const Gradients& gradients) {
  const StateGradView view = d_final_state.GradView();
  const TorchContext context(
      d_o.device(), BackwardWorkspaceBytes(inputs, view, gradients, DeviceKind(d_o.device())));
  Backward(inputs, ViewOf(d_o), view, gradients, context.get());
}

void CallStep(const Inputs& inputs, const torch::Tensor& o) {
  Step(inputs, ViewOf(o), TorchContext(o.device(), 0).get());
}

}  // namespace fenwick::app
