#include "dispatch.h"

// Defined in libfenwick_torch.so; the reference makes every linker load the library, and with it
// the operators.
extern "C" int fenwick_torch_operators_loaded();

namespace fenwick_torch {

c10::OperatorHandle Call::Find(const std::string& op) {
  TORCH_CHECK(fenwick_torch_operators_loaded(), "fenwick operators are not registered");
  return c10::Dispatcher::singleton().findSchemaOrThrow(("fenwick::" + op).c_str(), "");
}

std::vector<at::Tensor> Call::Run() {
  op_.callBoxed(&stack_);
  std::vector<at::Tensor> results;
  results.reserve(stack_.size());
  for (c10::IValue& value : stack_) results.push_back(std::move(value).toTensor());
  return results;
}

}  // namespace fenwick_torch
