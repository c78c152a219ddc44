// Tensor maps for the copy engine over views [B, T, heads, width] of 16-bit elements.
#pragma once

#include <cuda.h>

#include "cuda/tile/mappable.h"
#include "fenwick/tensor_view.h"

namespace fenwick::cuda {

// Tiles of [rows][64] elements, 128-byte swizzle; coordinates are (column, head, token, batch).
// Elements outside the view read as zero and are not written.
CUtensorMap MapTensor(const TensorView& view, int rows);

}  // namespace fenwick::cuda
