// What a model is made of. The JSON keys are those of the peers' configuration files
// (flash-linear-attention's Hugging Face classes), so that a `config.json` written there is read
// here and the other way round.
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace fenwick::models {

inline constexpr std::int64_t kMaxLevels = 62;  // of a position that fits in 64 bits

// The token mixer of every block; the JSON key is `model_type`.
enum class MixerKind : std::uint8_t {
  kLogLinearMamba2,         // "log_linear_mamba2"
  kLogLinearGatedDeltaNet,  // "log_linear_gated_deltanet"
  kMamba2,                  // "mamba2": the linear parent, no levels
  kGatedDeltaNet,           // "gated_deltanet": the linear parent, no levels
  kAttention,               // "transformer": softmax attention with rotary positions
};

// "log_linear_mamba2", ... and back; ParseMixerKind throws Error and lists the names it knows.
const char* MixerName(MixerKind kind);
MixerKind ParseMixerKind(const std::string& name);

constexpr bool IsMamba(MixerKind kind) {
  return kind == MixerKind::kLogLinearMamba2 || kind == MixerKind::kMamba2;
}
constexpr bool IsGatedDelta(MixerKind kind) {
  return kind == MixerKind::kLogLinearGatedDeltaNet || kind == MixerKind::kGatedDeltaNet;
}
constexpr bool IsLogLinear(MixerKind kind) {
  return kind == MixerKind::kLogLinearMamba2 || kind == MixerKind::kLogLinearGatedDeltaNet;
}

// Axes as everywhere: H value heads, G key groups, K key size, V value size, L levels.
struct ModelConfig {
  MixerKind mixer = MixerKind::kLogLinearMamba2;
  std::int64_t vocab_size = 32000;
  std::int64_t hidden_size = 2048;
  std::int64_t num_hidden_layers = 24;
  std::int64_t intermediate_size = 0;  // of the SwiGLU; 0: ceil((8/3 hidden_size) / 256) * 256,
                                       // or what hidden_ratio gives in place of the 4 in 8/3
  double norm_eps = 1e-5;
  bool tie_word_embeddings = false;

  // Mamba-2: H = num_heads = expand * hidden_size / head_dim, G = n_groups, K = state_size,
  // V = head_dim. Gated DeltaNet: G = num_heads, H = num_v_heads, K = head_dim,
  // V = expand_v * head_dim. Attention: num_heads query heads and num_kv_heads key heads of
  // hidden_size / num_heads.
  std::int64_t num_heads = 0;     // 0: what fills hidden_size (Mamba-2: expand * hidden_size)
  std::int64_t num_v_heads = 0;   // Gated DeltaNet; 0: num_heads
  std::int64_t num_kv_heads = 0;  // attention; 0: num_heads
  std::int64_t head_dim = 64;
  std::int64_t n_groups = 1;      // Mamba-2
  std::int64_t state_size = 128;  // Mamba-2
  double expand = 2;              // Mamba-2
  double expand_v = 1;            // Gated DeltaNet
  std::int64_t conv_kernel = 4;   // also read as conv_size
  bool use_conv_bias = false;     // also read as conv_bias
  bool use_bias = false;          // Mamba-2: in_proj and out_proj; attention: qkv_bias
  bool allow_neg_eigval = false;  // Gated DeltaNet: beta in (0, 2)
  double rope_theta = 10000;      // attention

  // Log-linear only: levels of L, enough for 2^(num_levels - 2) + 1 .. 2^(num_levels - 1) tokens.
  // saturate: the last level absorbs what is older; otherwise a longer sequence is an error.
  // Written as the Python package does, "max_num_levels" and "level_policy" ("error", "saturate");
  // the names here are read too.
  std::int64_t num_levels = 15;
  bool saturate = false;

  // Initialisation.
  double initializer_range = 0.02;                 // standard deviation: projections, embedding
  double conv_init = 0;                            // uniform in +-conv_init; 0: 1/sqrt(width)
  bool rescale_prenorm_residual = false;           // out_proj, down_proj by 1/sqrt(2 layers)
  std::array<double, 2> A_init_range = {1.0, 16};  // A is uniform here, A_log its logarithm
  double dt_min = 0.001;                           // dt is log-uniform in [dt_min, dt_max],
  double dt_max = 0.1;                             // at least dt_init_floor; dt_bias is its
  double dt_init_floor = 1e-4;                     // inverse softplus

  bool operator==(const ModelConfig&) const = default;

  // The peers' defaults for a kind of mixer (conv bias, rescaling, ranges).
  static ModelConfig Defaults(MixerKind kind);

  // Sizes with the zeros above resolved.
  std::int64_t Heads() const;      // H; attention: query heads
  std::int64_t Groups() const;     // G; attention: key heads
  std::int64_t KeySize() const;    // K
  std::int64_t ValueSize() const;  // V
  std::int64_t InnerSize() const { return Heads() * ValueSize(); }
  std::int64_t IntermediateSize() const;
  std::int64_t Levels() const { return IsLogLinear(mixer) ? num_levels : 0; }

  // Throws Error that names the key, what was expected and what came.
  void Validate() const;
};

// Reads a configuration; absent keys keep Defaults(model_type). Keys that do not change what is
// computed are ignored; one that asks for something this library has not (another activation, say)
// throws Error. The result is validated.
ModelConfig ConfigFromJson(const nlohmann::json& json);
nlohmann::json ConfigToJson(const ModelConfig& config);

// The same on text, which ParseJson reads.
ModelConfig ParseConfig(const std::string& text);

// JSON as Python writes it: infinities may stand bare ("dt_limit": [0.0, Infinity]) and become
// null. Throws Error on anything else that is not JSON.
nlohmann::json ParseJson(const std::string& text);

}  // namespace fenwick::models
