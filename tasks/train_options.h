// Everything that the results of a training run depend on. The names are those of the command
// line (underscores for hyphens) and of the "fenwick_run" object in a run's config.json.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/config.h"
#include "tasks/mqar.h"
#include "tasks/text_corpus.h"

namespace fenwick::tasks {

struct TrainOptions {
  std::string task;  // "mqar" or "text"

  // Model. Sizes: K = state, V = head_dim, H = heads.
  std::string model = "log_linear_mamba2";
  std::int64_t dim = 64;
  std::int64_t layers = 2;
  std::int64_t heads = 0;  // 0: what fills the model's inner size
  std::int64_t head_dim = 32;
  std::int64_t state = 32;
  std::int64_t levels = 15;
  bool saturate = false;
  bool tie = false;

  // Data. `vocab`, `pairs` are MQAR's; `data`, `extensions`, `held_out`, `max_bytes` the text's.
  std::int64_t length = 64;
  std::int64_t vocab = 128;
  std::vector<std::int64_t> pairs{4, 8, 16};
  std::vector<std::string> data;
  std::vector<std::string> extensions;
  double held_out = 0.05;
  std::int64_t max_bytes = 0;

  // Optimisation: AdamW, linear warm-up, cosine decay to lr * min_lr, clipping of the global norm.
  std::int64_t steps = 1000;
  std::int64_t batch = 32;
  double lr = 1e-3;
  double min_lr = 0.1;
  std::int64_t warmup = 100;
  double weight_decay = 0.1;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double clip = 1.0;
  std::int64_t seed = 0;
  std::string dtype = "float32";  // of the weights; the optimiser's copy is never below float32

  // Evaluation: `eval_rows` sequences (MQAR: for each number of pairs).
  std::int64_t eval_rows = 256;
};

// Throws Error naming the option.
void ValidateOptions(const TrainOptions& options);

// Throws Error naming `option` where `tokens` tokens are more than the model has levels for.
void RequireLevels(const models::ModelConfig& model, std::int64_t tokens, const char* option);

nlohmann::json OptionsToJson(const TrainOptions& options);
// Absent keys keep their defaults. Throws Error that names the file `where` and the key on a value
// of the wrong type and on a key that is not known, such as a later version's.
TrainOptions OptionsFromJson(const nlohmann::json& stored, const std::string& where);

// Throws Error that names the first option in which `given` differs from `stored`.
void RequireSame(const TrainOptions& stored, const TrainOptions& given, const std::string& where);

models::ModelConfig ModelConfigOf(const TrainOptions& options);
MqarConfig MqarConfigOf(const TrainOptions& options);
TextConfig TextConfigOf(const TrainOptions& options);

// Learning rate of step 0 <= step < steps: lr (step + 1) / warmup while that is < lr, then a cosine
// from lr down to lr * min_lr at the last step.
double LearningRate(const TrainOptions& options, std::int64_t step);

}  // namespace fenwick::tasks
