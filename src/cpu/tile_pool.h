// Tiles of one size that a walk takes for new nodes and gives back when they have been merged.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/scratch.h"

namespace fenwick::cpu {

template <typename T>
class TilePool {
 public:
  TilePool(Scratch& scratch, std::int64_t tile_size) : scratch_(scratch), tile_size_(tile_size) {}
  T* Take() {
    if (free_.empty()) return scratch_.New<T>(tile_size_);
    T* tile = free_.back();
    free_.pop_back();
    return tile;
  }
  void Give(T* tile) { free_.push_back(tile); }

 private:
  Scratch& scratch_;
  std::int64_t tile_size_;
  std::vector<T*> free_;
};

}  // namespace fenwick::cpu
