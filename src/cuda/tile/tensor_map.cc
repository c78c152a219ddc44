#include "cuda/tile/tensor_map.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "fenwick/error.h"

namespace fenwick::cuda {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's encoder, found at run time so that the library does not link the driver.
EncodeTiled Encoder() {
  static const EncodeTiled encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault,
                                         &result) != cudaSuccess ||
        result != cudaDriverEntryPointSuccess) {
      throw Error("CUDA driver: expected 12.0 or newer with cuTensorMapEncodeTiled");
    }
    return reinterpret_cast<EncodeTiled>(entry);
  }();
  return encode;
}

}  // namespace

CUtensorMap MapTensor(const TensorView& view, int rows) {
  cuuint64_t sizes[4];
  cuuint64_t strides[3];
  for (int i = 0; i < 4; ++i) sizes[i] = static_cast<cuuint64_t>(view.size(3 - i));
  for (int i = 0; i < 3; ++i) {
    // The stride of an axis of size 1 is never used but must be valid.
    strides[i] = view.size(2 - i) > 1
                     ? static_cast<cuuint64_t>(view.stride(2 - i) * ElementSize(view.dtype))
                     : kMapAlignment;
  }
  const cuuint32_t box[4] = {64, 1, static_cast<cuuint32_t>(rows), 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      Encoder()(&map,
                view.dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                               : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                4, view.data, sizes, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw Error("cuTensorMapEncodeTiled failed with " + std::to_string(static_cast<int>(result)));
  }
  return map;
}

}  // namespace fenwick::cuda
