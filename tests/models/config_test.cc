#include "models/config.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "fenwick/error.h"

namespace fenwick::models {
namespace {

std::string MessageOf(const std::string& text) {
  try {
    ParseConfig(text);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Config, ReadsThePeersFile) {
  const ModelConfig config = ParseConfig(R"({
    "model_type": "log_linear_mamba2", "vocab_size": 97, "hidden_size": 64, "state_size": 32,
    "num_hidden_layers": 2, "norm_eps": 1e-05, "conv_kernel": 4, "conv_init": null, "expand": 2,
    "A_init_range": [1, 16], "use_bias": false, "use_conv_bias": true, "hidden_act": "silu",
    "dt_limit": [0.0, Infinity], "n_groups": 1, "head_dim": 64, "num_heads": 2,
    "rescale_prenorm_residual": true, "residual_in_fp32": false, "norm_before_gate": false,
    "architectures": null, "id2label": {"0": "says \"Infinity\""}})");
  EXPECT_EQ(config.mixer, MixerKind::kLogLinearMamba2);
  EXPECT_EQ(config.Heads(), 2);
  EXPECT_EQ(config.Groups(), 1);
  EXPECT_EQ(config.KeySize(), 32);
  EXPECT_EQ(config.ValueSize(), 64);
  EXPECT_EQ(config.InnerSize(), 128);
  EXPECT_EQ(config.IntermediateSize(), 256);
  EXPECT_EQ(config.Levels(), 15);
  EXPECT_TRUE(config.use_conv_bias);
}

TEST(Config, ReadsInfinityAsPythonWritesIt) {
  for (const char* limit : {"[0.0, Infinity]", R"([0.0, {"__float__": "Infinity"}])", "null"}) {
    EXPECT_EQ(
        MessageOf(R"({"model_type": "log_linear_mamba2", "dt_limit": )" + std::string(limit) + "}"),
        "")
        << limit;
  }
}

TEST(Config, ReadsEverySpellingOfLevelsAndMlp) {
  const auto read = [](const std::string& pairs) {
    return ParseConfig(R"({"model_type": "log_linear_gated_deltanet", "hidden_size": 256, )" +
                       pairs + "}");
  };
  for (const char* pairs : {R"("max_num_levels": 9, "level_policy": "saturate")",
                            R"("num_levels": 9, "saturate": true)"}) {
    EXPECT_EQ(read(pairs).num_levels, 9) << pairs;
    EXPECT_TRUE(read(pairs).saturate) << pairs;
  }
  EXPECT_FALSE(read(R"("level_policy": "error")").saturate);
  EXPECT_EQ(read(R"("hidden_ratio": 4)").IntermediateSize(), 768);
  EXPECT_EQ(read(R"("hidden_ratio": 2)").IntermediateSize(), 512);
  EXPECT_EQ(read(R"("hidden_ratio": 2, "intermediate_size": 96)").IntermediateSize(), 96);
}

TEST(Config, SizesOfGatedDeltaNet) {
  const ModelConfig config = ParseConfig(R"({"model_type": "gated_deltanet", "hidden_size": 512,
    "head_dim": 64, "num_heads": 4, "num_v_heads": 8, "expand_v": 2, "conv_size": 3})");
  EXPECT_EQ(config.Groups(), 4);
  EXPECT_EQ(config.Heads(), 8);
  EXPECT_EQ(config.KeySize(), 64);
  EXPECT_EQ(config.ValueSize(), 128);
  EXPECT_EQ(config.conv_kernel, 3);
  EXPECT_EQ(config.Levels(), 0);
  EXPECT_EQ(config.IntermediateSize(), 1536);
}

TEST(Config, WritesWhatItReads) {
  for (const char* name : {"log_linear_mamba2", "log_linear_gated_deltanet", "mamba2",
                           "gated_deltanet", "transformer"}) {
    ModelConfig config = ModelConfig::Defaults(ParseMixerKind(name));
    config.hidden_size = 256;
    config.num_heads = IsMamba(config.mixer) ? 8 : 4;
    config.norm_eps = 3e-6;
    config.dt_max = 0.2;
    config.conv_init = 0.25;
    config.num_levels = 9;
    config.saturate = true;
    config.tie_word_embeddings = true;
    const ModelConfig once = ConfigFromJson(ConfigToJson(config));
    EXPECT_EQ(once, ConfigFromJson(ConfigToJson(once))) << name;
    EXPECT_EQ(ConfigToJson(once), ConfigToJson(config)) << name;
    EXPECT_EQ(once.norm_eps, 3e-6) << name;
    EXPECT_TRUE(once.tie_word_embeddings) << name;
    if (IsLogLinear(config.mixer)) {
      EXPECT_EQ(once.num_levels, 9);
      EXPECT_TRUE(once.saturate);
    }
  }
}

TEST(Config, RejectsByName) {
  EXPECT_NE(MessageOf("{").find("JSON"), std::string::npos);
  EXPECT_NE(MessageOf("{}").find("model_type"), std::string::npos);
  EXPECT_NE(MessageOf(R"({"model_type": "rnn"})").find("log_linear_mamba2"), std::string::npos);
  const auto with = [](const std::string& pair) {
    return MessageOf(R"({"model_type": "log_linear_mamba2", )" + pair + "}");
  };
  EXPECT_EQ(with(R"("vocab_size": 5)"), "");
  EXPECT_NE(with(R"("vocab_size": 0)").find("vocab_size"), std::string::npos);
  EXPECT_NE(with(R"("vocab_size": "many")").find("vocab_size"), std::string::npos);
  EXPECT_NE(with(R"("head_dim": 3)").find("num_heads"), std::string::npos);
  EXPECT_NE(with(R"("n_groups": 7)").find("n_groups"), std::string::npos);
  EXPECT_NE(with(R"("hidden_act": "gelu")").find("hidden_act"), std::string::npos);
  EXPECT_NE(with(R"("norm_before_gate": true)").find("norm_before_gate"), std::string::npos);
  EXPECT_NE(with(R"("dt_limit": [0.001, Infinity])").find("dt_limit"), std::string::npos);
  EXPECT_NE(with(R"("num_levels": 0)").find("num_levels"), std::string::npos);
  EXPECT_NE(with(R"("A_init_range": [4])").find("A_init_range"), std::string::npos);
  EXPECT_NE(with(R"("level_policy": "wrap")").find("level_policy"), std::string::npos);
  EXPECT_NE(with(R"("attnres_block_size": 2)").find("attnres_block_size"), std::string::npos);
}

}  // namespace
}  // namespace fenwick::models
