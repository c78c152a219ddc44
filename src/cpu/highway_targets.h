// The instruction sets that the CPU kernels are compiled for. Include it before any header of
// Highway.
#pragma once

// SSSE3 adds nothing over the baseline that these kernels use. The microkernels keep arrays of
// vectors, which the types of SVE and RVV, without a size, do not allow.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
