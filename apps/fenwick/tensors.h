// torch tensors as the buffers of the core library: the program allocates with torch on any device
// and calls include/fenwick/ops.h directly.
#pragma once

#include <torch/torch.h>

#include "fenwick/ops.h"

namespace fenwick::app {

TensorView ViewOf(const torch::Tensor& tensor);  // undefined: not given

// A state in torch tensors; undefined: not given.
struct TorchState {
  torch::Tensor k, v, g, beta, nodes, position, base;
  std::int64_t max_position = 0;

  StateView View() const;
  StateGradView GradView() const;
};

// Where a call runs: device, stream and a workspace that is kept alive with it.
class TorchContext {
 public:
  TorchContext(torch::Device device, std::size_t workspace_bytes);
  const Context& get() const { return context_; }

 private:
  torch::Tensor workspace_;
  Context context_;
};

Device DeviceKind(torch::Device device);

// The three calls with their workspace.
void CallForward(const Inputs& inputs, const torch::Tensor& o, const TorchState& final_state);
void CallBackward(const Inputs& inputs, const torch::Tensor& d_o, const TorchState& d_final_state,
                  const Gradients& gradients);
void CallStep(const Inputs& inputs, const torch::Tensor& o);

}  // namespace fenwick::app
