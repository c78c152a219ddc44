// The public operators: validate, then call the backend of the device.
#include "fenwick/ops.h"

#include <atomic>
#include <string>
#include <thread>

#include "core/backend.h"
#include "core/require.h"
#include "core/validate.h"

namespace fenwick {
namespace {

std::atomic<int> g_num_threads{0};

const Backend* FindBackend(Device device) {
  return device == Device::kCPU ? &CpuBackend() : CudaBackend();
}

const Backend& BackendFor(Device device) {
  const Backend* backend = FindBackend(device);
  if (backend == nullptr) {
    throw Error("device: expected one that this build and machine have kernels for, got cuda");
  }
  return *backend;
}

bool NoTokens(const Inputs& inputs) { return inputs.q.size(0) == 0 || inputs.q.size(1) == 0; }

void ValidateBackwardShapes(const Inputs& inputs, const StateGradView& d_final_state,
                            const Gradients& gradients, Device device) {
  ValidateInputs(inputs, device);
  ValidateFinalStateGrad(inputs, d_final_state, device);
  ValidateGradients(inputs, gradients);
}

}  // namespace

void Forward(const Inputs& inputs, const TensorView& o, const StateView& final_state,
             const Context& context) {
  const Backend& backend = BackendFor(context.device);
  RequireThreads("num_threads", context.num_threads);
  ValidateInputs(inputs, context.device);
  ValidateOutput(inputs, o, "o", /*written=*/true);
  ValidateFinalState(inputs, final_state, context.device);
  if (NoTokens(inputs) && !final_state.given()) return;
  RequireWorkspace(context, backend.forward_workspace_bytes(inputs, final_state));
  backend.forward(inputs, o, final_state, context);
}

void Backward(const Inputs& inputs, const TensorView& d_o, const StateGradView& d_final_state,
              const Gradients& gradients, const Context& context) {
  const Backend& backend = BackendFor(context.device);
  RequireThreads("num_threads", context.num_threads);
  ValidateBackwardShapes(inputs, d_final_state, gradients, context.device);
  ValidateOutput(inputs, d_o, "d_o", /*written=*/false);
  if (NoTokens(inputs) && !gradients.initial_state.given()) return;
  RequireWorkspace(context, backend.backward_workspace_bytes(inputs, d_final_state, gradients));
  backend.backward(inputs, d_o, d_final_state, gradients, context);
}

void Step(const Inputs& inputs, const TensorView& o, const Context& context) {
  const Backend& backend = BackendFor(context.device);
  RequireThreads("num_threads", context.num_threads);
  ValidateStep(inputs, o, context.device);
  if (NoTokens(inputs)) return;
  backend.step(inputs, o, context);
}

std::size_t ForwardWorkspaceBytes(const Inputs& inputs, const StateView& final_state,
                                  Device device) {
  const Backend& backend = BackendFor(device);
  ValidateInputs(inputs, device);
  ValidateFinalState(inputs, final_state, device);
  return backend.forward_workspace_bytes(inputs, final_state);
}

std::size_t BackwardWorkspaceBytes(const Inputs& inputs, const StateGradView& d_final_state,
                                   const Gradients& gradients, Device device) {
  const Backend& backend = BackendFor(device);
  ValidateBackwardShapes(inputs, d_final_state, gradients, device);
  return backend.backward_workspace_bytes(inputs, d_final_state, gradients);
}

void SetNumThreads(int num_threads) {
  RequireThreads("num_threads", num_threads);
  g_num_threads = num_threads;
}

int GetNumThreads() {
  const int chosen = g_num_threads;
  if (chosen > 0) return chosen;
  const unsigned hardware = std::thread::hardware_concurrency();
  return hardware > 0 ? static_cast<int>(hardware) : 1;
}

bool DeviceAvailable(Device device) { return FindBackend(device) != nullptr; }

}  // namespace fenwick
