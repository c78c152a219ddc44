// What all token mixers share: their interface, the short convolution, the norms, and the call of
// the recurrence, log-linear or linear.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "models/config.h"
#include "models/state.h"

namespace fenwick::models {

// How the tokens of one call belong to sequences, and the state they append to.
struct Sequences {
  torch::Tensor cu_seqlens;                // [N + 1] int64 on the CPU; undefined: N = B rows
  std::vector<std::int64_t> offsets = {};  // the same numbers; empty: N = B rows
  LayerState* state = nullptr;             // null: all sequences start empty and nothing is kept
  const std::vector<std::int64_t>* positions = nullptr;  // [N], with a state: tokens already in it
  bool step = false;                                     // recurrent form, state in place

  bool packed() const { return !offsets.empty(); }
  std::optional<torch::Tensor> optional_cu_seqlens() const {
    return packed() ? std::optional(cu_seqlens) : std::nullopt;
  }
};

// x [B, T, hidden_size] -> [B, T, hidden_size].
class Mixer : public torch::nn::Module {
 public:
  virtual torch::Tensor forward(const torch::Tensor& x, const Sequences& sequences) = 0;
  // An empty state; options: the type and device of activations.
  virtual LayerState NewState(std::int64_t sequences, std::int64_t rollback,
                              const torch::TensorOptions& options) const = 0;

  // Parameters of the mixer itself (A_log, dt_bias, D, L) stay float32 in low precision: decays
  // and level weights lose too much as bfloat16, and they are few.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  using torch::nn::Module::to;
};

// Causal depthwise convolution with SiLU. `weight` [D, 1, W], `bias` [D], as torch's Conv1d.
class ShortConvolutionImpl : public torch::nn::Module {
 public:
  ShortConvolutionImpl(std::int64_t channels, std::int64_t width, bool with_bias);
  // x [B, T, D] -> [B, T, D]; history: the entry of LayerState::conv, null without a state.
  torch::Tensor forward(const torch::Tensor& x, const Sequences& sequences, torch::Tensor* history);
  torch::Tensor NewHistory(std::int64_t sequences, std::int64_t rollback,
                           const torch::TensorOptions& options) const;

  torch::Tensor weight, bias;
};
TORCH_MODULE(ShortConvolution);

// x / rms(x) * weight over the last axis, each of its `groups` equal parts by itself (Mamba-2),
// with an optional gate.
class RmsNormImpl : public torch::nn::Module {
 public:
  RmsNormImpl(std::int64_t size, double eps, std::int64_t groups = 1);
  torch::Tensor forward(const torch::Tensor& x);
  // norm_before_gate: norm(x) * silu(gate), else norm(x * silu(gate)).
  torch::Tensor Gated(const torch::Tensor& x, const torch::Tensor& gate, bool norm_before_gate);

  torch::Tensor weight;

 private:
  double eps_;
  std::int64_t groups_;
};
TORCH_MODULE(RmsNorm);

// The recurrence of a mixer on q, k [B, T, G, K], v [B, T, H, V], g [B, T, H] and, for the delta
// rule, beta [B, T, H]: operator 1 or 2 with level_scales [B, T, H, L] where those are defined, the
// linear parent otherwise. Reads and updates sequences.state.
struct RecurrenceInputs {
  torch::Tensor q, k, v, g, beta, level_scales;
  bool saturate = false;
};
torch::Tensor Recurrence(const RecurrenceInputs& inputs, const Sequences& sequences);
// Adds the empty state of that recurrence to `layer`.
void AddRecurrenceState(const ModelConfig& config, std::int64_t sequences,
                        const torch::TensorOptions& options, LayerState& layer);

// dt_bias: inverse softplus of a log-uniform time step. A_log: logarithm of a uniform decay. [H].
torch::Tensor InitialTimeStepBias(const ModelConfig& config);
torch::Tensor InitialDecayLog(const ModelConfig& config);

}  // namespace fenwick::models
