// Tensor maps for the copy engine over views [B, T, heads, width] of 16-bit elements.
#pragma once

#include <cuda.h>

#include "cuda/tile/mappable.h"
#include "fenwick/tensor_view.h"

namespace fenwick::cuda {

// Tiles of [rows][64] elements, 128-byte swizzle; coordinates are (column, head, token, batch).
// Elements outside the view read as zero and are not written.
CUtensorMap MapTensor(const TensorView& view, int rows);

// Tiles of [rows][columns] elements as they lie in memory, of a view whose heads lie without gaps;
// coordinates are (head * width + column, 0, token, batch), the first one a multiple of 8.
CUtensorMap MapHeads(const TensorView& view, int rows, int columns);

}  // namespace fenwick::cuda
