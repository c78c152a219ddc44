#include "cuda/select.h"

#include <atomic>

#include "cuda/hopper.h"

namespace fenwick::cuda {
namespace {

std::atomic<KernelChoice> g_choice{KernelChoice::kAuto};

}  // namespace

void ForceKernels(KernelChoice choice) { g_choice.store(choice); }
KernelChoice ForcedKernels() { return g_choice.load(); }

Kernels SelectForward(const Inputs& inputs, const StateView& final_state,
                      const DeviceTraits& device, KernelChoice choice) {
  if (choice == KernelChoice::kGeneral) return Kernels::kGeneral;
  return hopper::ForwardFits(inputs, final_state, device) ? Kernels::kHopper : Kernels::kGeneral;
}

Kernels SelectBackward(const Inputs& inputs, const StateGradView& d_final_state,
                       const Gradients& gradients, const DeviceTraits& device,
                       KernelChoice choice) {
  if (choice == KernelChoice::kGeneral) return Kernels::kGeneral;
  return hopper::BackwardFits(inputs, d_final_state, gradients, device) ? Kernels::kHopper
                                                                        : Kernels::kGeneral;
}

}  // namespace fenwick::cuda
