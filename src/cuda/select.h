// Which CUDA kernels run a call. Pure host code, no environment: a function of the call's shapes,
// of the device, and of a choice that tests may force.
//
//   kGeneral  every shape, type and feature, sm_80 and newer           (src/cuda/general)
//   kHopper   scalar gate, 16-bit storage, tile-shaped K and V, sm_90a (src/cuda/hopper_*)
#pragma once

#include <cstddef>

#include "fenwick/ops.h"

namespace fenwick::cuda {

enum class Kernels { kGeneral, kHopper };

// What the choice depends on. Filled by CurrentDevice() (device.h), or by hand in tests.
struct DeviceTraits {
  int major = 0;  // compute capability
  int minor = 0;
  int multiprocessors = 0;
  std::size_t shared_memory_bytes = 0;  // most that one block may ask for
  std::size_t l2_bytes = 0;
};

enum class KernelChoice { kAuto, kGeneral, kHopper };

// Forces every later call of the process onto one family where it can run the call at all (kHopper
// falls back to general kernels on shapes outside its tiles). For tests and benchmarks.
void ForceKernels(KernelChoice choice);
KernelChoice ForcedKernels();

Kernels SelectForward(const Inputs& inputs, const StateView& final_state,
                      const DeviceTraits& device, KernelChoice choice);
Kernels SelectBackward(const Inputs& inputs, const StateGradView& d_final_state,
                       const Gradients& gradients, const DeviceTraits& device, KernelChoice choice);

}  // namespace fenwick::cuda
