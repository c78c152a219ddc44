// Launch of pass 2.
#pragma once

#include <algorithm>

#include "cuda/hopper_scalar_gate/kernels.h"
#include "cuda/hopper_scalar_gate/output.cuh"
#include "cuda/launch.h"

namespace fenwick::cuda::hopper {

template <typename Element, int kKeySize>
void LaunchOutput(const ForwardParams& p, const ForwardMaps& maps, cudaStream_t stream) {
  const int heads_in_group = std::min(p.heads_per_group, p.num_heads);
  const std::int64_t runs =
      (heads_in_group + p.heads_per_block - 1) / p.heads_per_block * (p.num_heads / heads_in_group);
  const std::int64_t items = runs * p.layout.num_chunks;
  LaunchDependent("output", OutputKernel<Element, kKeySize>,
                  std::min<std::int64_t>(items, p.multiprocessors), OutputShape<kKeySize>::kThreads,
                  OutputShape<kKeySize>::kSharedBytes, stream, maps.q, maps.k, maps.v, maps.o,
                  maps.scales, p, static_cast<int>(items));
}

}  // namespace fenwick::cuda::hopper
