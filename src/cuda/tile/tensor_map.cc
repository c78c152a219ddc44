#include "cuda/tile/tensor_map.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "cuda/launch.h"
#include "fenwick/error.h"

namespace fenwick::cuda {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

#if defined(FENWICK_EMULATE)
EncodeTiled Encoder() { return emulator::EncodeTiled; }
#else
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
#endif

// sizes, strides (bytes, of all but the innermost axis) and box: innermost axis first.
CUtensorMap Encode(const TensorView& view, const cuuint64_t (&sizes)[4],
                   const cuuint64_t (&strides)[3], const cuuint32_t (&box)[4],
                   CUtensorMapSwizzle swizzle) {
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const auto encode = [&] {
    return Encoder()(&map,
                     view.dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                    : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                     4, view.data, sizes, strides, box, element_strides,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = encode();
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    // Not yet used by the runtime, this thread (of an autograd engine, say) has no context.
    int device = 0;
    Check(cudaGetDevice(&device), "cudaGetDevice");
    Check(cudaSetDevice(device), "cudaSetDevice");
    result = encode();
  }
  if (result != CUDA_SUCCESS) {
    throw Error("cuTensorMapEncodeTiled failed with " + std::to_string(static_cast<int>(result)));
  }
  return map;
}

// Bytes between elements of an axis; that of an axis of size 1 is never used but must be valid.
cuuint64_t StrideBytes(const TensorView& view, int axis) {
  return view.size(axis) > 1 ? static_cast<cuuint64_t>(view.stride(axis) * ElementSize(view.dtype))
                             : kMapAlignment;
}

cuuint64_t Size(const TensorView& view, int axis) {
  return static_cast<cuuint64_t>(view.size(axis));
}

}  // namespace

CUtensorMap MapTensor(const TensorView& view, int rows) {
  return Encode(view, {Size(view, 3), Size(view, 2), Size(view, 1), Size(view, 0)},
                {StrideBytes(view, 2), StrideBytes(view, 1), StrideBytes(view, 0)},
                {64, 1, static_cast<cuuint32_t>(rows), 1}, CU_TENSOR_MAP_SWIZZLE_128B);
}

CUtensorMap MapHeads(const TensorView& view, int rows, int columns) {
  return Encode(view, {Size(view, 2) * Size(view, 3), 1, Size(view, 1), Size(view, 0)},
                {kMapAlignment, StrideBytes(view, 1), StrideBytes(view, 0)},
                {static_cast<cuuint32_t>(columns), 1, static_cast<cuuint32_t>(rows), 1},
                CU_TENSOR_MAP_SWIZZLE_NONE);
}

}  // namespace fenwick::cuda
