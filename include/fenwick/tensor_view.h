// A tensor that somebody else owns: pointer, element type, sizes and strides. Nothing else.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

namespace fenwick {

enum class DType : std::uint8_t { kFloat32, kBFloat16, kFloat16, kFloat64, kInt64 };

constexpr int ElementSize(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
    case DType::kFloat16: return 2;
    case DType::kFloat32: return 4;
    case DType::kFloat64:
    case DType::kInt64: return 8;
  }
  return 0;
}

// "float32", "bfloat16", ...
const char* DTypeName(DType dtype);

constexpr int kMaxRank = 5;

// Sizes and strides count elements; strides may be anything on all axes but the last, whose stride
// must be 1 where the size exceeds 1. A default-constructed view means "not given".
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int rank = -1;
  std::array<std::int64_t, kMaxRank> sizes{};
  std::array<std::int64_t, kMaxRank> strides{};

  TensorView() = default;
  // A contiguous view, and one with strides. Throw Error on more than kMaxRank sizes and where
  // there is not one stride for each.
  TensorView(void* data, DType dtype, std::initializer_list<std::int64_t> sizes);
  TensorView(void* data, DType dtype, std::initializer_list<std::int64_t> sizes,
             std::initializer_list<std::int64_t> strides);

  bool given() const { return rank >= 0; }
  std::int64_t size(int axis) const { return sizes[axis]; }
  std::int64_t stride(int axis) const { return strides[axis]; }
  std::int64_t num_elements() const {
    std::int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= sizes[i];
    return rank < 0 ? 0 : n;
  }
};

}  // namespace fenwick
