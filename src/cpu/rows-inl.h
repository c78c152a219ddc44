// Rows between tensors (float32, bfloat16, float16, float64) and tiles of the compute type: float
// for the first three, double for the last.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/scratch.h"
#include "cpu/sequence.h"
#include "cpu/tile_layout.h"

#if defined(FENWICK_CPU_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FENWICK_CPU_ROWS_INL_H_
#undef FENWICK_CPU_ROWS_INL_H_
#else
#define FENWICK_CPU_ROWS_INL_H_
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fenwick::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// One vector of 16-bit elements to float.
template <class D>
HWY_INLINE hn::Vec<D> FromBFloat16(D d, const uint16_t* in) {
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<uint16_t, D> d16;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(d16, in))));
}

template <class D>
HWY_INLINE hn::Vec<D> FromFloat16(D d, const uint16_t* in) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::Rebind<hwy::float16_t, D> df16;
  return hn::PromoteTo(d, hn::BitCast(df16, hn::LoadU(d16, in)));
}

// Rounds to nearest even; a NaN stays one.
template <class D>
HWY_INLINE void ToBFloat16(D d, hn::Vec<D> x, uint16_t* out) {
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  const hn::Rebind<uint16_t, D> d16;
  const auto bits = hn::BitCast(du, x);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFFu)));
  const auto quiet = hn::Or(bits, hn::Set(du, 0x400000u));
  const auto chosen = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(x)), quiet, rounded);
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, hn::ShiftRight<16>(chosen))), d16, out);
}

// Rounds to nearest even (Highway truncates on targets without the instruction).
template <class D>
HWY_INLINE void ToFloat16(D d, hn::Vec<D> x, uint16_t* out) {
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<uint16_t, D> d16;
  const hn::Rebind<hwy::float16_t, D> df16;
  const auto bits = hn::BitCast(du, x);
  const auto odd = hn::And(hn::ShiftRight<13>(bits), hn::Set(du, 1u));
  const auto sum = hn::Add(bits, hn::Add(odd, hn::Set(du, 0xFFFu)));
  const auto rounded = hn::BitCast(d, hn::And(sum, hn::Set(du, 0xFFFFE000u)));
  const auto chosen = hn::IfThenElse(hn::IsNaN(x), x, rounded);
  hn::StoreU(hn::BitCast(d16, hn::DemoteTo(df16, chosen)), d16, out);
}

// out [PaddedColumns] = in [columns] converted; the padding gets zeros. Reads nothing beyond.
template <typename T>
void LoadRow(DType dtype, const std::byte* in, int64_t columns, T* HWY_RESTRICT out) {
  std::memset(out + columns, 0, (PaddedColumns<T>(columns) - columns) * sizeof(T));
  if constexpr (sizeof(T) == 4) {
    if (dtype != DType::kFloat32) {
      const hn::ScalableTag<float> d;
      constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(d));
      const auto load = [&](const uint16_t* from) HWY_ATTR {
        return dtype == DType::kBFloat16 ? FromBFloat16(d, from) : FromFloat16(d, from);
      };
      const uint16_t* in16 = reinterpret_cast<const uint16_t*>(in);
      int64_t j = 0;
      for (; j + kLanes <= columns; j += kLanes) hn::StoreU(load(in16 + j), d, out + j);
      if (j < columns) {
        uint16_t tail[kLanes] = {};
        std::memcpy(tail, in16 + j, (columns - j) * sizeof(uint16_t));
        hn::StoreU(load(tail), d, out + j);
      }
      return;
    }
  }
  std::memcpy(out, in, columns * sizeof(T));
}

// out [columns] = in converted. Writes nothing beyond.
template <typename T>
void StoreRow(DType dtype, const T* HWY_RESTRICT in, int64_t columns, std::byte* out) {
  if constexpr (sizeof(T) == 4) {
    if (dtype != DType::kFloat32) {
      const hn::ScalableTag<float> d;
      constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(d));
      const auto store = [&](const float* from, uint16_t* to) HWY_ATTR {
        if (dtype == DType::kBFloat16) {
          ToBFloat16(d, hn::LoadU(d, from), to);
        } else {
          ToFloat16(d, hn::LoadU(d, from), to);
        }
      };
      uint16_t* out16 = reinterpret_cast<uint16_t*>(out);
      int64_t j = 0;
      for (; j + kLanes <= columns; j += kLanes) store(in + j, out16 + j);
      if (j < columns) {
        uint16_t tail[kLanes];
        store(in + j, tail);
        std::memcpy(out16 + j, tail, (columns - j) * sizeof(uint16_t));
      }
      return;
    }
  }
  std::memcpy(out, in, columns * sizeof(T));
}

