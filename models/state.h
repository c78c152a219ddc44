// What a model keeps of the tokens it has seen, for decoding: convolution tails, and per mixer the
// Fenwick state (log-linear), one K x V matrix a head (linear parents) or keys and values
// (attention). Every sequence has its own position.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <vector>

#include "models/config.h"
#include "torch/ops_autograd.h"

namespace fenwick::models {

// One layer. What a mixer does not use stays empty.
struct LayerState {
  // For each convolution (width W) its last inputs, oldest first: [N, D, rollback + W - 1].
  std::vector<torch::Tensor> conv;
  fenwick_torch::State fenwick;  // log-linear
  torch::Tensor recurrent;       // [N, H, K, V] float32: a linear parent's state
  torch::Tensor keys;            // [N, capacity, G, K]: attention, rotated
  torch::Tensor values;          // [N, capacity, G, V]
};

// Moves, and copies only by Clone: decoding writes into the tensors.
class ModelState {
 public:
  // Empty states of `sequences` sequences, one entry of `layers` for each layer. Made by
  // LanguageModel::NewState.
  ModelState(const ModelConfig& config, std::int64_t sequences, std::int64_t rollback,
             std::vector<LayerState> layers);
  ModelState(ModelState&&) = default;
  ModelState& operator=(ModelState&&) = default;

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

  // Used by LanguageModel and the mixers.
  const std::vector<std::int64_t>& positions() const { return positions_; }
  LayerState& layer(std::int64_t index) { return layers_.at(index); }
  // Makes room in caches of keys and values for tokens[n] more tokens of sequence n; the Fenwick
  // operators grow their states themselves.
  void Reserve(const std::vector<std::int64_t>& tokens);
  // Counts tokens[n] more tokens of sequence n, after every layer has appended them.
  void Advance(const std::vector<std::int64_t>& tokens);

 private:
  ModelState(const ModelState&) = default;
  // A state whose tensors are f(tensor).
  template <typename F>
  ModelState Map(F&& f) const;

  ModelConfig config_;
  std::int64_t rollback_;
  std::vector<LayerState> layers_;
  std::vector<std::int64_t> positions_;  // tokens seen
  std::vector<std::int64_t> removable_;  // tokens that Truncate may still remove
};

}  // namespace fenwick::models
