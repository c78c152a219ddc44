#include "models/safetensors.h"

#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

#include "fenwick/error.h"
#include "support/safetensors.h"

namespace fenwick::models {
namespace {

constexpr std::pair<const char*, torch::ScalarType> kTypes[] = {
    {"F64", torch::kDouble},    {"F32", torch::kFloat}, {"F16", torch::kHalf},
    {"BF16", torch::kBFloat16}, {"I64", torch::kLong},  {"I32", torch::kInt},
    {"I16", torch::kShort},     {"I8", torch::kChar},   {"U8", torch::kByte},
    {"BOOL", torch::kBool}};

std::string Shape(const torch::Tensor& tensor) {
  std::string text = "[";
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(tensor.size(i));
  }
  return text + "]";
}

}  // namespace

SafetensorsFile LoadSafetensors(const std::filesystem::path& path) {
  const support::SafetensorsFile file(path);
  SafetensorsFile result;
  result.metadata = file.metadata();
  for (const auto& [name, entry] : file.entries()) {
    std::optional<torch::ScalarType> type;
    for (const auto& [text, scalar] : kTypes) {
      if (entry.dtype == text) type = scalar;
    }
    if (!type) {
      throw Error(path.string() + ": tensor " + name + " has type " + entry.dtype +
                  ", which is not supported");
    }
    torch::Tensor tensor = torch::empty(entry.shape, *type);
    if (!entry.data.empty()) {
      std::memcpy(tensor.data_ptr(), entry.data.data(), entry.data.size());
    }
    result.tensors.emplace(name, std::move(tensor));
  }
  return result;
}

void SaveSafetensors(const std::filesystem::path& path, const TensorMap& tensors,
                     const std::map<std::string, std::string>& metadata) {
  std::vector<torch::Tensor> held;  // what the entries point into
  std::map<std::string, support::SafetensorsEntry> entries;
  for (const auto& [name, tensor] : tensors) {
    const torch::Tensor& flat = held.emplace_back(tensor.detach().to(torch::kCPU).contiguous());
    support::SafetensorsEntry entry;
    for (const auto& [text, scalar] : kTypes) {
      if (flat.scalar_type() == scalar) entry.dtype = text;
    }
    entry.shape = flat.sizes().vec();
    entry.data = {static_cast<const std::byte*>(flat.const_data_ptr()), flat.nbytes()};
    entries.emplace(name, std::move(entry));
  }
  support::WriteSafetensors(path, entries, metadata);
}

void SaveWeights(const torch::nn::Module& module, const std::filesystem::path& path) {
  TensorMap tensors;
  for (const auto& named : module.named_parameters()) tensors[named.key()] = named.value();
  SaveSafetensors(path, tensors, {{"format", "pt"}});
}

void LoadWeights(torch::nn::Module& module, const TensorMap& weights) {
  auto parameters = module.named_parameters();
  for (const auto& named : parameters) {
    const auto found = weights.find(named.key());
    if (found == weights.end()) throw Error("tensor " + named.key() + " is missing");
    if (found->second.sizes() != named.value().sizes()) {
      throw Error("tensor " + named.key() + ": expected shape " + Shape(named.value()) + ", got " +
                  Shape(found->second));
    }
  }
  for (const auto& [name, tensor] : weights) {
    if (!parameters.contains(name)) throw Error("tensor " + name + " is not part of the model");
  }
  const torch::NoGradGuard no_grad;
  for (auto& named : parameters) named.value().copy_(weights.at(named.key()));
}

void LoadWeights(torch::nn::Module& module, const std::filesystem::path& path) {
  const SafetensorsFile file = LoadSafetensors(path);
  try {
    LoadWeights(module, file.tensors);
  } catch (const Error& error) {
    throw Error(path.string() + ": " + error.what());
  }
}

void SaveModel(const LanguageModel& model, const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  std::filesystem::path temporary = folder / "config.json.tmp";
  {
    std::ofstream file(temporary, std::ios::trunc);
    file << ConfigToJson(model->config()).dump(2) << "\n";
    file.close();
    if (!file) throw Error(temporary.string() + ": cannot be written");
  }
  std::filesystem::rename(temporary, folder / "config.json");
  SaveWeights(*model, folder / "model.safetensors");
}

LanguageModel LoadModel(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "config.json";
  std::ifstream file(path);
  if (!file || std::filesystem::is_directory(path)) throw Error(path.string() + ": cannot be read");
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  ModelConfig config;
  try {
    config = ParseConfig(text);
  } catch (const Error& error) {
    throw Error(path.string() + ": " + error.what());
  }
  LanguageModel model(config);
  LoadWeights(*model, folder / "model.safetensors");
  return model;
}

}  // namespace fenwick::models
