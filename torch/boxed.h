// Boxed operator kernels of the stable ABI: arguments are read from the stack in schema order, and
// results are put back in schema order. One kernel template can so serve two schemas that differ
// by an argument.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "fenwick/error.h"

namespace fenwick_torch {

class Arguments {
 public:
  explicit Arguments(StableIValue* stack) : stack_(stack) {}

  // Takes ownership of the next argument.
  template <typename T>
  T Next() {
    return torch::stable::detail::to<T>(stack_[next_++]);
  }
  torch::stable::Tensor Tensor() { return Next<torch::stable::Tensor>(); }
  std::optional<torch::stable::Tensor> OptionalTensor() {
    return Next<std::optional<torch::stable::Tensor>>();
  }

 private:
  StableIValue* stack_;
  std::size_t next_ = 0;
};

// Writes results over the (consumed) arguments.
class Results {
 public:
  explicit Results(StableIValue* stack) : stack_(stack) {}
  void Add(const torch::stable::Tensor& tensor) {
    stack_[next_++] = torch::stable::detail::from(tensor);
  }
  void Add(const std::optional<torch::stable::Tensor>& tensor) {
    if (tensor.has_value()) Add(*tensor);
  }

 private:
  StableIValue* stack_;
  std::size_t next_ = 0;
};

}  // namespace fenwick_torch
