// Operator cases in safetensors files laid out as tests/golden/ops.safetensors:
//   "mamba2/CASE/q" ... or "gated_delta/CASE/q" ...: q k v g [beta] level_scales, o, do, dq ... .
#pragma once

#include <map>
#include <string>
#include <vector>

#include "support/problem.h"
#include "support/safetensors.h"

namespace fenwick::support {

// Values of a floating or I64 tensor; throws Error for another type.
reference::Tensor Values(const std::string& name, const SafetensorsEntry& entry);

struct GoldenCase {
  std::string name;  // "mamba2/B2_T65_H2_K8_V24"
  reference::Arguments arguments;
  reference::Tensor o, d_o;
  reference::Gradients gradients;
};

// All cases of a file, in order; none where the file holds no operator case. Throws Error where a
// case is incomplete.
std::vector<GoldenCase> GoldenCases(const SafetensorsFile& file);

}  // namespace fenwick::support
