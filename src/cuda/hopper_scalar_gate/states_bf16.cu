#include "cuda/hopper_scalar_gate/launch_states.cuh"

namespace fenwick::cuda::hopper {
template void LaunchStates<BFloat16>(const ForwardParams&, DType, const ForwardMaps&, cudaStream_t);
}  // namespace fenwick::cuda::hopper
