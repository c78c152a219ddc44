#include "models/attention.h"

#include <optional>
#include <vector>

namespace fenwick::models {
namespace {

// Rotates x [N, T, H, D] by the angles [N or 1, T, D/2] that its positions give; the halves of D
// are the two coordinates (the peers' convention).
torch::Tensor Rotate(const torch::Tensor& x, const torch::Tensor& angles) {
  const torch::Tensor wide = x.to(torch::promote_types(x.scalar_type(), torch::kFloat));
  const torch::Tensor cosine = angles.cos().to(wide.scalar_type()).unsqueeze(2);
  const torch::Tensor sine = angles.sin().to(wide.scalar_type()).unsqueeze(2);
  const std::vector<torch::Tensor> half = wide.chunk(2, -1);
  return torch::cat({half[0] * cosine - half[1] * sine, half[0] * sine + half[1] * cosine}, -1)
      .to(x.scalar_type());
}

// angle = position / theta^(2i/D), in float64: at a million tokens float32 would be off by 0.1.
torch::Tensor Angles(const torch::Tensor& positions, std::int64_t size, double theta) {
  const torch::Tensor frequency = torch::pow(
      theta, -torch::arange(0, size, 2, positions.options().dtype(torch::kDouble)) / double(size));
  return positions.to(torch::kDouble).unsqueeze(-1) * frequency;
}

// q [N, T, H, D]: the last T of the S tokens of keys and values [N, S, G, D]. -> [N, T, H, D].
torch::Tensor Attend(const torch::Tensor& q, const torch::Tensor& keys,
                     const torch::Tensor& values) {
  const std::int64_t tokens = q.size(1), before = keys.size(1) - tokens;
  if (tokens == 0) return q;
  std::optional<torch::Tensor> mask;
  if (before > 0 && tokens > 1) {
    mask = torch::ones({tokens, keys.size(1)}, q.options().dtype(torch::kBool)).tril(before);
  }
  return torch::scaled_dot_product_attention(
             q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), mask,
             /*dropout_p=*/0.0, /*is_causal=*/before == 0, /*scale=*/std::nullopt,
             /*enable_gqa=*/q.size(2) != keys.size(2))
      .transpose(1, 2);
}

// One call's tokens cut where the sequences, or their lengths so far, differ.
struct Piece {
  std::int64_t row, rows;      // of the input: [row, row + rows)
  std::int64_t begin, tokens;  // of every row
  std::int64_t sequence;       // first sequence; rows of them
  std::int64_t before;         // tokens that they already have
};

std::vector<Piece> Pieces(const torch::Tensor& x, const Sequences& sequences) {
  const auto before = [&](std::int64_t n) {
    return sequences.state != nullptr ? sequences.positions->at(n) : 0;
  };
  std::vector<Piece> pieces;
  if (sequences.packed()) {
    for (std::size_t n = 0; n + 1 < sequences.offsets.size(); ++n) {
      const std::int64_t begin = sequences.offsets[n];
      pieces.push_back(
          {0, 1, begin, sequences.offsets[n + 1] - begin, static_cast<std::int64_t>(n), before(n)});
    }
    return pieces;
  }
  for (std::int64_t n = 0; n < x.size(0); ++n) {
    if (pieces.empty() || pieces.back().before != before(n)) {
      pieces.push_back({n, 0, 0, x.size(1), n, before(n)});
    }
    ++pieces.back().rows;
  }
  return pieces;
}

}  // namespace

AttentionMixerImpl::AttentionMixerImpl(const ModelConfig& config) : config_(config) {
  const auto linear = [&](const char* name, std::int64_t in, std::int64_t out, bool bias) {
    return register_module(name, torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(bias)));
  };
  const std::int64_t inner = config.InnerSize(), keys = config.Groups() * config.KeySize();
  q_proj_ = linear("q_proj", config.hidden_size, inner, config.use_bias);
  k_proj_ = linear("k_proj", config.hidden_size, keys, config.use_bias);
  v_proj_ = linear("v_proj", config.hidden_size, keys, config.use_bias);
  o_proj_ = linear("o_proj", inner, config.hidden_size, false);
}

torch::Tensor AttentionMixerImpl::forward(const torch::Tensor& x, const Sequences& sequences) {
  const auto heads = [&](torch::nn::Linear& projection, std::int64_t count) {
    return projection->forward(x).unflatten(-1, {count, -1});
  };
  const torch::Tensor q = heads(q_proj_, config_.Heads());
  const torch::Tensor k = heads(k_proj_, config_.Groups());
  const torch::Tensor v = heads(v_proj_, config_.Groups());
  const bool packed = sequences.packed();
  std::vector<torch::Tensor> outputs;
  for (const Piece& piece : Pieces(x, sequences)) {
    const auto part = [&](const torch::Tensor& all) {
      return all.narrow(0, piece.row, piece.rows).narrow(1, piece.begin, piece.tokens);
    };
    const torch::Tensor angles = Angles(
        torch::arange(piece.before, piece.before + piece.tokens, x.options().dtype(torch::kLong))
            .unsqueeze(0),
        config_.KeySize(), config_.rope_theta);
    const torch::Tensor query = Rotate(part(q), angles);
    torch::Tensor key = Rotate(part(k), angles), value = part(v);
    if (sequences.state != nullptr) {
      const torch::Tensor keys = sequences.state->keys.narrow(0, piece.sequence, piece.rows);
      const torch::Tensor values = sequences.state->values.narrow(0, piece.sequence, piece.rows);
      {
        const torch::NoGradGuard no_grad;
        keys.narrow(1, piece.before, piece.tokens).copy_(key);
        values.narrow(1, piece.before, piece.tokens).copy_(value);
      }
      // Gradients reach the tokens of this call, not those of the cache.
      if (torch::GradMode::is_enabled()) {
        key = torch::cat({keys.narrow(1, 0, piece.before), key}, 1);
        value = torch::cat({values.narrow(1, 0, piece.before), value}, 1);
      } else {
        key = keys.narrow(1, 0, piece.before + piece.tokens);
        value = values.narrow(1, 0, piece.before + piece.tokens);
      }
    }
    outputs.push_back(Attend(query, key, value));
  }
  if (outputs.empty()) return torch::zeros_like(x);
  return o_proj_->forward(torch::cat(outputs, packed ? 1 : 0).flatten(-2));
}

LayerState AttentionMixerImpl::NewState(std::int64_t sequences, std::int64_t /*rollback*/,
                                        const torch::TensorOptions& options) const {
  LayerState layer;
  layer.keys = torch::zeros({sequences, 0, config_.Groups(), config_.KeySize()}, options);
  layer.values = layer.keys.clone();
  return layer;
}

}  // namespace fenwick::models
