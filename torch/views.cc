// Tensors to views and call contexts; see views.h.
#include "views.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace fenwick_torch {
namespace {

std::string DeviceName(const Tensor& tensor) {
  const torch::stable::Device device = tensor.device();
  switch (device.type()) {
    case DeviceType::CPU: return "cpu";
    case DeviceType::CUDA: return "cuda:" + std::to_string(device.index());
    case DeviceType::Meta: return "meta";
    default: return "device type " + std::to_string(static_cast<int>(device.type()));
  }
}

fenwick::TensorView View(const Tensor& tensor, void* data, const char* name) {
  const std::int64_t rank = tensor.dim();
  if (rank > fenwick::kMaxRank) {
    throw fenwick::Error(std::string(name) + ": expected at most " +
                         std::to_string(fenwick::kMaxRank) + " axes, got " + std::to_string(rank));
  }
  fenwick::TensorView view;
  view.data = data;
  view.dtype = ToDType(tensor.scalar_type(), name);
  view.rank = static_cast<int>(rank);
  for (int axis = 0; axis < view.rank; ++axis) {
    view.sizes[axis] = tensor.size(axis);
    view.strides[axis] = tensor.stride(axis);
  }
  return view;
}

}  // namespace

fenwick::DType ToDType(ScalarType type, const char* name) {
  switch (type) {
    case ScalarType::Float: return fenwick::DType::kFloat32;
    case ScalarType::BFloat16: return fenwick::DType::kBFloat16;
    case ScalarType::Half: return fenwick::DType::kFloat16;
    case ScalarType::Double: return fenwick::DType::kFloat64;
    case ScalarType::Long: return fenwick::DType::kInt64;
    default:
      throw fenwick::Error(std::string(name) +
                           ": expected float32, bfloat16, float16 or float64, got " +
                           torch::headeronly::toString(type));
  }
}

fenwick::TensorView ReadView(const Tensor& tensor, const char* name) {
  return View(tensor, const_cast<void*>(tensor.const_data_ptr()), name);
}

fenwick::TensorView WriteView(const Tensor& tensor, const char* name) {
  return View(tensor, tensor.mutable_data_ptr(), name);
}

Tensor WithDenseLastAxis(const Tensor& tensor) {
  const std::int64_t rank = tensor.dim();
  if (rank == 0 || tensor.size(rank - 1) <= 1 || tensor.stride(rank - 1) == 1) return tensor;
  return torch::stable::contiguous(tensor);
}

void CheckDevice(const Tensor& tensor, const char* name, const Tensor& reference,
                 const char* reference_name) {
  if (tensor.device() == reference.device()) return;
  throw fenwick::Error(std::string(name) + ": expected a tensor on " + DeviceName(reference) +
                       " like " + reference_name + ", got one on " + DeviceName(tensor));
}

std::vector<std::int64_t> HostOffsets(const std::optional<Tensor>& cu_seqlens) {
  if (!cu_seqlens.has_value()) return {};
  const ScalarType type = cu_seqlens->scalar_type();
  if (cu_seqlens->dim() != 1 || cu_seqlens->numel() == 0 ||
      (type != ScalarType::Int && type != ScalarType::Long)) {
    throw fenwick::Error(std::string("cu_seqlens: expected N + 1 int32 or int64 offsets, got ") +
                         std::to_string(cu_seqlens->dim()) + " axes of " +
                         torch::headeronly::toString(type) + " with " +
                         std::to_string(cu_seqlens->numel()) + " elements");
  }
  Tensor host = *cu_seqlens;
  if (!host.is_cpu()) host = torch::stable::to(host, torch::stable::Device(DeviceType::CPU));
  host = torch::stable::contiguous(host);
  const std::int64_t count = host.numel();
  if (type == ScalarType::Long) {
    const auto* data = host.const_data_ptr<std::int64_t>();
    return {data, data + count};
  }
  const auto* data = host.const_data_ptr<std::int32_t>();
  return {data, data + count};
}

CallContext::CallContext(const Tensor& reference) : reference_(reference) {
  if (reference.is_cpu()) {
    std::uint32_t num_threads = 0;
    TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&num_threads));
    context_.num_threads = static_cast<int>(num_threads);
    return;
  }
#ifdef USE_CUDA
  if (reference.is_cuda()) {
    const int index = reference.get_device_index();
    guard_.emplace(index);
    context_.device = fenwick::Device::kCUDA;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &context_.stream));
    return;
  }
#endif
  throw fenwick::Error("no kernels for tensors on " + DeviceName(reference));
}

void CallContext::Reserve(std::size_t bytes) {
  if (context_.device == fenwick::Device::kCPU || bytes == 0) return;
  const std::int64_t size[] = {static_cast<std::int64_t>(bytes)};
  workspace_ = torch::stable::new_empty(reference_, {size, 1}, ScalarType::Byte);
  context_.workspace = workspace_->mutable_data_ptr();
  context_.workspace_bytes = bytes;
}

}  // namespace fenwick_torch
