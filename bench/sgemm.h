// The yardstick of the CPU benchmarks: the rate of a large float32 product on the same threads.
#pragma once

namespace fenwick::bench {

inline constexpr double kSgemmFlops = 2.0 * 1024 * 1024 * 1024;

// Floating point operations per second of one C = A B with matrices of 1024 x 1024, on
// `num_threads` threads, from one timed run (about 20 ms on two cores).
double SgemmRate(int num_threads);

}  // namespace fenwick::bench
