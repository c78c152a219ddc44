#include "tasks/mqar.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include "fenwick/error.h"
#include "tasks/rng.h"

namespace fenwick::tasks {
namespace {

// `count` distinct values of [begin, end), in random order.
std::vector<std::int64_t> Distinct(std::int64_t begin, std::int64_t end, std::int64_t count,
                                   Rng& rng) {
  std::vector<std::int64_t> values(end - begin);
  std::iota(values.begin(), values.end(), begin);
  for (std::int64_t i = 0; i < count; ++i) {
    std::swap(values[i], values[i + rng.Below(static_cast<std::int64_t>(values.size()) - i)]);
  }
  values.resize(count);
  return values;
}

// `count` distinct indices, drawn one after another with probability proportional to the weights:
// the smallest of the exponential variables -log(u) / w (Efraimidis and Spirakis 2006).
std::vector<std::int64_t> DistinctWeighted(const std::vector<double>& weights, std::int64_t count,
                                           Rng& rng) {
  std::vector<std::pair<double, std::int64_t>> arrivals(weights.size());
  for (std::size_t i = 0; i < weights.size(); ++i) {
    arrivals[i] = {-std::log1p(-rng.Uniform()) / weights[i], static_cast<std::int64_t>(i)};
  }
  std::partial_sort(arrivals.begin(), arrivals.begin() + count, arrivals.end());
  std::vector<std::int64_t> indices(count);
  for (std::int64_t i = 0; i < count; ++i) indices[i] = arrivals[i].second;
  return indices;
}

}  // namespace

void ValidateMqar(const MqarConfig& config) {
  if (config.length < 4 || config.length % 2 != 0) {
    throw Error("mqar length: expected an even number >= 4, got " + std::to_string(config.length));
  }
  if (config.vocab_size <= config.length) {
    throw Error("mqar vocab size: expected more than the length " + std::to_string(config.length) +
                ", got " + std::to_string(config.vocab_size));
  }
  if (config.pairs.empty()) throw Error("mqar pairs: expected at least one number, got none");
  for (std::int64_t pairs : config.pairs) {
    if (pairs < 1 || 4 * pairs > config.length) {
      throw Error("mqar pairs: expected 1 to length / 4 = " + std::to_string(config.length / 4) +
                  ", got " + std::to_string(pairs));
    }
  }
}

MqarBatch MakeMqarBatch(const MqarConfig& config, std::int64_t batch_size, Rng& rng) {
  ValidateMqar(config);
  const std::int64_t length = config.length;
  const std::int64_t first_value = config.vocab_size / 2;
  MqarBatch batch;
  batch.inputs.assign(batch_size * length, 0);
  batch.labels.assign(batch_size * length, kIgnoreLabel);
  batch.pairs.resize(batch_size);
  for (std::int64_t row = 0; row < batch_size; ++row) {
    const std::int64_t pairs = config.pairs[row % config.pairs.size()];
    const std::int64_t context = 2 * pairs;
    std::int64_t* inputs = batch.inputs.data() + row * length;
    std::int64_t* labels = batch.labels.data() + row * length;
    batch.pairs[row] = pairs;

    std::vector<double> weights((length - context) / 2);
    for (std::size_t i = 0; i < weights.size(); ++i) {
      weights[i] = std::pow(static_cast<double>(i + 1), config.power - 1);
    }
    const auto keys = Distinct(1, first_value, pairs, rng);
    const auto values = Distinct(first_value, config.vocab_size, pairs, rng);
    const auto gaps = DistinctWeighted(weights, pairs, rng);
    for (std::int64_t i = 0; i < pairs; ++i) {
      inputs[2 * i] = keys[i];
      inputs[2 * i + 1] = values[i];
      inputs[context + 2 * gaps[i]] = keys[i];
      labels[context + 2 * gaps[i]] = values[i];
    }
    if (!config.random_fill) continue;
    for (std::int64_t t = context; t < length; ++t) {
      if (inputs[t] == 0) inputs[t] = rng.Below(config.vocab_size);
    }
  }
  return batch;
}

}  // namespace fenwick::tasks
