#include "fenwick/tensor_view.h"

#include <algorithm>
#include <string>

#include "fenwick/error.h"

namespace fenwick {

const char* DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return "float32";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat16: return "float16";
    case DType::kFloat64: return "float64";
    case DType::kInt64: return "int64";
  }
  return "unknown";
}

TensorView::TensorView(void* data, DType dtype, std::initializer_list<std::int64_t> sizes)
    : data(data), dtype(dtype), rank(static_cast<int>(sizes.size())) {
  if (rank > kMaxRank) {
    throw Error("tensor view: expected at most " + std::to_string(kMaxRank) + " axes, got " +
                std::to_string(rank));
  }
  std::copy(sizes.begin(), sizes.end(), this->sizes.begin());
  std::int64_t stride = 1;
  for (int i = rank - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= this->sizes[i];
  }
}

TensorView::TensorView(void* data, DType dtype, std::initializer_list<std::int64_t> sizes,
                       std::initializer_list<std::int64_t> strides)
    : TensorView(data, dtype, sizes) {
  if (strides.size() != sizes.size()) {
    throw Error("tensor view: expected " + std::to_string(sizes.size()) +
                " strides, one for each size, got " + std::to_string(strides.size()));
  }
  std::copy(strides.begin(), strides.end(), this->strides.begin());
}

}  // namespace fenwick
