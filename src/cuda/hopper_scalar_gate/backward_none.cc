// No backward here yet: the general kernels run it.
#include "cuda/hopper.h"
#include "fenwick/error.h"

namespace fenwick::cuda::hopper {

bool BackwardFits(const Inputs&, const StateGradView&, const Gradients&, const DeviceTraits&) {
  return false;
}
std::size_t BackwardWorkspaceBytes(const Inputs&, const StateGradView&, const Gradients&,
                                   const DeviceTraits&) {
  throw Error("the Hopper kernels have no backward");
}
void Backward(const Inputs&, const TensorView&, const StateGradView&, const Gradients&,
              const Context&, const DeviceTraits&) {
  throw Error("the Hopper kernels have no backward");
}

}  // namespace fenwick::cuda::hopper
