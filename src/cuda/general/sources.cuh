// Where a matrix product's operands come from. A source s(row, column) gives four consecutive
// columns (column is a multiple of 4) of one row of a 64-row (or 64-column) window, and zeros
// outside of the data. `scale`, where given, multiplies row r by scale[r].
#pragma once

#include "cuda/general/geometry.cuh"
#include "cuda/general/tile.cuh"

namespace fenwick::cuda::general {

template <typename T>
__device__ inline Quad<T> Scaled(Quad<T> quad, T factor) {
#pragma unroll
  for (int j = 0; j < 4; ++j) quad.x[j] *= factor;
  return quad;
}

// Rows of one chunk and head of a token tensor: [64, width], from column `first_column` on.
template <typename T>
struct TokenSource {
  const TokenRows* tokens;
  const Span* span;
  std::int64_t first_row;
  int head;
  int first_column = 0;
  const T* scale = nullptr;  // [64]

  __device__ Quad<T> operator()(int row, int column) const {
    const RowAt at(*tokens, *span, first_row + row, head);
    column += first_column;
    if (!at.exists() || column >= at.rows->width) return Quad<T>{};
    const Quad<T> quad = LoadQuad<T>(at.rows->data, at.rows->dtype, at.offset + column,
                                     at.rows->width - column, at.rows->quads);
    return scale ? Scaled(quad, scale[row]) : quad;
  }
};

// A row-major matrix [rows, columns] in global memory, contiguous, from (first_row, first_column).
template <typename T>
struct MatrixSource {
  const T* data;
  int rows, columns;
  int first_row = 0, first_column = 0;
  const T* scale = nullptr;  // of row r of the window

  __device__ Quad<T> operator()(int row, int column) const {
    const int r = first_row + row;
    column += first_column;
    if (r >= rows || column >= columns) return Quad<T>{};
    const Quad<T> quad =
        LoadQuad<T>(data, DType::kFloat32, static_cast<std::int64_t>(r) * columns + column,
                    columns - column, quads());
    return scale ? Scaled(quad, scale[row]) : quad;
  }
  __device__ bool quads() const {
    return columns % 4 == 0 && reinterpret_cast<std::uintptr_t>(data) % sizeof(Quad<T>) == 0;
  }
};

// A 64 x 64 matrix in shared memory.
template <typename T>
struct SharedSource {
  const TileMatrix<T>* matrix;
  __device__ Quad<T> operator()(int row, int column) const {
    return *reinterpret_cast<const Quad<T>*>(&(*matrix)(row, column));
  }
};

}  // namespace fenwick::cuda::general
