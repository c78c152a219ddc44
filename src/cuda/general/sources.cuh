// Where a matrix product's operands come from. A source is a matrix of 64 rows (or 64 columns)
// within a larger one, zeros outside of the data:
//   source.window()           where rows lie, if they lie one behind another
//   source.Slowly(row, column)  four consecutive columns of a row (column is a multiple of 4)
//   source.Copy(row, column, to)  the same, asynchronously to shared memory, if source.copyable()
//   source.scale              multiplies row r by scale[r], where not null
// `copyable` and `window` are the same for the whole block.
#pragma once

#include "cuda/general/geometry.cuh"
#include "cuda/general/tile.cuh"
#include "cuda/ptx/async.cuh"

namespace fenwick::cuda::general {

// The first `rows` rows of a source at equal distances in memory, `columns` columns each (no rows:
// they do not lie so); quads are aligned.
struct Window {
  const unsigned char* data = nullptr;
  std::int64_t stride = 0;  // bytes
  int rows = 0, columns = 0;

  __device__ bool holds(int row_end, int column_end) const {
    return row_end <= rows && column_end <= columns;
  }
};

// Rows of one chunk and head of a token tensor: [64, width], from column `first_column` on.
template <typename T>
struct TokenSource {
  using Scalar = T;
  const TokenRows* tokens;
  const Span* span;
  std::int64_t first_row;
  int head;
  int first_column = 0;
  const T* scale = nullptr;  // [64]

  __device__ DType dtype() const { return tokens->call.dtype; }
  __device__ static constexpr bool copyable() { return false; }
  __device__ static void Copy(int, int, T*) {}
  __device__ Window window() const {
    Window window;
    const Rows& rows = tokens->call;
    if (rows.data == nullptr || !rows.quads || first_row < span->ring_tokens) return window;
    const std::int64_t rest = span->rows() - first_row;
    window.rows = static_cast<int>(rest < kChunk ? rest : kChunk);
    window.columns = rows.width - first_column;
    window.stride = rows.token_stride * Width(rows.dtype);
    window.data =
        static_cast<const unsigned char*>(rows.data) +
        (rows.Offset(span->batch, span->first_token + first_row - span->ring_tokens, head) +
         first_column) *
            Width(rows.dtype);
    return window;
  }
  __device__ Quad<T> Slowly(int row, int column) const {
    const RowAt at(*tokens, *span, first_row + row, head);
    if (!at.exists()) return Quad<T>{};
    return LoadQuadSlowly<T>(at.rows->data, at.rows->dtype, at.offset + first_column + column,
                             at.rows->width - first_column - column);
  }
  __device__ T Element(int row, int column) const {
    if (first_column + column >= tokens->call.width) return T(0);
    return LoadToken<T>(*tokens, *span, first_row + row, head, first_column + column);
  }
};

// A row-major matrix [rows, columns] in global memory, contiguous, from (first_row, first_column).
template <typename T>
struct MatrixSource {
  using Scalar = T;
  const T* data;
  int rows, columns;
  int first_row = 0, first_column = 0;
  static constexpr const T* scale = nullptr;

  __device__ static DType dtype() { return sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32; }
  __device__ bool copyable() const { return sizeof(T) == 4 && quads(); }
  __device__ void Copy(int row, int column, T* to) const {
    const bool exists = first_row + row < rows && first_column + column < columns;
    ptx::CopyAsync(to, exists ? data + Offset(row, column) : data, exists);
  }
  __device__ Window window() const {
    if (!quads()) return Window{};
    return {reinterpret_cast<const unsigned char*>(data + Offset(0, 0)),
            columns * static_cast<std::int64_t>(sizeof(T)), rows - first_row,
            columns - first_column};
  }
  __device__ Quad<T> Slowly(int row, int column) const {
    if (first_row + row >= rows) return Quad<T>{};
    return LoadQuadSlowly<T>(data, dtype(), Offset(row, column), columns - first_column - column);
  }
  __device__ T Element(int row, int column) const {
    const bool exists = first_row + row < rows && first_column + column < columns;
    return exists ? data[Offset(row, column)] : T(0);
  }

