// Tensor maps for the copy engine over views [B, T, heads, width] of 16-bit elements.
#pragma once

#include <cuda.h>

#include "cuda/tile/mappable.h"
#include "fenwick/tensor_view.h"

namespace fenwick::cuda {

// Tiles of [rows][64] elements, 128-byte swizzle; coordinates are (column, head, token, batch).
// Elements outside the view read as zero and are not written.
CUtensorMap MapTensor(const TensorView& view, int rows);

// Tiles of [rows][heads * width] elements as they lie in memory, of a view whose heads lie without
// gaps; coordinates are (head * width, 0, token, batch), the first one 16 bytes' worth at least.
CUtensorMap MapHeads(const TensorView& view, int rows, int heads);

}  // namespace fenwick::cuda
