// Names of devices and element types on the command line.
#pragma once

#include <torch/torch.h>

#include <string>

#include "fenwick/error.h"

namespace fenwick::tasks {

// "cpu", "cuda" or "cuda:N". Throws Error when the machine has no such device.
inline torch::Device DeviceOf(const std::string& name) {
  if (name == "cpu") return torch::kCPU;
  const bool numbered = name.starts_with("cuda:") && name.size() > 5 && name.size() <= 9 &&
                        name.find_first_not_of("0123456789", 5) == std::string::npos;
  if (name != "cuda" && !numbered) {
    throw Error("--device: expected cpu, cuda or cuda:N, got " + name);
  }
  const int index = numbered ? std::stoi(name.substr(5)) : 0;
  if (!torch::cuda::is_available() || index >= static_cast<int>(torch::cuda::device_count())) {
    throw Error("--device: this machine or this build of torch has no " + name);
  }
  return {torch::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

inline torch::ScalarType DTypeOf(const std::string& name) {
  if (name == "float32") return torch::kFloat32;
  if (name == "bfloat16") return torch::kBFloat16;
  if (name == "float16") return torch::kFloat16;
  if (name == "float64") return torch::kFloat64;
  throw Error("--dtype: expected float32, bfloat16, float16 or float64, got " + name);
}

}  // namespace fenwick::tasks
