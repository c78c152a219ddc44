// Every kind of model: forms that must agree, causality, gradients, names, types.
#include "models/language_model.h"

#include <cmath>
#include <set>

#include "fenwick/error.h"
#include "model_testing.h"
#include "models/safetensors.h"

namespace fenwick::models {
namespace {

class Model : public EveryMixer {};
INSTANTIATE_TEST_SUITE_P(Every, Model, testing::ValuesIn(kAllMixers), NameOfMixer);

TEST_P(Model, PackedIsSeparate) {
  const ModelConfig config = SmallConfig(GetParam());
  LanguageModel model = RandomModel(config);
  const torch::Tensor ids = RandomTokens(1, 180, config);
  const std::vector<std::int64_t> offsets = {0, 3, 3, 100, 180, 180};
  model->zero_grad();
  const torch::Tensor packed = model->forward(ids, torch::tensor(offsets));
  const torch::Tensor cotangent = torch::randn_like(packed);
  (packed * cotangent).sum().backward();
  std::map<std::string, torch::Tensor> packed_gradients;
  for (const auto& named : model->named_parameters()) {
    packed_gradients[named.key()] = named.value().grad().clone();
  }
  model->zero_grad();
  for (std::size_t n = 0; n + 1 < offsets.size(); ++n) {
    const std::int64_t begin = offsets[n], tokens = offsets[n + 1] - begin;
    if (tokens == 0) continue;
    const torch::Tensor alone = model->forward(ids.narrow(1, begin, tokens));
    EXPECT_LT(RelativeError(packed.narrow(1, begin, tokens), alone), 1e-10) << n;
    (alone * cotangent.narrow(1, begin, tokens)).sum().backward();
  }
  for (const auto& named : model->named_parameters()) {
    EXPECT_LT(RelativeError(packed_gradients.at(named.key()), named.value().grad()), 1e-9)
        << named.key();
  }
}

TEST_P(Model, LaterTokensChangeNothing) {
  const ModelConfig config = SmallConfig(GetParam());
  LanguageModel model = RandomModel(config);
  const torch::NoGradGuard no_grad;
  const torch::Tensor ids = RandomTokens(1, 140, config);
  const torch::Tensor before = model->forward(ids);
  for (const std::int64_t changed : {1, 64, 100, 139}) {
    torch::Tensor other = ids.clone();
    other.narrow(1, changed, 1).add_(1).remainder_(config.vocab_size);
    const torch::Tensor after = model->forward(other);
    EXPECT_TRUE(torch::equal(after.narrow(1, 0, changed), before.narrow(1, 0, changed))) << changed;
    EXPECT_FALSE(torch::equal(after.narrow(1, changed, 1), before.narrow(1, changed, 1)));
    if (changed < 139) {
      EXPECT_FALSE(torch::equal(after.select(1, 139), before.select(1, 139))) << changed;
    }
  }
}

TEST_P(Model, GradientsReachEveryParameter) {
  const ModelConfig config = SmallConfig(GetParam());
  LanguageModel model(config);
  const torch::Tensor ids = RandomTokens(2, 90, config);
  torch::nn::functional::cross_entropy(model->forward(ids).flatten(0, 1), ids.flatten()).backward();
  for (const auto& named : model->named_parameters()) {
    const torch::Tensor& gradient = named.value().grad();
    ASSERT_TRUE(gradient.defined()) << named.key();
    EXPECT_TRUE(torch::isfinite(gradient).all().item<bool>()) << named.key();
    EXPECT_GT(gradient.norm().item<double>(), 0) << named.key();
  }
}

TEST_P(Model, LearnsToCopyTheLastToken) {
  torch::manual_seed(0);
  ModelConfig config = SmallConfig(GetParam());
  config.vocab_size = 8;
  config.num_hidden_layers = 1;
  LanguageModel model(config);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  double loss = 0;
  for (int step = 0; step < 30; ++step) {
    const torch::Tensor ids = RandomTokens(4, 16, config);
    optimizer.zero_grad();
    const torch::Tensor value =
        torch::nn::functional::cross_entropy(model->forward(ids).flatten(0, 1), ids.flatten());
    value.backward();
    optimizer.step();
    loss = value.item<double>();
  }
  EXPECT_LT(loss, 0.5);  // log(8) = 2.08 at the start
}

TEST_P(Model, SavedModelComesBack) {
  ModelConfig config = SmallConfig(GetParam());
  config.tie_word_embeddings = GetParam() == MixerKind::kMamba2;
  const LanguageModel model = RandomModel(config, torch::kFloat);
  const std::filesystem::path folder =
      std::filesystem::path(testing::TempDir()) / (std::string("model_") + MixerName(GetParam()));
  SaveModel(model, folder);
  LanguageModel loaded = LoadModel(folder);
  const torch::NoGradGuard no_grad;
  const torch::Tensor ids = RandomTokens(2, 70, config);
  EXPECT_TRUE(torch::equal(loaded->forward(ids), LanguageModel(model)->forward(ids)));

  TensorMap weights = LoadSafetensors(folder / "model.safetensors").tensors;
  const std::string name = weights.begin()->first;
  const auto message = [&](const TensorMap& changed) -> std::string {
    try {
      LoadWeights(*loaded, changed);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  TensorMap changed = weights;
  changed.erase(name);
  EXPECT_NE(message(changed).find(name), std::string::npos);
  changed = weights;
  changed[name] = torch::zeros({1, 2, 3});
  EXPECT_NE(message(changed).find(name), std::string::npos);
  changed = weights;
  changed["stray.weight"] = torch::zeros({1});
  EXPECT_NE(message(changed).find("stray.weight"), std::string::npos);
  std::filesystem::remove_all(folder);
}

TEST_P(Model, LowPrecisionKeepsTheSmallParameters) {
  const ModelConfig config = SmallConfig(GetParam());
  LanguageModel exact = RandomModel(config, torch::kFloat);
  LanguageModel model(config);
  TensorMap weights;
  for (const auto& named : exact->named_parameters()) weights[named.key()] = named.value();
  LoadWeights(*model, weights);
  model->to(torch::kBFloat16);
  std::set<std::string> wide;
  for (const auto& named : model->named_parameters()) {
    if (named.value().scalar_type() == torch::kFloat) {
      wide.insert(named.key().substr(named.key().rfind('.') + 1));
    } else {
      EXPECT_EQ(named.value().scalar_type(), torch::kBFloat16) << named.key();
    }
  }
  std::set<std::string> expected;
  if (GetParam() != MixerKind::kAttention) expected = {"A_log", "dt_bias"};
  if (IsMamba(GetParam())) expected.insert("D");
  if (IsLogLinear(GetParam())) expected.insert("L");
  EXPECT_EQ(wide, expected);

  // What rounding weights and activations costs after two layers, levels or not. The median over
  // the tokens: where a head's output happens to be tiny, its norm magnifies the rounding.
  constexpr double kTwoLayers = 6e-2;
  const auto error = [](const torch::Tensor& a, const torch::Tensor& b) {
    const torch::Tensor difference = (a.to(torch::kFloat) - b).norm(2, -1);
    return (difference / b.norm(2, -1)).median().item<double>();
  };
  const torch::NoGradGuard no_grad;
  const torch::Tensor ids = RandomTokens(2, 100, config);
  const torch::Tensor logits = model->forward(ids);
  EXPECT_EQ(logits.scalar_type(), torch::kBFloat16);
  EXPECT_LT(error(logits, exact->forward(ids)), kTwoLayers);
  ModelState state = model->NewState(2);
  model->Prefill(ids.narrow(1, 0, 80), state);
  const torch::Tensor steps = model->Step(ids.narrow(1, 80, 20), state);
  EXPECT_LT(error(steps, exact->forward(ids).narrow(1, 80, 20)), kTwoLayers);
}

TEST(LanguageModel, HasThePeersParameterNames) {
  const auto names = [](MixerKind kind) {
    ModelConfig config = SmallConfig(kind);
    config.num_hidden_layers = 1;
    std::set<std::string> result;
    for (const auto& named : LanguageModel(config)->named_parameters()) result.insert(named.key());
    return result;
  };
  const auto with = [](const std::string& layer, const std::vector<std::string>& mixer,
                       const std::vector<std::string>& rest) {
    std::set<std::string> result(rest.begin(), rest.end());
    for (const std::string& name : mixer) result.insert(layer + name);
    return result;
  };
  const std::vector<std::string> backbone = {"backbone.embeddings.weight",
                                             "backbone.layers.0.mixer_norm.weight",
                                             "backbone.layers.0.mlp_norm.weight",
                                             "backbone.layers.0.mlp.gate_proj.weight",
                                             "backbone.layers.0.mlp.up_proj.weight",
                                             "backbone.layers.0.mlp.down_proj.weight",
                                             "backbone.norm_f.weight",
                                             "lm_head.weight"};
  const std::vector<std::string> model = {"model.embeddings.weight",
                                          "model.layers.0.attn_norm.weight",
                                          "model.layers.0.mlp_norm.weight",
                                          "model.layers.0.mlp.gate_proj.weight",
                                          "model.layers.0.mlp.up_proj.weight",
                                          "model.layers.0.mlp.down_proj.weight",
                                          "model.norm.weight",
                                          "lm_head.weight"};
  std::vector<std::string> mamba = {"in_proj.weight", "conv1d.weight",  "conv1d.bias",
                                    "dt_bias",        "A_log",          "D",
                                    "norm.weight",    "out_proj.weight"};
  std::vector<std::string> delta = {
      "q_proj.weight", "k_proj.weight", "v_proj.weight",   "a_proj.weight",   "b_proj.weight",
      "g_proj.weight", "o_proj.weight", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight",
      "A_log",         "dt_bias",       "o_norm.weight"};
  EXPECT_EQ(names(MixerKind::kMamba2), with("backbone.layers.0.mixer.", mamba, backbone));
  EXPECT_EQ(names(MixerKind::kGatedDeltaNet), with("model.layers.0.attn.", delta, model));
  mamba.push_back("L");
  delta.insert(delta.end(), {"L", "l_proj.weight"});
  EXPECT_EQ(names(MixerKind::kLogLinearMamba2), with("backbone.layers.0.mixer.", mamba, backbone));
  EXPECT_EQ(names(MixerKind::kLogLinearGatedDeltaNet), with("model.layers.0.attn.", delta, model));
  EXPECT_EQ(names(MixerKind::kAttention),
            with("model.layers.0.attn.",
                 {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"}, model));
}

TEST(LanguageModel, NormOfSeveralGroupsTreatsEachByItself) {
  std::cout << "seed " << FreshSeed() << "\n";
  const torch::Tensor x = torch::randn({3, 7, 12}, torch::kDouble);
  const torch::Tensor gate = torch::randn({3, 7, 12}, torch::kDouble);
  RmsNorm norm(12, 1e-3, 3);
  norm->to(torch::kDouble);
  const torch::NoGradGuard no_grad;
  norm->weight.uniform_(0.5, 2);
  for (const bool norm_before_gate : {false, true}) {
    const torch::Tensor result = norm->Gated(x, gate, norm_before_gate);
    for (std::int64_t group = 0; group < 3; ++group) {
      const auto part = [&](const torch::Tensor& all) { return all.narrow(-1, 4 * group, 4); };
      torch::Tensor y = norm_before_gate ? part(x) : part(x) * torch::silu(part(gate));
      y = y * torch::rsqrt(y.square().mean(-1, true) + 1e-3) * part(norm->weight);
      if (norm_before_gate) y = y * torch::silu(part(gate));
      EXPECT_LT(RelativeError(part(result), y), 1e-12);
    }
  }
}

TEST(LanguageModel, StartsAsThePeersDo) {
  std::cout << "seed " << FreshSeed() << "\n";
  ModelConfig config = ModelConfig::Defaults(MixerKind::kLogLinearMamba2);
  config.vocab_size = 500;
  config.hidden_size = 128;
  config.head_dim = 4;
  config.num_hidden_layers = 2;
  const LanguageModel model(config);
  const auto parameters = model->named_parameters();
  const auto get = [&](const std::string& name) {
    return parameters["backbone.layers.1.mixer." + name];
  };
  EXPECT_NEAR(get("in_proj.weight").std().item<double>(), 0.02, 0.002);
  EXPECT_NEAR(parameters["backbone.embeddings.weight"].std().item<double>(), 0.02, 0.002);
  EXPECT_LE(get("conv1d.weight").abs().max().item<double>(), 0.5);
  EXPECT_EQ(get("conv1d.bias").abs().max().item<double>(), 0);
  EXPECT_TRUE(get("L").eq(1).all().item<bool>());
  EXPECT_TRUE(get("D").eq(1).all().item<bool>());
  const torch::Tensor a = get("A_log").exp(), dt = torch::softplus(get("dt_bias"));
  EXPECT_GE(a.min().item<double>(), 1 - 1e-5);
  EXPECT_LE(a.max().item<double>(), 16 + 1e-5);
  EXPECT_GE(dt.min().item<double>(), 0.001 * (1 - 1e-3));
  EXPECT_LE(dt.max().item<double>(), 0.1 * (1 + 1e-3));
  // Uniform in +-1/sqrt(fan in), over sqrt(2 * 2 layers).
  const double bound = 1 / std::sqrt(256.0) / 2;
  EXPECT_LE(get("out_proj.weight").abs().max().item<double>(), bound);
  EXPECT_GE(get("out_proj.weight").abs().max().item<double>(), 0.9 * bound);

  std::set<std::string> no_decay;
  for (const auto& named : parameters) {
    if (SkipsWeightDecay(named.key(), named.value())) {
      no_decay.insert(
          named.key().substr(named.key().find_last_of('.', named.key().size() - 1) + 1));
    }
  }
  EXPECT_EQ(no_decay, (std::set<std::string>{"A_log", "D", "L", "bias", "dt_bias", "weight"}));
  EXPECT_TRUE(SkipsWeightDecay("backbone.norm_f.weight", parameters["backbone.norm_f.weight"]));
  EXPECT_FALSE(SkipsWeightDecay("lm_head.weight", parameters["lm_head.weight"]));
  EXPECT_TRUE(SkipsWeightDecay("backbone.layers.0.mixer.L", get("L")));
}

TEST(LanguageModel, RejectsByName) {
  LanguageModel model(SmallConfig(MixerKind::kMamba2));
  const auto message = [](auto&& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  const torch::Tensor ids = torch::zeros({1, 10}, torch::kLong);
  EXPECT_NE(message([&] { model->forward(ids[0]); }).find("input_ids"), std::string::npos);
  for (const std::vector<std::int64_t>& offsets :
       {std::vector<std::int64_t>{0, 9}, {1, 10}, {0, 7, 5, 10}, {}}) {
    EXPECT_NE(message([&] {
                model->forward(ids, torch::tensor(offsets, torch::kLong));
              }).find("cu_seqlens"),
              std::string::npos);
  }
  EXPECT_NE(message([&] { model->NewState(1, 65); }).find("rollback"), std::string::npos);
  ModelState state = model->NewState(1);
  EXPECT_NE(message([&] {
              model->Step(torch::zeros({1, 65}, torch::kLong), state);
            }).find("input_ids"),
            std::string::npos);
}

}  // namespace
}  // namespace fenwick::models