// Rows of positions [first, first + count) to a tile [count, columns]; rows that are not given (the
// queries of ring tokens) are zeros.
template <typename T>
void LoadRows(const TokenRows& rows, int64_t first, int64_t count, int64_t columns, T* out,
              int64_t ld) {
  for (int64_t i = 0; i < count; ++i) {
    if (rows.given(first + i)) {
      LoadRow(rows.dtype(), rows.Row(first + i), columns, out + i * ld);
    } else {
      std::memset(out + i * ld, 0, PaddedColumns<T>(columns) * sizeof(T));
    }
  }
}

// The other way; rows that are not given are skipped.
template <typename T>
void StoreRows(const T* in, int64_t ld, int64_t first, int64_t count, int64_t columns,
               const TokenRows& rows) {
  for (int64_t i = 0; i < count; ++i) {
    if (!rows.given(first + i)) continue;
    StoreRow(rows.dtype(), in + i * ld, columns, rows.Row(first + i));
  }
}

// Adds rows of [count, columns] to a tile.
template <typename T>
void AddRows(const TokenRows& rows, int64_t first, int64_t count, int64_t columns, T* out,
             int64_t ld) {
  Scratch scratch;
  T* row = scratch.New<T>(PaddedColumns<T>(columns));
  for (int64_t i = 0; i < count; ++i) {
    LoadRow(rows.dtype(), rows.Row(first + i), columns, row);
    for (int64_t j = 0; j < columns; ++j) out[i * ld + j] += row[j];
  }
}

// One number per token ([B, T, H]) of positions [first, first + count).
template <typename T>
void LoadScalars(const TokenRows& rows, int64_t first, int64_t count, T* out) {
  if (rows.dtype() == (sizeof(T) == 4 ? DType::kFloat32 : DType::kFloat64)) {
    for (int64_t i = 0; i < count; ++i) std::memcpy(out + i, rows.Row(first + i), sizeof(T));
    return;
  }
  alignas(64) T row[64 / sizeof(T)];
  for (int64_t i = 0; i < count; ++i) {
    LoadRow(rows.dtype(), rows.Row(first + i), 1, row);
    out[i] = row[0];
  }
}

template <typename T>
void StoreScalars(const T* in, int64_t first, int64_t count, const TokenRows& rows) {
  alignas(64) T row[64 / sizeof(T)] = {};
  for (int64_t i = 0; i < count; ++i) {
    if (!rows.given(first + i)) continue;
    row[0] = in[i];
    StoreRow(rows.dtype(), row, 1, rows.Row(first + i));
  }
}

// A matrix [rows, columns] of a state (contiguous, of type T) to a tile, and back scaled.
template <typename T>
void LoadNode(const std::byte* in, int64_t rows, int64_t columns, T* out) {
  const T* node = reinterpret_cast<const T*>(in);
  for (int64_t i = 0; i < rows; ++i) {
    T* row = out + i * TileLd<T>(columns);
    std::memcpy(row, node + i * columns, columns * sizeof(T));
    std::memset(row + columns, 0, (PaddedColumns<T>(columns) - columns) * sizeof(T));
  }
}

template <typename T>
void StoreNode(const T* in, T scale, int64_t rows, int64_t columns, std::byte* out) {
  T* node = reinterpret_cast<T*>(out);
  for (int64_t i = 0; i < rows; ++i) {
    const T* row = in + i * TileLd<T>(columns);
    for (int64_t j = 0; j < columns; ++j) node[i * columns + j] = scale * row[j];
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fenwick::cpu
HWY_AFTER_NAMESPACE();

#endif  // FENWICK_CPU_ROWS_INL_H_
