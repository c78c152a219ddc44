// Models and layers against files that other people's code wrote (tests/golden).
#include <nlohmann/json.hpp>

#include "model_testing.h"
#include "models/gated_deltanet.h"
#include "models/safetensors.h"

namespace fenwick::models {
namespace {

// A golden file without its "golden." entries, and those.
struct Golden {
  explicit Golden(const std::string& name)
      : file(LoadSafetensors(std::filesystem::path(FENWICK_GOLDEN) / name)) {
    for (const auto& [key, tensor] : file.tensors) {
      (key.rfind("golden.", 0) == 0 ? golden[key.substr(7)] : weights[key]) = tensor;
    }
  }
  SafetensorsFile file;
  TensorMap weights, golden;
};

TEST(GoldenModel, LogLinearMamba2LogitsOfThePeersModel) {
  const Golden file("log_linear_mamba2_model.safetensors");
  LanguageModel model(ParseConfig(file.file.metadata.at("config")));
  LoadWeights(*model, file.weights);
  const torch::NoGradGuard no_grad;
  const torch::Tensor ids = file.golden.at("input_ids");
  const torch::Tensor& expected = file.golden.at("logits");
  const double parallel = RelativeError(model->forward(ids), expected);
  EXPECT_LE(parallel, 1e-5);

  ModelState state = model->NewState(ids.size(0));
  std::vector<torch::Tensor> logits = {model->Prefill(ids.narrow(1, 0, 150), state)};
  for (std::int64_t t = 150; t < ids.size(1); ++t) {
    logits.push_back(model->Step(ids.narrow(1, t, 1), state));
  }
  const double decoded = RelativeError(torch::cat(logits, 1), expected);
  EXPECT_LE(decoded, 1e-5);

  model->to(torch::kDouble);
  const double wide = RelativeError(model->forward(ids), expected);
  EXPECT_LE(wide, 1e-5);
  std::cout << "relative error: float32 " << parallel << ", decoded " << decoded << ", float64 "
            << wide << "\n";
}

TEST(GoldenModel, LogLinearGatedDeltaNetLayerOfTheAuthors) {
  const Golden file("log_linear_gated_deltanet_layer.safetensors");
  nlohmann::json json = nlohmann::json::parse(file.file.metadata.at("config"));
  json["model_type"] = "log_linear_gated_deltanet";
  json["norm_eps"] = 1e-5;  // the layer's own default
  const ModelConfig config = ConfigFromJson(json);
  GatedDeltaNetMixer mixer(config);
  LoadWeights(*mixer, file.weights);
  const torch::NoGradGuard no_grad;
  const torch::Tensor &x = file.golden.at("x"), &y = file.golden.at("y");
  const double exact = RelativeError(mixer->forward(x, {}), y);
  EXPECT_LE(exact, 1e-2);
  mixer->to(torch::kBFloat16);
  const double rounded = RelativeError(mixer->forward(x.to(torch::kBFloat16), {}), y);
  EXPECT_LE(rounded, 1e-2);
  std::cout << "relative error: float32 " << exact << ", bfloat16 " << rounded << "\n";
}

}  // namespace
}  // namespace fenwick::models
