// Where a matrix product's operands come from. A source is a matrix of 64 rows (or 64 columns)
// within a larger one; source.RowOf(r) is a cursor, cursor(column) four consecutive columns of that
// row (column is a multiple of 4), zeros outside of the data. `scale`, where given, multiplies row
// r by scale[r].
#pragma once

#include "cuda/general/geometry.cuh"
#include "cuda/general/tile.cuh"

namespace fenwick::cuda::general {

template <typename T>
struct RowCursor {
  const void* data = nullptr;
  std::int64_t offset = 0;
  int count = 0;  // columns from `offset` on; 0: the row is zero
  DType dtype = DType::kFloat32;
  bool quads = false;
  T scale = 1;

  __device__ Quad<T> operator()(int column) const {
    Quad<T> quad = LoadQuad<T>(data, dtype, offset + column, count - column, quads);
#pragma unroll
    for (int j = 0; j < 4; ++j) quad.x[j] *= scale;
    return quad;
  }
};

// Rows of one chunk and head of a token tensor: [64, width], from column `first_column` on.
template <typename T>
struct TokenSource {
  const TokenRows* tokens;
  const Span* span;
  std::int64_t first_row;
  int head;
  int first_column = 0;
  const T* scale = nullptr;  // [64]

  __device__ RowCursor<T> RowOf(int row) const {
    const RowAt at(*tokens, *span, first_row + row, head);
    RowCursor<T> cursor;
    if (!at.exists()) return cursor;
    cursor.data = at.rows->data;
    cursor.dtype = at.rows->dtype;
    cursor.quads = at.rows->quads;
    cursor.offset = at.offset + first_column;
    cursor.count = at.rows->width - first_column;
    if (scale) cursor.scale = scale[row];
    return cursor;
  }
};

// A row-major matrix [rows, columns] in global memory, contiguous, from (first_row, first_column).
template <typename T>
struct MatrixSource {
  const T* data;
  int rows, columns;
  int first_row = 0, first_column = 0;
  const T* scale = nullptr;  // of row r of the window

  __device__ RowCursor<T> RowOf(int row) const {
    RowCursor<T> cursor;
    if (first_row + row >= rows) return cursor;
    cursor.data = data;
    cursor.offset = static_cast<std::int64_t>(first_row + row) * columns + first_column;
    cursor.count = columns - first_column;
    cursor.quads =
        columns % 4 == 0 && reinterpret_cast<std::uintptr_t>(data) % sizeof(Quad<T>) == 0;
    if (scale) cursor.scale = scale[row];
    return cursor;
  }
};

// A 64 x 64 matrix in shared memory.
template <typename T>
struct SharedSource {
  const TileMatrix<T>* matrix;

  struct Cursor {
    const T* row;
    __device__ Quad<T> operator()(int column) const {
      return *reinterpret_cast<const Quad<T>*>(row + column);
    }
  };
  __device__ Cursor RowOf(int row) const { return {&(*matrix)(row, 0)}; }
};

}  // namespace fenwick::cuda::general
