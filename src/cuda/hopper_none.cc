// Stands in for src/cuda/hopper_* until a build includes it: no call fits.
#include "cuda/hopper.h"
#include "fenwick/error.h"

namespace fenwick::cuda::hopper {

bool ForwardFits(const Inputs&, const StateView&, const DeviceTraits&) { return false; }
std::size_t ForwardWorkspaceBytes(const Inputs&, const StateView&, const DeviceTraits&) {
  throw Error("this build has no Hopper kernels");
}
void Forward(const Inputs&, const TensorView&, const StateView&, const Context&,
             const DeviceTraits&) {
  throw Error("this build has no Hopper kernels");
}
bool BackwardFits(const Inputs&, const StateGradView&, const Gradients&, const DeviceTraits&) {
  return false;
}
std::size_t BackwardWorkspaceBytes(const Inputs&, const StateGradView&, const Gradients&,
                                   const DeviceTraits&) {
  throw Error("this build has no Hopper kernels");
}
void Backward(const Inputs&, const TensorView&, const StateGradView&, const Gradients&,
              const Context&, const DeviceTraits&) {
  throw Error("this build has no Hopper kernels");
}

void AimWorkspaceAt(std::size_t) {}

}  // namespace fenwick::cuda::hopper
