// How tiles lie in memory; see tiles-inl.h.
#pragma once

#include <cstdint>

namespace fenwick::cpu {

// Columns rounded up to whole cache lines, which hold whole vectors on every target.
template <typename T>
constexpr std::int64_t PaddedColumns(std::int64_t columns) {
  constexpr std::int64_t kLine = 64 / sizeof(T);
  return (columns + kLine - 1) / kLine * kLine;
}

// Leading dimension of a tile: an odd number of cache lines, so that a walk down a column visits
// every set of the first-level cache.
template <typename T>
constexpr std::int64_t TileLd(std::int64_t columns) {
  constexpr std::int64_t kLine = 64 / sizeof(T);
  return (PaddedColumns<T>(columns) / kLine | 1) * kLine;
}

template <typename T>
constexpr std::int64_t TileSize(std::int64_t rows, std::int64_t columns) {
  return rows * TileLd<T>(columns);
}

}  // namespace fenwick::cpu
