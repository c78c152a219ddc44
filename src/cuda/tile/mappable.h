// Which views the copy engine can address. Pure host code, for plans.
#pragma once

#include <climits>
#include <cstdint>

#include "fenwick/tensor_view.h"

namespace fenwick::cuda {

inline constexpr std::int64_t kMapAlignment = 16;  // bytes, of base and strides

// `view` has four axes; a view whose memory does not exist yet has a null base.
inline bool CanMapTensor(const TensorView& view) {
  if (reinterpret_cast<std::uintptr_t>(view.data) % kMapAlignment != 0) return false;
  for (int axis = 0; axis < 4; ++axis) {
    if (view.size(axis) < 1 || view.size(axis) > INT_MAX / 2) return false;
    const std::int64_t bytes = view.stride(axis) * ElementSize(view.dtype);
    if (axis < 3 && view.size(axis) > 1 &&
        (bytes <= 0 || bytes % kMapAlignment != 0 || bytes >= std::int64_t{1} << 40)) {
      return false;
    }
  }
  return true;
}

// The copy engine's tiled stores write whole groups of 16 bytes: of rows that end inside one, also
// the bytes behind (found on an H200; loads stop at the last element).
inline bool CanMapStores(const TensorView& view) {
  return CanMapTensor(view) && view.size(3) * ElementSize(view.dtype) % kMapAlignment == 0;
}

}  // namespace fenwick::cuda
