// The current CUDA device, as far as plans depend on it.
#pragma once

#include "cuda/select.h"

namespace fenwick::cuda {

// Traits of the calling thread's current device; queried once per device, never synchronises.
const DeviceTraits& CurrentDevice();

// True where a driver and a device of compute capability 8.0 or newer are present.
bool AnyUsableDevice();

}  // namespace fenwick::cuda
