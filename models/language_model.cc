#include "models/language_model.h"

#include <cmath>
#include <string>
#include <utility>

#include "fenwick/error.h"
#include "fenwick/state.h"

namespace fenwick::models {
namespace {

bool EndsWith(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// Projections and the embedding normal, convolutions uniform, biases zero; the projections that
// write to the residual stream scaled down with depth (GPT-2's scheme, two of them a block). What
// the mixers set themselves, and norms, stay.
void Initialise(torch::nn::Module& model, const ModelConfig& config) {
  const torch::NoGradGuard no_grad;
  for (const auto& module : model.modules(/*include_self=*/false)) {
    if (auto* linear = module->as<torch::nn::LinearImpl>()) {
      torch::nn::init::normal_(linear->weight, 0.0, config.initializer_range);
      if (linear->bias.defined()) torch::nn::init::zeros_(linear->bias);
    } else if (auto* embedding = module->as<torch::nn::EmbeddingImpl>()) {
      torch::nn::init::normal_(embedding->weight, 0.0, config.initializer_range);
    } else if (auto* convolution = module->as<ShortConvolutionImpl>()) {
      const double bound =
          config.conv_init > 0 ? config.conv_init : 1.0 / std::sqrt(config.conv_kernel);
      torch::nn::init::uniform_(convolution->weight, -bound, bound);
    }
  }
  if (!config.rescale_prenorm_residual) return;
  for (auto& named : model.named_parameters()) {
    const std::string& name = named.key();
    if (EndsWith(name, "out_proj.weight") || EndsWith(name, "o_proj.weight") ||
        EndsWith(name, "down_proj.weight")) {
      torch::nn::init::kaiming_uniform_(named.value(), std::sqrt(5.0));
      named.value().div_(std::sqrt(2.0 * config.num_hidden_layers));
    }
  }
}

// Tokens that a call appends to each sequence.
std::vector<std::int64_t> Lengths(const torch::Tensor& input_ids, const Sequences& sequences) {
  if (!sequences.packed()) {
    return std::vector<std::int64_t>(input_ids.size(0), input_ids.size(1));
  }
  std::vector<std::int64_t> lengths;
  for (std::size_t n = 0; n + 1 < sequences.offsets.size(); ++n) {
    lengths.push_back(sequences.offsets[n + 1] - sequences.offsets[n]);
  }
  return lengths;
}

Sequences MakeSequences(const torch::Tensor& input_ids,
                        const std::optional<torch::Tensor>& cu_seqlens) {
  if (input_ids.dim() != 2) {
    throw Error("input_ids: expected shape [B, T], got " + std::to_string(input_ids.dim()) +
                " dimensions");
  }
  Sequences sequences;
  if (!cu_seqlens.has_value() || !cu_seqlens->defined()) return sequences;
  sequences.cu_seqlens = cu_seqlens->to(torch::kCPU, torch::kLong).contiguous();
  const torch::Tensor& offsets = sequences.cu_seqlens;
  if (input_ids.size(0) != 1 || offsets.dim() != 1 || offsets.size(0) < 1) {
    throw Error("cu_seqlens: expected N + 1 offsets into one row of input_ids, got " +
                std::to_string(offsets.numel()) + " and " + std::to_string(input_ids.size(0)) +
                " rows");
  }
  const std::int64_t* data = offsets.const_data_ptr<std::int64_t>();
  sequences.offsets.assign(data, data + offsets.size(0));
  for (std::size_t n = 0; n + 1 < sequences.offsets.size(); ++n) {
    if (sequences.offsets[n] > sequences.offsets[n + 1]) {
      throw Error("cu_seqlens: expected non-decreasing offsets, got " +
                  std::to_string(sequences.offsets[n + 1]) + " after " +
                  std::to_string(sequences.offsets[n]));
    }
  }
  if (sequences.offsets.front() != 0 || sequences.offsets.back() != input_ids.size(1)) {
    throw Error("cu_seqlens: expected 0 first and " + std::to_string(input_ids.size(1)) +
                " last, got " + std::to_string(sequences.offsets.front()) + " and " +
                std::to_string(sequences.offsets.back()));
  }
  return sequences;
}

}  // namespace

LanguageModelImpl::LanguageModelImpl(const ModelConfig& config) : config_(config) {
  config.Validate();
  const bool mamba = IsMamba(config.mixer);
  const auto body = std::make_shared<torch::nn::Module>();
  embeddings_ = body->register_module("embeddings",
                                      torch::nn::Embedding(config.vocab_size, config.hidden_size));
  const auto layers = body->register_module("layers", std::make_shared<torch::nn::Module>());
  for (std::int64_t i = 0; i < config.num_hidden_layers; ++i) {
    blocks_.push_back(layers->register_module(std::to_string(i), Block(config)));
  }
  norm_ = body->register_module(mamba ? "norm_f" : "norm",
                                RmsNorm(config.hidden_size, config.norm_eps));
  register_module(mamba ? "backbone" : "model", body);
  if (!config.tie_word_embeddings) {
    lm_head_ = register_module(
        "lm_head",
        torch::nn::Linear(
            torch::nn::LinearOptions(config.hidden_size, config.vocab_size).bias(false)));
  }
  Initialise(*this, config);
}

torch::Tensor LanguageModelImpl::Run(const torch::Tensor& input_ids,
                                     const std::optional<torch::Tensor>& cu_seqlens,
                                     ModelState* state, bool step) {
  Sequences sequences = MakeSequences(input_ids, cu_seqlens);
  sequences.step = step;
  std::vector<std::int64_t> lengths;
  if (state != nullptr) {
    lengths = Lengths(input_ids, sequences);
    if (static_cast<std::int64_t>(lengths.size()) != state->num_sequences()) {
      throw Error("state: expected " + std::to_string(lengths.size()) + " sequences, got " +
                  std::to_string(state->num_sequences()));
    }
    state->Reserve(lengths);
    sequences.positions = &state->positions();
  }
  torch::Tensor x = embeddings_->forward(input_ids);
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    if (state != nullptr) sequences.state = &state->layer(i);
    x = blocks_[i]->forward(x, sequences);
  }
  if (state != nullptr) state->Advance(lengths);
  return norm_->forward(x);
}

torch::Tensor LanguageModelImpl::forward(const torch::Tensor& input_ids,
                                         const std::optional<torch::Tensor>& cu_seqlens) {
  return Head(Hidden(input_ids, cu_seqlens));
}

torch::Tensor LanguageModelImpl::Hidden(const torch::Tensor& input_ids,
                                        const std::optional<torch::Tensor>& cu_seqlens) {
  return Run(input_ids, cu_seqlens, nullptr, /*step=*/false);
}

torch::Tensor LanguageModelImpl::Head(const torch::Tensor& hidden) {
  return torch::nn::functional::linear(hidden, lm_head_ ? lm_head_->weight : embeddings_->weight);
}

ModelState LanguageModelImpl::NewState(std::int64_t sequences, std::int64_t rollback) const {
  if (sequences < 0) {
    throw Error("sequences: expected at least 0, got " + std::to_string(sequences));
  }
  if (rollback < 0 || rollback > kStateChunk) {
    throw Error("rollback: expected 0 to " + std::to_string(kStateChunk) + ", got " +
                std::to_string(rollback));
  }
  const torch::TensorOptions options = embeddings_->weight.options().requires_grad(false);
  std::vector<LayerState> layers;
  for (const Block& block : blocks_) {
    layers.push_back(block->mixer().NewState(sequences, rollback, options));
  }
  return ModelState(config_, sequences, rollback, std::move(layers));
}

torch::Tensor LanguageModelImpl::Prefill(const torch::Tensor& input_ids, ModelState& state,
                                         const std::optional<torch::Tensor>& cu_seqlens,
                                         bool last_only) {
  torch::Tensor last;  // of each sequence, its last token in a packed row
  if (last_only) {
    const Sequences sequences = MakeSequences(input_ids, cu_seqlens);
    for (const std::int64_t length : Lengths(input_ids, sequences)) {
      if (length == 0) throw Error("input_ids: last_only needs a token for every sequence");
    }
    if (sequences.packed())
      last = sequences.cu_seqlens.narrow(0, 1, sequences.offsets.size() - 1) - 1;
  }
  torch::Tensor hidden = Run(input_ids, cu_seqlens, &state, /*step=*/false);
  if (last.defined()) {
    hidden = hidden[0].index_select(0, last.to(hidden.device())).unsqueeze(1);
  } else if (last_only) {
    hidden = hidden.narrow(1, hidden.size(1) - 1, 1);
  }
  return Head(hidden);
}

torch::Tensor LanguageModelImpl::Step(const torch::Tensor& input_ids, ModelState& state) {
  if (input_ids.dim() != 2 || input_ids.size(1) < 1 || input_ids.size(1) > kStateChunk) {
    throw Error("input_ids: expected 1 to " + std::to_string(kStateChunk) +
                " tokens a sequence, got " +
                std::to_string(input_ids.dim() == 2 ? input_ids.size(1) : -1));
  }
  const torch::NoGradGuard no_grad;
  return Head(Run(input_ids, std::nullopt, &state, /*step=*/true));
}

torch::Device LanguageModelImpl::device() const { return embeddings_->weight.device(); }

std::int64_t LanguageModelImpl::num_parameters() const {
  std::int64_t total = 0;
  for (const torch::Tensor& parameter : parameters()) total += parameter.numel();
  return total;
}

bool SkipsWeightDecay(const std::string& name, const torch::Tensor& parameter) {
  const std::string last = name.substr(name.rfind('.') + 1);
  if (last == "A_log" || last == "dt_bias" || last == "D" || last == "L" || last == "bias") {
    return true;
  }
  return parameter.dim() <= 1;  // norms
}

}  // namespace fenwick::models
