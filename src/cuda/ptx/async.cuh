// Copies and prefetches that no thread waits for at once, for any architecture from sm_80 on.
#pragma once

namespace fenwick::cuda::ptx {

// Four floats from global to shared memory, or zeros; both addresses are multiples of 16 bytes.
__device__ __forceinline__ void CopyAsync(float* to, const float* from, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(exists ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void WaitForCopies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Asks for the 128 bytes around an address to be brought into the L2 cache.
__device__ __forceinline__ void Prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace fenwick::cuda::ptx
