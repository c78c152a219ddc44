// Torch tensors as the core's TensorViews, and where a call runs: device, stream, threads,
// workspace. Only LibTorch's stable ABI is used.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fenwick/ops.h"

namespace fenwick_torch {

using torch::headeronly::DeviceType;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Throws fenwick::Error for types that the core does not have.
fenwick::DType ToDType(ScalarType type, const char* name);

// Views of a tensor's memory. `name` is the argument's name in error messages. ReadView does not
// mark the memory as written to (copy-on-write tensors stay shared).
fenwick::TensorView ReadView(const Tensor& tensor, const char* name);
fenwick::TensorView WriteView(const Tensor& tensor, const char* name);

// The tensor itself where its last axis is dense, as the core wants it, otherwise a copy.
Tensor WithDenseLastAxis(const Tensor& tensor);

// Throws Error unless `tensor` is on the device of `reference`.
void CheckDevice(const Tensor& tensor, const char* name, const Tensor& reference,
                 const char* reference_name);

// [N + 1] int32 or int64 on any device -> offsets in host memory (a device tensor is copied, which
// waits for the stream). Not given: empty.
std::vector<std::int64_t> HostOffsets(const std::optional<Tensor>& cu_seqlens);

// Context of a call on the device of `reference`: makes that device current, takes torch's current
// stream and number of threads, and holds the workspace (torch's allocator) while it lives.
class CallContext {
 public:
  explicit CallContext(const Tensor& reference);

  fenwick::Device device() const { return context_.device; }
  // Allocates `bytes` of device memory for the call; CPU kernels bring their own.
  void Reserve(std::size_t bytes);
  const fenwick::Context& get() const { return context_; }

 private:
  Tensor reference_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  std::optional<Tensor> workspace_;
  fenwick::Context context_;
};

}  // namespace fenwick_torch
