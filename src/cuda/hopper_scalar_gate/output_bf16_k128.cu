#include "cuda/hopper_scalar_gate/launch_output.cuh"

namespace fenwick::cuda::hopper {
template void LaunchOutput<BFloat16, 128>(const ForwardParams&, const ForwardMaps&, cudaStream_t);
}  // namespace fenwick::cuda::hopper
