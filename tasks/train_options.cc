#include "tasks/train_options.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <sstream>
#include <type_traits>

#include "fenwick/error.h"
#include "fenwick/partition.h"

namespace fenwick::tasks {

using nlohmann::json;

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(TrainOptions, task, model, dim, layers, heads,
                                                head_dim, state, levels, saturate, tie, length,
                                                vocab, pairs, data, extensions, held_out, max_bytes,
                                                steps, batch, lr, min_lr, warmup, weight_decay,
                                                beta1, beta2, clip, seed, dtype, eval_rows)

namespace {

std::string Text(std::int64_t value) { return std::to_string(value); }

std::string Text(double value) {  // JSON has no nan and no inf
  std::ostringstream text;
  text << value;
  return text.str();
}

template <typename T>
void RequireAtLeast(const char* option, T value, T least) {
  if (value >= least && std::isfinite(static_cast<double>(value))) return;
  const char* finite = std::is_floating_point_v<T> ? "a finite number of " : "";
  throw Error(std::string(option) + ": expected " + finite + "at least " + Text(least) + ", got " +
              Text(value));
}

void RequireBetween(const char* option, double value, double low, double high) {
  if (value >= low && value <= high) return;
  throw Error(std::string(option) + ": expected " + Text(low) + " to " + Text(high) + ", got " +
              Text(value));
}

void RequireBelowOne(const char* option, double value) {
  if (value >= 0 && value < 1) return;
  throw Error(std::string(option) + ": expected at least 0 and below 1, got " + Text(value));
}

std::string OptionName(std::string key) {
  std::replace(key.begin(), key.end(), '_', '-');
  return "--" + key;
}

}  // namespace

void ValidateOptions(const TrainOptions& options) {
  using Int = std::int64_t;
  RequireAtLeast<Int>("--dim", options.dim, 1);
  RequireAtLeast<Int>("--layers", options.layers, 1);
  RequireAtLeast<Int>("--heads", options.heads, 0);
  RequireAtLeast<Int>("--head-dim", options.head_dim, 1);
  RequireAtLeast<Int>("--state", options.state, 1);
  RequireBetween("--levels", static_cast<double>(options.levels), 1, models::kMaxLevels);
  RequireAtLeast<Int>("--length", options.length, 1);
  RequireAtLeast<Int>("--steps", options.steps, 1);
  RequireAtLeast<Int>("--batch", options.batch, 1);
  RequireAtLeast<Int>("--warmup", options.warmup, 0);
  RequireAtLeast<Int>("--eval-rows", options.eval_rows, 1);
  RequireAtLeast<Int>("--max-bytes", options.max_bytes, 0);
  RequireAtLeast<Int>("--seed", options.seed, 0);
  RequireAtLeast("--lr", options.lr, 0.0);
  RequireAtLeast("--weight-decay", options.weight_decay, 0.0);
  RequireAtLeast("--clip", options.clip, 0.0);
  RequireBetween("--min-lr", options.min_lr, 0, 1);
  RequireBelowOne("--beta1", options.beta1);
  RequireBelowOne("--beta2", options.beta2);
  RequireBetween("--held-out", options.held_out, 0, 0.9);
  if (options.task == "mqar") ValidateMqar(MqarConfigOf(options));
  RequireLevels(ModelConfigOf(options), options.length, "--length");
}

void RequireLevels(const models::ModelConfig& model, std::int64_t tokens, const char* option) {
  if (model.Levels() == 0 || model.saturate || NumLevels(tokens) <= model.Levels()) return;
  throw Error(std::string(option) + ": " + std::to_string(tokens) + " tokens need " +
              std::to_string(NumLevels(tokens)) + " levels, the model has " +
              std::to_string(model.Levels()) +
              " (with `train --saturate` the last one absorbs the rest)");
}

json OptionsToJson(const TrainOptions& options) { return options; }

TrainOptions OptionsFromJson(const json& stored, const std::string& where) {
  if (!stored.is_object()) throw Error(where + ": fenwick_run: expected an object");
  const json known = TrainOptions();
  for (const auto& [key, value] : stored.items()) {
    if (!known.contains(key)) {
      throw Error(where + ": fenwick_run: " + key + " is not known to this version of fenwick");
    }
    try {
      static_cast<void>(json{{key, value}}.get<TrainOptions>());
    } catch (const json::exception&) {
      throw Error(where + ": fenwick_run: " + key + ": expected a value like " + known[key].dump() +
                  ", got " + value.dump());
    }
  }
  return stored.get<TrainOptions>();
}

void RequireSame(const TrainOptions& stored, const TrainOptions& given, const std::string& where) {
  const json old_values = stored;
  const json new_values = given;
  for (const auto& [key, value] : new_values.items()) {
    if (value == old_values[key]) continue;
    throw Error(OptionName(key) + ": the run in " + where + " has " + old_values[key].dump() +
                ", got " + value.dump());
  }
}

models::ModelConfig ModelConfigOf(const TrainOptions& options) {
  const models::MixerKind kind = models::ParseMixerKind(options.model);
  models::ModelConfig config = models::ModelConfig::Defaults(kind);
  config.vocab_size = options.task == "text" ? kByteVocabulary : options.vocab;
  config.hidden_size = options.dim;
  config.num_hidden_layers = options.layers;
  config.num_heads = options.heads;
  config.num_levels = options.levels;
  config.saturate = options.saturate;
  config.tie_word_embeddings = options.tie;
  if (models::IsMamba(kind)) {
    config.head_dim = options.head_dim;
    config.state_size = options.state;
    if (options.heads > 0) {
      config.expand =
          static_cast<double>(options.heads * options.head_dim) / static_cast<double>(options.dim);
    }
  } else if (models::IsGatedDelta(kind)) {
    config.head_dim = options.state;
    config.expand_v = static_cast<double>(options.head_dim) / static_cast<double>(options.state);
    if (options.heads == 0)
      config.num_heads = std::max<std::int64_t>(1, options.dim / options.head_dim);
  } else if (options.heads == 0) {
    config.num_heads = std::max<std::int64_t>(1, options.dim / options.head_dim);
  }
  config.Validate();
  return config;
}

MqarConfig MqarConfigOf(const TrainOptions& options) {
  MqarConfig config;
  config.length = options.length;
  config.vocab_size = options.vocab;
  config.pairs = options.pairs;
  return config;
}

TextConfig TextConfigOf(const TrainOptions& options) {
  return {options.data, options.extensions, options.held_out, options.max_bytes};
}

double LearningRate(const TrainOptions& options, std::int64_t step) {
  if (step + 1 < options.warmup) {
    return options.lr * static_cast<double>(step + 1) / static_cast<double>(options.warmup);
  }
  const std::int64_t begin = std::max<std::int64_t>(options.warmup - 1, 0);
  const std::int64_t span = std::max<std::int64_t>(options.steps - 1 - begin, 1);
  const double progress = static_cast<double>(step - begin) / static_cast<double>(span);
  const double cosine = 0.5 * (1.0 + std::cos(std::numbers::pi * std::min(progress, 1.0)));
  return options.lr * (options.min_lr + (1.0 - options.min_lr) * cosine);
}

}  // namespace fenwick::tasks
