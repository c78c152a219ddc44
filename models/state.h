// What a model keeps of the tokens it has seen, for decoding: convolution tails, and per mixer the
// Fenwick state (log-linear), one K x V matrix a head (linear parents) or keys and values
// (attention). Every sequence has its own position.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <vector>

#include "models/config.h"

namespace fenwick::models {

// The last inputs of a causal convolution of width W, oldest first: [N, D, rollback + W - 1].
struct ConvState {
  torch::Tensor history;
};

// Layout of include/fenwick/state.h. Undefined tensors where the mixer is not log-linear.
struct FenwickState {
  torch::Tensor k;         // [N, kStateRing, G, K]
  torch::Tensor v;         // [N, kStateRing, H, V]
  torch::Tensor g;         // [N, kStateRing, H] float32
  torch::Tensor beta;      // [N, kStateRing, H]; delta rule only
  torch::Tensor nodes;     // [N, H, S, K, V] float32
  torch::Tensor position;  // [N] int64
  torch::Tensor base;      // [N] int64
  bool given() const { return position.defined(); }
};

// One layer. What a mixer does not use stays empty.
struct LayerState {
  std::vector<ConvState> conv;
  FenwickState fenwick;
  torch::Tensor recurrent;  // [N, H, K, V] float32: a linear parent's state
  torch::Tensor keys;       // [N, capacity, G, K]: attention, rotated
  torch::Tensor values;     // [N, capacity, G, V]
};

class ModelState {
 public:
  // Empty states of `sequences` sequences; made by LanguageModel::NewState.
  ModelState(const ModelConfig& config, std::int64_t sequences, std::int64_t rollback,
             torch::TensorOptions options);

  std::int64_t num_sequences() const { return static_cast<std::int64_t>(positions_.size()); }
  std::int64_t position(std::int64_t sequence) const { return positions_.at(sequence); }
  std::int64_t max_position() const;
  std::int64_t bytes() const;  // memory held by all tensors

  ModelState Clone() const;
  // A state whose sequence i is a copy of sequence indices[i] (beam search, forks, ragged batches).
  ModelState Select(const std::vector<std::int64_t>& indices) const;
  ModelState To(torch::Device device) const;

  // Forgets the newest tokens[n] tokens of sequence n (speculative decoding). Allowed up to the
  // `rollback` tokens the state was made with and that came since the last truncation; always for
  // attention, never for the linear parents, whose state cannot be undone. Throws Error otherwise
  // and changes nothing.
  void Truncate(const std::vector<std::int64_t>& tokens);

  // Used by the modules.
  std::vector<LayerState>& layers() { return layers_; }
  const std::vector<std::int64_t>& positions() const { return positions_; }
  // Makes room for tokens[n] more tokens of sequence n.
  void Reserve(const std::vector<std::int64_t>& tokens);
  // Counts tokens[n] more tokens of sequence n, after every layer has appended them.
  void Advance(const std::vector<std::int64_t>& tokens);

 private:
  ModelConfig config_;
  std::int64_t rollback_;
  std::vector<LayerState> layers_;
  std::vector<std::int64_t> positions_;  // tokens seen
  std::vector<std::int64_t> bases_;      // tokens folded into Fenwick nodes: NextBase
  std::vector<std::int64_t> removable_;  // tokens that Truncate may still remove
};

}  // namespace fenwick::models
