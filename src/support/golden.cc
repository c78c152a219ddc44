#include "support/golden.h"

#include <set>

#include "support/element.h"

namespace fenwick::support {

reference::Tensor Values(const std::string& name, const SafetensorsEntry& entry) {
  static const std::map<std::string, DType> kDTypes = {{"F64", DType::kFloat64},
                                                       {"F32", DType::kFloat32},
                                                       {"F16", DType::kFloat16},
                                                       {"BF16", DType::kBFloat16},
                                                       {"I64", DType::kInt64}};
  const auto dtype = kDTypes.find(entry.dtype);
  if (dtype == kDTypes.end()) {
    throw Error(name + ": expected type F64, F32, F16, BF16 or I64, got " + entry.dtype);
  }
  reference::Tensor values(entry.shape);
  for (std::size_t i = 0; i < values.data.size(); ++i) {
    values.data[i] = LoadElement(entry.data.data(), dtype->second, static_cast<std::int64_t>(i));
  }
  return values;
}

std::vector<GoldenCase> GoldenCases(const SafetensorsFile& file) {
  std::set<std::string> names;
  for (const auto& [name, entry] : file.entries()) {
    if (name.starts_with("mamba2/") || name.starts_with("gated_delta/")) {
      names.insert(name.substr(0, name.rfind('/')));
    }
  }
  std::vector<GoldenCase> cases;
  for (const std::string& name : names) {
    const auto tensor = [&](const char* field) {
      const std::string key = name + "/" + field;
      const auto entry = file.entries().find(key);
      if (entry == file.entries().end()) throw Error(key + ": expected a tensor, got none");
      return Values(key, entry->second);
    };
    const bool delta = name.starts_with("gated_delta/");
    GoldenCase c{
        .name = name, .arguments = {}, .o = tensor("o"), .d_o = tensor("do"), .gradients = {}};
    c.arguments.transition = delta ? Transition::kGatedDelta : Transition::kScalarGate;
    c.arguments.q = tensor("q");
    c.arguments.k = tensor("k");
    c.arguments.v = tensor("v");
    c.arguments.g = tensor("g");
    c.arguments.level_scales = tensor("level_scales");
    c.gradients.q = tensor("dq");
    c.gradients.k = tensor("dk");
    c.gradients.v = tensor("dv");
    c.gradients.g = tensor("dg");
    c.gradients.level_scales = tensor("dlevel_scales");
    if (delta) {
      c.arguments.beta = tensor("beta");
      c.gradients.beta = tensor("dbeta");
    }
    cases.push_back(std::move(c));
  }
  return cases;
}

}  // namespace fenwick::support
