// src/cuda/ptx/wgmma.cuh for the emulator.
#pragma once

#include "emulator.h"

namespace fenwick::cuda::ptx {

using emulator::WgmmaCommit;

inline void WgmmaFence() {}
template <int kPending>
void WgmmaWait() {
  emulator::WgmmaWait(kPending);
}
template <typename Registers>
void PinRegisters(Registers&) {}

template <typename Element, bool kTransposeA, bool kTransposeB>
void WgmmaShared(float (&d)[32], std::uint64_t a, std::uint64_t b, bool accumulate) {
  emulator::WgmmaStart({.d = d,
                        .columns = 64,
                        .bfloat16 = Element::kIsBFloat16,
                        .transpose_a = kTransposeA,
                        .transpose_b = kTransposeB,
                        .accumulate = accumulate,
                        .registers = false,
                        .fragment = {},
                        .a = a,
                        .b = b});
}

template <typename Element, bool kTransposeB, int kCount>
void WgmmaRegisters(float (&d)[kCount], const std::uint32_t (&a)[4], std::uint64_t b,
                    bool accumulate) {
  emulator::WgmmaStart({.d = d,
                        .columns = 2 * kCount,
                        .bfloat16 = Element::kIsBFloat16,
                        .transpose_a = false,
                        .transpose_b = kTransposeB,
                        .accumulate = accumulate,
                        .registers = true,
                        .fragment = {a[0], a[1], a[2], a[3]},
                        .a = 0,
                        .b = b});
}

}  // namespace fenwick::cuda::ptx
