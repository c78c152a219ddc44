// JSON <-> ModelConfig, and the sizes that follow from a configuration.
#include "models/config.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <type_traits>

#include "fenwick/error.h"
#include "fenwick/layers.h"
#include "fenwick/ops.h"

namespace fenwick::models {
namespace {

using nlohmann::json;

struct NamedMixer {
  MixerKind kind;
  const char* name;
};
constexpr NamedMixer kMixers[] = {
    {MixerKind::kLogLinearMamba2, "log_linear_mamba2"},
    {MixerKind::kLogLinearGatedDeltaNet, "log_linear_gated_deltanet"},
    {MixerKind::kMamba2, "mamba2"},
    {MixerKind::kGatedDeltaNet, "gated_deltanet"},
    {MixerKind::kAttention, "transformer"},
};

[[noreturn]] void Reject(const std::string& key, const std::string& expected,
                         const std::string& came) {
  throw Error("config: " + key + ": expected " + expected + ", got " + came);
}

std::string OneTo(std::int64_t most) { return "1 to " + std::to_string(most); }

bool Present(const json& object, const char* key) {
  return object.contains(key) && !object.at(key).is_null();
}

// Sets `value` where one of `keys` is there; the first one wins.
template <typename T>
void Read(const json& object, std::initializer_list<const char*> keys, T& value) {
  for (const char* key : keys) {
    if (!Present(object, key)) continue;
    const json& given = object.at(key);
    if constexpr (std::is_same_v<T, bool>) {
      if (!given.is_boolean()) Reject(key, "true or false", given.dump());
    } else if constexpr (std::is_integral_v<T>) {
      const bool whole = given.is_number_integer() ||
                         (given.is_number() && std::floor(given.get<double>()) == given);
      if (!whole) Reject(key, "a whole number", given.dump());
    } else {
      if (!given.is_number()) Reject(key, "a number", given.dump());
    }
    value = given.get<T>();
    return;
  }
}

// A key that must have one value where it is there at all, since nothing else is implemented.
template <typename T>
void Require(const json& object, const char* key, const T& only) {
  if (Present(object, key) && object.at(key) != json(only)) {
    Reject(key, json(only).dump() + " (nothing else is implemented)", object.at(key).dump());
  }
}

void RequireNull(const json& object, const char* key) {
  if (Present(object, key)) Reject(key, "null", object.at(key).dump());
}

// As ParseJson leaves a bare one, as transformers 5 writes it, or as a number.
bool IsInfinity(const json& value) {
  return value.is_null() || value == json{{"__float__", "Infinity"}} ||
         value == std::numeric_limits<double>::infinity();
}

void RequireSilu(const json& object, const char* key) {
  if (Present(object, key) && object.at(key) != "silu" && object.at(key) != "swish") {
    Reject(key, "silu or swish", object.at(key).dump());
  }
}

void RejectUnsupported(const json& object, MixerKind kind) {
  RequireSilu(object, "hidden_act");
  Require(object, "residual_in_fp32", false);
  RequireNull(object, "attnres_block_size");
  if (IsMamba(kind)) {
    Require(object, "norm_before_gate", false);
    Require(object, "rmsnorm", true);
    Require(object, "rms_norm", true);
    Require(object, "D_has_hdim", false);
    for (const char* key : {"dt_limit", "time_step_limit"}) {
      if (!Present(object, key)) continue;
      const json& limit = object.at(key);
      const bool open =
          limit.is_array() && limit.size() == 2 && limit[0] == 0.0 && IsInfinity(limit[1]);
      if (!open) Reject(key, "[0, Infinity]", limit.dump());
    }
  }
  if (IsGatedDelta(kind)) {
    Require(object, "use_gate", true);
    Require(object, "use_short_conv", true);
    RequireNull(object, "attn");
    RequireSilu(object, "output_gate_activation");
  }
  if (kind == MixerKind::kAttention) {
    Require(object, "qk_norm", false);
    RequireNull(object, "window_size");
  }
}

// The peers' rounding.
std::int64_t SwiGluSize(std::int64_t hidden_size, double hidden_ratio) {
  constexpr std::int64_t kMultiple = 256;
  const auto size = static_cast<std::int64_t>(hidden_size * hidden_ratio * 2 / 3);
  return (size + kMultiple - 1) / kMultiple * kMultiple;
}

// Inner size of Mamba-2; rounded, since `fenwick train` writes expand as the ratio of two integers.
std::int64_t Expanded(const ModelConfig& config) {
  return std::llround(config.expand * static_cast<double>(config.hidden_size));
}

void Positive(const char* key, std::int64_t value) {
  if (value < 1) Reject(key, "at least 1", std::to_string(value));
}

}  // namespace

const char* MixerName(MixerKind kind) {
  for (const NamedMixer& mixer : kMixers) {
    if (mixer.kind == kind) return mixer.name;
  }
  return "unknown";
}

MixerKind ParseMixerKind(const std::string& name) {
  std::string known;
  for (const NamedMixer& mixer : kMixers) {
    if (name == mixer.name) return mixer.kind;
    known += (known.empty() ? "" : ", ") + std::string(mixer.name);
  }
  Reject("model_type", "one of " + known, "\"" + name + "\"");
}

ModelConfig ModelConfig::Defaults(MixerKind kind) {
  ModelConfig config;
  config.mixer = kind;
  if (IsMamba(kind)) {
    config.use_conv_bias = true;
    config.rescale_prenorm_residual = true;
  } else {
    config.norm_eps = 1e-6;
  }
  if (IsGatedDelta(kind)) config.A_init_range = {0.0, 16.0};
  return config;
}

std::int64_t ModelConfig::Heads() const {
  if (IsMamba(mixer)) {
    return num_heads > 0 ? num_heads : Expanded(*this) / head_dim;
  }
  const std::int64_t heads = num_heads > 0 ? num_heads : hidden_size / head_dim;
  return IsGatedDelta(mixer) && num_v_heads > 0 ? num_v_heads : heads;
}

std::int64_t ModelConfig::Groups() const {
  if (IsMamba(mixer)) return n_groups;
  const std::int64_t heads = num_heads > 0 ? num_heads : hidden_size / head_dim;
  return mixer == MixerKind::kAttention && num_kv_heads > 0 ? num_kv_heads : heads;
}

std::int64_t ModelConfig::KeySize() const {
  if (IsMamba(mixer)) return state_size;
  return IsGatedDelta(mixer) ? head_dim : hidden_size / Heads();
}

std::int64_t ModelConfig::ValueSize() const {
  if (IsMamba(mixer)) return head_dim;
  return IsGatedDelta(mixer) ? static_cast<std::int64_t>(std::llround(expand_v * head_dim))
                             : hidden_size / Heads();
}

std::int64_t ModelConfig::IntermediateSize() const {
  return intermediate_size > 0 ? intermediate_size : SwiGluSize(hidden_size, 4);
}

void ModelConfig::Validate() const {
  Positive("vocab_size", vocab_size);
  Positive("hidden_size", hidden_size);
  Positive("num_hidden_layers", num_hidden_layers);
  if (intermediate_size < 0) {
    Reject("intermediate_size", "at least 0", std::to_string(intermediate_size));
  }
  if (!(norm_eps > 0)) Reject("norm_eps", "more than 0", std::to_string(norm_eps));
  Positive("head_dim", head_dim);
  Positive("num_heads", Heads());
  Positive(IsMamba(mixer) ? "n_groups" : "num_kv_heads", Groups());
  Positive("state_size", state_size);
  Positive("conv_kernel", conv_kernel);
  if (Heads() % Groups() != 0) {
    Reject(IsMamba(mixer) ? "n_groups" : "num_heads", "a divisor of the number of heads",
           std::to_string(Groups()) + " for " + std::to_string(Heads()) + " heads");
  }
  if (mixer != MixerKind::kAttention) {
    const auto head_size = [](const char* key, std::int64_t size) {
      if (size < 1 || size > kMaxHeadSize) Reject(key, OneTo(kMaxHeadSize), std::to_string(size));
    };
    head_size(IsMamba(mixer) ? "state_size" : "head_dim", KeySize());
    head_size(IsMamba(mixer) ? "head_dim" : "expand_v * head_dim", ValueSize());
    if (conv_kernel > kMaxConvWidth) {
      Reject("conv_kernel", OneTo(kMaxConvWidth), std::to_string(conv_kernel));
    }
  }
  if (IsMamba(mixer) && InnerSize() != Expanded(*this)) {
    Reject("num_heads",
           "expand * hidden_size / head_dim = " + std::to_string(Expanded(*this) / head_dim) +
               " without remainder",
           std::to_string(Heads()));
  }
  if (IsGatedDelta(mixer) && std::abs(expand_v * head_dim - ValueSize()) > 1e-5) {
    Reject("expand_v", "a whole number of head_dim * expand_v", std::to_string(expand_v));
  }
  if (mixer == MixerKind::kAttention) {
    if (hidden_size % Heads() != 0 || KeySize() % 2 != 0) {
      Reject("num_heads", "an even hidden_size / num_heads", std::to_string(Heads()));
    }
    if (!(rope_theta > 0)) Reject("rope_theta", "more than 0", std::to_string(rope_theta));
  }
  if (IsLogLinear(mixer)) {
    if (num_levels < 1 || num_levels > kMaxLevels) {
      Reject("max_num_levels", OneTo(kMaxLevels), std::to_string(num_levels));
    }
  }
  if (conv_init < 0) Reject("conv_init", "at least 0", std::to_string(conv_init));
  if (A_init_range[0] < 0 || A_init_range[1] < A_init_range[0] || !(A_init_range[1] > 0)) {
    Reject("A_init_range", "0 <= first <= second",
           std::to_string(A_init_range[0]) + ", " + std::to_string(A_init_range[1]));
  }
  if (!(dt_min > 0) || dt_max < dt_min || !(dt_init_floor > 0)) {
    Reject("dt_min, dt_max, dt_init_floor", "0 < dt_min <= dt_max and dt_init_floor > 0",
           std::to_string(dt_min) + ", " + std::to_string(dt_max) + ", " +
               std::to_string(dt_init_floor));
  }
}

ModelConfig ConfigFromJson(const json& object) {
  if (!object.is_object()) Reject("the whole", "a JSON object", object.type_name());
  if (!Present(object, "model_type") || !object.at("model_type").is_string()) {
    Reject("model_type", "the name of a mixer", "nothing");
  }
  const MixerKind kind = ParseMixerKind(object.at("model_type").get<std::string>());
  RejectUnsupported(object, kind);
  ModelConfig config = ModelConfig::Defaults(kind);
  Read(object, {"vocab_size"}, config.vocab_size);
  Read(object, {"hidden_size"}, config.hidden_size);
  Read(object, {"num_hidden_layers"}, config.num_hidden_layers);
  double hidden_ratio = 0;
  Read(object, {"hidden_ratio"}, hidden_ratio);
  if (hidden_ratio > 0) config.intermediate_size = SwiGluSize(config.hidden_size, hidden_ratio);
  Read(object, {"intermediate_size"}, config.intermediate_size);
  Read(object, {"norm_eps"}, config.norm_eps);
  Read(object, {"tie_word_embeddings"}, config.tie_word_embeddings);
  Read(object, {"num_heads"}, config.num_heads);
  Read(object, {"num_v_heads"}, config.num_v_heads);
  Read(object, {"num_kv_heads"}, config.num_kv_heads);
  Read(object, {"head_dim"}, config.head_dim);
  Read(object, {"n_groups"}, config.n_groups);
  Read(object, {"state_size"}, config.state_size);
  Read(object, {"expand"}, config.expand);
  Read(object, {"expand_v"}, config.expand_v);
  Read(object, {"conv_kernel", "conv_size"}, config.conv_kernel);
  Read(object, {"use_conv_bias", "conv_bias"}, config.use_conv_bias);
  Read(object, {"use_bias", "qkv_bias"}, config.use_bias);
  Read(object, {"allow_neg_eigval"}, config.allow_neg_eigval);
  Read(object, {"rope_theta"}, config.rope_theta);
  Read(object, {"max_num_levels", "num_levels"}, config.num_levels);
  Read(object, {"saturate"}, config.saturate);
  if (Present(object, "level_policy")) {
    const json& policy = object.at("level_policy");
    if (policy != "error" && policy != "saturate") {
      Reject("level_policy", "\"error\" or \"saturate\"", policy.dump());
    }
    config.saturate = policy == "saturate";
  }
  Read(object, {"initializer_range"}, config.initializer_range);
  Read(object, {"conv_init"}, config.conv_init);
  Read(object, {"rescale_prenorm_residual"}, config.rescale_prenorm_residual);
  Read(object, {"dt_min", "time_step_min"}, config.dt_min);
  Read(object, {"dt_max", "time_step_max"}, config.dt_max);
  Read(object, {"dt_init_floor", "time_step_floor"}, config.dt_init_floor);
  if (Present(object, "A_init_range")) {
    const json& range = object.at("A_init_range");
    if (!range.is_array() || range.size() != 2 || !range[0].is_number() || !range[1].is_number()) {
      Reject("A_init_range", "two numbers", range.dump());
    }
    config.A_init_range = {range[0].get<double>(), range[1].get<double>()};
  }
  config.Validate();
  return config;
}

json ConfigToJson(const ModelConfig& config) {
  json object = {
      {"model_type", MixerName(config.mixer)},
      {"vocab_size", config.vocab_size},
      {"hidden_size", config.hidden_size},
      {"num_hidden_layers", config.num_hidden_layers},
      {"intermediate_size", config.IntermediateSize()},
      {"norm_eps", config.norm_eps},
      {"tie_word_embeddings", config.tie_word_embeddings},
      {"initializer_range", config.initializer_range},
      {"rescale_prenorm_residual", config.rescale_prenorm_residual},
      {"hidden_act", "silu"},
      // No token is special; Python's defaults would stop generation at one and not train another.
      {"bos_token_id", nullptr},
      {"eos_token_id", nullptr},
      {"pad_token_id", nullptr},
  };
  if (config.mixer == MixerKind::kAttention) {
    object["num_heads"] = config.Heads();
    object["num_kv_heads"] = config.Groups();
    object["qkv_bias"] = config.use_bias;
    object["rope_theta"] = config.rope_theta;
    return object;
  }
  object["head_dim"] = config.head_dim;
  if (config.conv_init > 0) object["conv_init"] = config.conv_init;
  object["A_init_range"] = config.A_init_range;
  object["dt_min"] = config.dt_min;
  object["dt_max"] = config.dt_max;
  object["dt_init_floor"] = config.dt_init_floor;
  if (IsMamba(config.mixer)) {
    object["num_heads"] = config.Heads();
    object["n_groups"] = config.n_groups;
    object["state_size"] = config.state_size;
    object["expand"] = config.expand;
    object["conv_kernel"] = config.conv_kernel;
    object["use_conv_bias"] = config.use_conv_bias;
    object["use_bias"] = config.use_bias;
    object["residual_in_fp32"] = false;
  } else {
    object["num_heads"] = config.Groups();
    object["num_v_heads"] = config.Heads();
    object["expand_v"] = config.expand_v;
    object["conv_size"] = config.conv_kernel;
    object["conv_bias"] = config.use_conv_bias;
    object["allow_neg_eigval"] = config.allow_neg_eigval;
  }
  if (IsLogLinear(config.mixer)) {
    object["max_num_levels"] = config.num_levels;
    object["level_policy"] = config.saturate ? "saturate" : "error";
  }
  return object;
}

ModelConfig ParseConfig(const std::string& text) { return ConfigFromJson(ParseJson(text)); }

json ParseJson(const std::string& text) {
  std::string strict;
  strict.reserve(text.size());
  const std::string infinity = "Infinity";
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (!quoted && text.compare(i, infinity.size(), infinity) == 0) {
      strict += "null";
      i += infinity.size() - 1;
      continue;
    }
    strict += text[i];
    if (text[i] == '"') quoted = !quoted;
    if (quoted && text[i] == '\\' && i + 1 < text.size()) strict += text[++i];
  }
  json parsed = json::parse(strict, nullptr, /*allow_exceptions=*/false);
  if (parsed.is_discarded()) Reject("the text", "valid JSON", "something else");
  return parsed;
}

}  // namespace fenwick::models
