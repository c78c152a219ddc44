#include "models/state.h"

#include <algorithm>
#include <string>
#include <utility>

#include "fenwick/error.h"
#include "fenwick/state.h"

namespace fenwick::models {
namespace {

// f(tensor) for every tensor of a layer that is defined.
template <typename F>
void ForEachTensor(LayerState& layer, F&& f) {
  const auto visit = [&](torch::Tensor& tensor) {
    if (tensor.defined()) f(tensor);
  };
  for (torch::Tensor& history : layer.conv) visit(history);
  fenwick_torch::State& fenwick = layer.fenwick;
  for (torch::Tensor* tensor :
       {&fenwick.k, &fenwick.v, &fenwick.g, &fenwick.beta, &fenwick.nodes, &fenwick.position,
        &fenwick.base, &layer.recurrent, &layer.keys, &layer.values}) {
    visit(*tensor);
  }
}

void CheckLength(const std::vector<std::int64_t>& tokens, std::int64_t sequences) {
  if (static_cast<std::int64_t>(tokens.size()) != sequences) {
    throw Error("tokens: expected one number for each of " + std::to_string(sequences) +
                " sequences, got " + std::to_string(tokens.size()));
  }
}

// rows [N, capacity, G, D] with at least `capacity` rows; grows to twice as many, so that the cost
// of copying stays constant a token.
torch::Tensor WithCapacity(const torch::Tensor& rows, std::int64_t capacity) {
  if (rows.size(1) >= capacity) return rows;
  std::vector<std::int64_t> more = rows.sizes().vec();
  more[1] = std::max(capacity, 2 * rows.size(1)) - rows.size(1);
  return torch::cat({rows, rows.new_zeros(more)}, 1);
}

}  // namespace

ModelState::ModelState(const ModelConfig& config, std::int64_t sequences, std::int64_t rollback,
                       std::vector<LayerState> layers)
    : config_(config),
      rollback_(rollback),
      layers_(std::move(layers)),
      positions_(sequences, 0),
      removable_(sequences, 0) {}

std::int64_t ModelState::max_position() const {
  return positions_.empty() ? 0 : *std::max_element(positions_.begin(), positions_.end());
}

std::int64_t ModelState::bytes() const {
  std::int64_t total = 0;
  Map([&](const torch::Tensor& tensor) {
    total += static_cast<std::int64_t>(tensor.nbytes());
    return tensor;
  });
  return total;
}

template <typename F>
ModelState ModelState::Map(F&& f) const {
  ModelState result = *this;
  for (LayerState& layer : result.layers_) {
    ForEachTensor(layer, [&](torch::Tensor& tensor) { tensor = f(tensor); });
  }
  return result;
}

ModelState ModelState::Clone() const {
  return Map([](const torch::Tensor& tensor) { return tensor.detach().clone(); });
}

ModelState ModelState::To(torch::Device device) const {
  return Map([&](const torch::Tensor& tensor) { return tensor.to(device); });
}

ModelState ModelState::Select(const std::vector<std::int64_t>& indices) const {
  for (const std::int64_t index : indices) {
    if (index < 0 || index >= num_sequences()) {
      throw Error("indices: expected sequences 0 to " + std::to_string(num_sequences() - 1) +
                  ", got " + std::to_string(index));
    }
  }
  const torch::Tensor rows = torch::tensor(indices, torch::kLong);
  ModelState result = Map([&](const torch::Tensor& tensor) {
    return tensor.index_select(0, rows.to(tensor.device()));
  });
  result.positions_.clear();
  result.removable_.clear();
  for (const std::int64_t index : indices) {
    result.positions_.push_back(positions_[index]);
    result.removable_.push_back(removable_[index]);
  }
  for (LayerState& layer : result.layers_) layer.fenwick.max_position = result.max_position();
  return result;
}

void ModelState::Truncate(const std::vector<std::int64_t>& tokens) {
  CheckLength(tokens, num_sequences());
  const bool attention = config_.mixer == MixerKind::kAttention;
  for (std::int64_t n = 0; n < num_sequences(); ++n) {
    const std::int64_t limit = attention                    ? positions_[n]
                               : IsLogLinear(config_.mixer) ? removable_[n]
                                                            : 0;
    if (tokens[n] < 0 || tokens[n] > limit) {
      throw Error("tokens: sequence " + std::to_string(n) + " of a " + MixerName(config_.mixer) +
                  " model can be truncated by 0 to " + std::to_string(limit) + " tokens, got " +
                  std::to_string(tokens[n]));
    }
  }
  for (std::int64_t n = 0; n < num_sequences(); ++n) {
    positions_[n] -= tokens[n];
    removable_[n] = std::max<std::int64_t>(0, removable_[n] - tokens[n]);
  }
  if (!IsLogLinear(config_.mixer)) return;
  const torch::NoGradGuard no_grad;
  const torch::Tensor removed = torch::tensor(tokens, torch::kLong);
  for (LayerState& layer : layers_) {
    layer.fenwick.position = layer.fenwick.position - removed.to(layer.fenwick.position.device());
    layer.fenwick.max_position = max_position();
    for (torch::Tensor& history : layer.conv) {
      // Column j becomes column j - tokens[n]; what has no source is older than can be reached.
      const torch::Tensor source =
          (torch::arange(history.size(2)).view({1, 1, -1}) - removed.view({-1, 1, 1})).clamp_min(0);
      history = history.gather(2, source.to(history.device()).expand_as(history));
    }
  }
}

void ModelState::Reserve(const std::vector<std::int64_t>& tokens) {
  CheckLength(tokens, num_sequences());
  if (tokens.empty()) return;
  std::int64_t capacity = 0;
  for (std::int64_t n = 0; n < num_sequences(); ++n) {
    capacity = std::max(capacity, positions_[n] + tokens[n]);
  }
  const torch::NoGradGuard no_grad;
  for (LayerState& layer : layers_) {
    if (layer.keys.defined()) {
      layer.keys = WithCapacity(layer.keys, capacity);
      layer.values = WithCapacity(layer.values, capacity);
    }
  }
}

void ModelState::Advance(const std::vector<std::int64_t>& tokens) {
  CheckLength(tokens, num_sequences());
  for (std::int64_t n = 0; n < num_sequences(); ++n) {
    positions_[n] += tokens[n];
    removable_[n] = std::min(rollback_, removable_[n] + tokens[n]);
  }
  // The operators bound it from above for all sequences alike.
  for (LayerState& layer : layers_) layer.fenwick.max_position = max_position();
}

}  // namespace fenwick::models