 private:
  __device__ std::int64_t Offset(int row, int column) const {
    return static_cast<std::int64_t>(first_row + row) * columns + first_column + column;
  }
  __device__ bool quads() const {
    return columns % 4 == 0 && reinterpret_cast<std::uintptr_t>(data) % sizeof(Quad<T>) == 0;
  }
};

// A 64 x 64 matrix in shared memory.
template <typename T>
struct SharedSource {
  using Scalar = T;
  const TileMatrix<T>* matrix;
  static constexpr const T* scale = nullptr;

  __device__ static DType dtype() { return sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32; }
  __device__ static constexpr bool copyable() { return false; }
  __device__ static void Copy(int, int, T*) {}
  __device__ Window window() const {
    return {reinterpret_cast<const unsigned char*>(matrix->x), kPitch * sizeof(T), kTile, kTile};
  }
  __device__ static Quad<T> Slowly(int, int) { return Quad<T>{}; }  // never: the window is whole
};

// f(i, value) for the entries i of a tile that this thread holds, value being the source's, without
// its scale; sixteen loads are in flight together.
template <typename Math, typename Source, typename F>
__device__ inline void ForEachEntry(const Source& source, F&& f) {
  using T = typename Math::Scalar;
  const Window window = source.window();
  if (!window.holds(kTile, kTile)) {
#pragma unroll
    for (int i = 0; i < 32; ++i) f(i, source.Element(Math::Row(i), Math::Column(i)));
    return;
  }
  WithStorage<T>(source.dtype(), [&](auto zero) {
    using S = decltype(zero);
    constexpr int kTogether = 16;
#pragma unroll
    for (int first = 0; first < 32; first += kTogether) {
      S x[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const unsigned char* row = window.data + Math::Row(first + i) * window.stride;
        x[i] = reinterpret_cast<const S*>(row)[Math::Column(first + i)];
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) f(first + i, Widen<T>(x[i]));
    }
  });
}

template <typename Math, typename Source>
__device__ inline void LoadEntries(typename Math::Tile& tile, const Source& source) {
  ForEachEntry<Math>(source, [&](int i, typename Math::Scalar value) { tile.x[i] = value; });
}

// out[row] += the sum over the columns of tile * source.
template <typename Math, typename Source>
__device__ inline void AddRowDots(const typename Math::Tile& tile, const Source& source,
                                  typename Math::Scalar* out) {
  typename Math::Scalar sums[Math::kRows] = {};
  ForEachEntry<Math>(source, [&](int i, typename Math::Scalar value) {
    sums[Math::RowSlot(i)] += tile.x[i] * value;
  });
  AddToRows<Math>(sums, out);
}

// Adds what the final state's ring gives to the gradient of the rows of one chunk and head, columns
// first_column to width - 1, and writes it.
template <typename Math>
__device__ inline void StoreGradients(typename Math::Tile& tile, const TokenGradients& gradients,
                                      const Span& span, std::int64_t first_row, int head,
                                      int first_column, int width) {
  using T = typename Math::Scalar;
  const TokenSource<T> out{&gradients.out, &span, first_row, head, first_column};
  const Window window = out.window();
  if (gradients.d_final.data != nullptr || !window.holds(kTile, kTile)) {
    ForEach<Math>(tile, [&](int row, int column, T value) {
      if (first_column + column >= width) return;
      StoreGradient(gradients, span, first_row + row, head, first_column + column, value);
    });
    return;
  }
  WithStorage<T>(out.dtype(), [&](auto zero) {
    using S = decltype(zero);
    auto* data = const_cast<unsigned char*>(window.data);
    ForEach<Math>(tile, [&](int row, int column, T value) {
      reinterpret_cast<S*>(data + row * window.stride)[column] = Narrow<S>(value);
    });
  });
}

}  // namespace fenwick::cuda::general
