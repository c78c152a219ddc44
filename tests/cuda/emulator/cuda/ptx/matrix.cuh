// src/cuda/ptx/matrix.cuh for the emulator. Lanes 8 i .. 8 i + 7 give the rows of matrix i; lane l
// holds elements 2 (l % 4), + 1 of row l / 4 of each.
#pragma once

#include "emulator.h"

namespace fenwick::cuda::ptx {

inline void LoadMatrix4(std::uint32_t (&r)[4], std::uint32_t shared) {
  const auto rows = emulator::Gather(shared);
  const int lane = emulator::Lane();
  for (int i = 0; i < 4; ++i) {
    const auto row = static_cast<std::uint32_t>(rows[8 * i + lane / 4]);
    std::memcpy(&r[i], emulator::Shared(row, 16, 16) + lane % 4 * 4, 4);
  }
  emulator::SyncWarp();
}

inline void LoadMatrix4Transposed(std::uint32_t (&r)[4], std::uint32_t shared) {
  const auto rows = emulator::Gather(shared);
  const int lane = emulator::Lane();
  for (int i = 0; i < 4; ++i) {
    std::uint16_t pair[2];
    for (int j = 0; j < 2; ++j) {
      const auto row = static_cast<std::uint32_t>(rows[8 * i + 2 * (lane % 4) + j]);
      std::memcpy(&pair[j], emulator::Shared(row, 16, 16) + lane / 4 * 2, 2);
    }
    r[i] = pair[0] | std::uint32_t{pair[1]} << 16;
  }
  emulator::SyncWarp();
}

inline void StoreMatrix4(std::uint32_t shared, std::uint32_t r0, std::uint32_t r1, std::uint32_t r2,
                         std::uint32_t r3) {
  const auto rows = emulator::Gather(shared);
  const int lane = emulator::Lane();
  const std::uint32_t r[4] = {r0, r1, r2, r3};
  for (int i = 0; i < 4; ++i) {
    const auto row = static_cast<std::uint32_t>(rows[8 * i + lane / 4]);
    std::memcpy(emulator::Shared(row, 16, 16) + lane % 4 * 4, &r[i], 4);
  }
  emulator::SyncWarp();
}

}  // namespace fenwick::cuda::ptx
