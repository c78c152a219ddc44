// src/cuda/ptx/copy.cuh for the emulator.
#pragma once

#include "emulator.h"

namespace fenwick::cuda::ptx {

inline void LoadTile(std::uint32_t shared, const CUtensorMap* map, std::uint32_t barrier, int x,
                     int y, int z, int w) {
  emulator::LoadTile(shared, map, barrier, {x, y, z, w});
}
inline void StoreTile(const CUtensorMap* map, std::uint32_t shared, int x, int y, int z, int w) {
  emulator::StoreTile(map, shared, {x, y, z, w});
}
using emulator::CommitStores;
using emulator::LoadBytes;
using emulator::StoreBytes;

template <int kPending>
void WaitStoresRead() {
  emulator::WaitStores(kPending);
}
template <int kPending>
void WaitStores() {
  emulator::WaitStores(kPending);
}

}  // namespace fenwick::cuda::ptx
