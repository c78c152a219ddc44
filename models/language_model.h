// Decoder-only language model: embedding, blocks, RMSNorm, head.
//
//   block:  x = x + mixer(RMSNorm(x));   x = x + SwiGLU(RMSNorm(x))
//
// Parameter names are the peers', so that checkpoints load by name: Mamba-2 and its log-linear
// version as `backbone.layers.N.mixer...`, the others as `model.layers.N.attn...`.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "models/block.h"
#include "models/config.h"
#include "models/state.h"

namespace fenwick::models {

class LanguageModelImpl : public torch::nn::Module {
 public:
  // Initialised as the peers do it, from torch's generator (torch::manual_seed).
  explicit LanguageModelImpl(const ModelConfig& config);

  // Logits [B, T, vocab_size] of input_ids [B, T] int64; every sequence starts empty.
  // cu_seqlens: N + 1 offsets into T of N packed sequences; needs B = 1.
  torch::Tensor forward(const torch::Tensor& input_ids,
                        const std::optional<torch::Tensor>& cu_seqlens = std::nullopt);

  // Hidden states [B, T, hidden_size] after the last norm, and the head alone; for losses that
  // need few rows of the logits.
  torch::Tensor Hidden(const torch::Tensor& input_ids,
                       const std::optional<torch::Tensor>& cu_seqlens = std::nullopt);
  torch::Tensor Head(const torch::Tensor& hidden);

  // Empty state of `sequences` sequences, of the model's type and on its device. rollback: tokens
  // that ModelState::Truncate can take back, at most kStateChunk (0: none).
  ModelState NewState(std::int64_t sequences, std::int64_t rollback = 0) const;

  // Appends input_ids [N, T] to the N sequences of `state` by the parallel form (or, packed,
  // [1, T] with cu_seqlens: pieces of different lengths) and leaves `state` behind them.
  // Returns the logits of all tokens, or with last_only those of the last token of each sequence,
  // [N, 1, vocab_size].
  torch::Tensor Prefill(const torch::Tensor& input_ids, ModelState& state,
                        const std::optional<torch::Tensor>& cu_seqlens = std::nullopt,
                        bool last_only = false);

  // Decoding: appends input_ids [N, T], 1 <= T <= kStateChunk, by the recurrent form, in place and
  // without gradients. Returns the logits [N, T, vocab_size].
  torch::Tensor Step(const torch::Tensor& input_ids, ModelState& state);

  // Low precision is for the matrices: A_log, dt_bias, D and L stay float32 under to(kBFloat16).
  const ModelConfig& config() const { return config_; }
  torch::Device device() const;
  std::int64_t num_parameters() const;

 private:
  // Hidden states; appends to `state` where it is given.
  torch::Tensor Run(const torch::Tensor& input_ids, const std::optional<torch::Tensor>& cu_seqlens,
                    ModelState* state, bool step);

  ModelConfig config_;
  torch::nn::Embedding embeddings_{nullptr};
  std::vector<Block> blocks_;
  RmsNorm norm_{nullptr};
  torch::nn::Linear lm_head_{nullptr};  // null where tied
};
TORCH_MODULE(LanguageModel);

// True for what takes no weight decay: A_log, D, dt_bias, L, norms, biases.
bool SkipsWeightDecay(const std::string& name, const torch::Tensor& parameter);

}  // namespace fenwick::models
