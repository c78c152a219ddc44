// `fenwick verify FILE...`: golden files, laid out as those of tests/golden.
//
//   operators  "mamba2/CASE/q" ...: inputs, "o" and gradients, run in float64
//   model      the weights by name, "golden.input_ids", "golden.logits"; "config" in the metadata
//   layer      one mixer's weights, "golden.x", "golden.y"; "config" in the metadata
//
// A file made in bfloat16 says so in its metadata ("dtype").
#include <torch/torch.h>

#include <cmath>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "apps/fenwick/commands.h"
#include "apps/fenwick/report.h"
#include "models/gated_deltanet.h"
#include "models/language_model.h"
#include "models/mamba2.h"
#include "models/safetensors.h"
#include "support/golden.h"
#include "tasks/device.h"

namespace fenwick::app {
namespace {

using torch::Tensor;

// The operators' files hold float32 values of a float64 computation.
constexpr double kOperatorTolerance = 3e-7;
constexpr double kFloat32Tolerance = 1e-5;
constexpr double kBFloat16Tolerance = 1e-2;

double RelativeError(const Tensor& out, const Tensor& expected) {
  if (out.sizes() != expected.sizes()) return INFINITY;
  const Tensor a = out.detach().to(torch::kCPU, torch::kFloat64);
  const Tensor b = expected.to(torch::kCPU, torch::kFloat64);
  return (a - b).norm().item<double>() / b.norm().item<double>();
}

void VerifyOperators(const std::string& file, const std::vector<support::GoldenCase>& cases,
                     Device device, ErrorTable& table) {
  const support::RunOptions options{.device = device,
                                    .dtype = DType::kFloat64,
                                    .beta_dtype = DType::kFloat64,
                                    .scales_dtype = DType::kFloat64};
  for (const support::GoldenCase& one : cases) {
    const auto add = [&](const char* name, const reference::Tensor& out,
                         const reference::Tensor& expected) {
      if (!expected.given()) return;
      table.Add({file, support::DeviceName(device), one.name + "/" + name},
                support::RelativeError(out, expected), kOperatorTolerance);
    };
    add("o", support::RunForward(one.arguments, options).o, one.o);
    const reference::Gradients d = support::RunBackward(one.arguments, one.d_o, {}, options);
    add("dq", d.q, one.gradients.q);
    add("dk", d.k, one.gradients.k);
    add("dv", d.v, one.gradients.v);
    add("dg", d.g, one.gradients.g);
    add("dbeta", d.beta, one.gradients.beta);
    add("dlevel_scales", d.level_scales, one.gradients.level_scales);
  }
}

double ToleranceOf(const models::SafetensorsFile& file) {
  const auto dtype = file.metadata.find("dtype");
  const bool low =
      dtype != file.metadata.end() && dtype->second.find("bfloat16") != std::string::npos;
  return low ? kBFloat16Tolerance : kFloat32Tolerance;
}

// Removes and returns a tensor.
Tensor Take(models::TensorMap& tensors, const std::string& path, const std::string& name) {
  const auto found = tensors.find(name);
  if (found == tensors.end()) throw Error(path + ": expected a tensor " + name + ", got none");
  Tensor tensor = found->second;
  tensors.erase(found);
  return tensor;
}

// A layer's metadata has no model_type: its weights tell.
std::string MixerOf(const models::TensorMap& weights) {
  const std::string family = weights.contains("in_proj.weight") ? "mamba2" : "gated_deltanet";
  return (weights.contains("L") ? "log_linear_" : "") + family;
}

std::string ConfigText(const models::SafetensorsFile& file, const std::string& path) {
  const auto text = file.metadata.find("config");
  if (text == file.metadata.end()) throw Error(path + ": expected a config in the metadata");
  return text->second;
}

void VerifyModel(const std::string& path, models::SafetensorsFile file, torch::Device device,
                 const std::string& label, ErrorTable& table) {
  const double tolerance = ToleranceOf(file);
  const Tensor ids = Take(file.tensors, path, "golden.input_ids").to(device);
  const Tensor expected = Take(file.tensors, path, "golden.logits");
  models::LanguageModel model(models::ParseConfig(ConfigText(file, path)));
  models::LoadWeights(*model, file.tensors);
  model->to(device);
  const auto add = [&](const char* name, const Tensor& logits) {
    table.Add({label, device.str(), name}, RelativeError(logits, expected), tolerance);
  };
  add("golden.logits", model->forward(ids));
  models::ModelState state = model->NewState(ids.size(0));
  const std::int64_t half = ids.size(1) / 2;
  std::vector<Tensor> parts{model->Prefill(ids.narrow(1, 0, half).contiguous(), state)};
  for (std::int64_t t = half; t < ids.size(1); ++t) {
    parts.push_back(model->Step(ids.narrow(1, t, 1).contiguous(), state));
  }
  add("golden.logits, prefill and steps", torch::cat(parts, 1));
}

void VerifyLayer(const std::string& path, models::SafetensorsFile file, torch::Device device,
                 const std::string& label, ErrorTable& table) {
  const double tolerance = ToleranceOf(file);
  const Tensor x = Take(file.tensors, path, "golden.x").to(device);
  const Tensor expected = Take(file.tensors, path, "golden.y");
  nlohmann::json json = nlohmann::json::parse(ConfigText(file, path));
  json["model_type"] = MixerOf(file.tensors);
  // The default of the peers' layers; their models pass 1e-6 to the gated delta rule's.
  if (!json.contains("norm_eps")) json["norm_eps"] = 1e-5;
  if (file.tensors.contains("L")) json["max_num_levels"] = file.tensors.at("L").size(-1);
  const models::ModelConfig config = models::ConfigFromJson(json);
  std::shared_ptr<models::Mixer> mixer;
  if (models::IsMamba(config.mixer)) {
    mixer = std::make_shared<models::Mamba2MixerImpl>(config);
  } else {
    mixer = std::make_shared<models::GatedDeltaNetMixerImpl>(config);
  }
  models::LoadWeights(*mixer, file.tensors);
  static_cast<torch::nn::Module&>(*mixer).to(device);
  table.Add({label, device.str(), "golden.y"}, RelativeError(mixer->forward(x, {}), expected),
            tolerance);
}

}  // namespace

int RunVerifyFiles(const VerifyOptions& options) {
  torch::NoGradGuard no_grad;
  const std::vector<std::string> devices =
      options.devices.empty() ? std::vector<std::string>{"cpu"} : options.devices;
  ErrorTable table;
  for (const std::string& path : options.files) {
    const std::string label = std::filesystem::path(path).filename().string();
    const support::SafetensorsFile file(path);
    const auto cases = support::GoldenCases(file);
    const bool model = file.entries().contains("golden.logits");
    const bool layer = file.entries().contains("golden.y");
    if (cases.empty() && !model && !layer) {
      throw Error(path +
                  ": expected a golden file (mamba2/ or gated_delta/ cases, golden.logits or "
                  "golden.y), found none of these");
    }
    for (const std::string& name : devices) {
      const torch::Device device = tasks::DeviceOf(name);
      if (!cases.empty()) {
        VerifyOperators(label, cases, device.is_cuda() ? Device::kCUDA : Device::kCPU, table);
      } else if (model) {
        VerifyModel(path, models::LoadSafetensors(path), device, label, table);
      } else {
        VerifyLayer(path, models::LoadSafetensors(path), device, label, table);
      }
    }
  }
  table.Print({"file", "device", "tensor"});
  return table.Verdict();
}

}  // namespace fenwick::app
