// Calls of torch.ops.fenwick operators by name from C++.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fenwick_torch {

// Function::apply does not take undefined tensors, but optional ones.
inline std::optional<at::Tensor> Maybe(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}
inline at::Tensor OrUndefined(const std::optional<at::Tensor>& tensor) {
  return tensor.value_or(at::Tensor());
}

// Tells autograd that an operator wrote to a tensor, so that a backward pass which saved it throws
// instead of reading the new values.
inline void MarkWritten(const at::Tensor& tensor) {
  if (tensor.defined() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

// Arguments of a call, in schema order.
class Call {
 public:
  explicit Call(const std::string& op) : op_(Find(op)) {}

  template <typename T>
  Call& Add(T&& value) {
    stack_.emplace_back(std::forward<T>(value));
    return *this;
  }
  // An argument that the schema has only for one of two operators.
  Call& AddIfDefined(const at::Tensor& tensor) { return tensor.defined() ? Add(tensor) : *this; }
  // Tensor?: undefined becomes None.
  Call& AddOptional(const at::Tensor& tensor) {
    stack_.push_back(tensor.defined() ? c10::IValue(tensor) : c10::IValue());
    return *this;
  }

  std::vector<at::Tensor> Run();

 private:
  static c10::OperatorHandle Find(const std::string& op);

  c10::OperatorHandle op_;
  std::vector<c10::IValue> stack_;
};

}  // namespace fenwick_torch
