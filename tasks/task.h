// What a model is trained on: batches by step, and an evaluation on data that training never sees.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>

#include "models/language_model.h"
#include "tasks/train_options.h"

namespace fenwick::tasks {

struct Batch {
  torch::Tensor inputs;  // [B, T] int64
  torch::Tensor labels;  // [R] int64, R <= B * T
  torch::Tensor rows;    // [R] int64: which of the B * T positions are asked; undefined: all
};

class Task {
 public:
  virtual ~Task() = default;
  // The batch of a step; a function of (seed, step) alone.
  virtual Batch TrainBatch(std::int64_t step) const = 0;
  // Figures on held-out data, without gradients:
  //   mqar: {"loss", "accuracy", "accuracy_by_pairs": {"4": 0.99, ...}}
  //   text: {"loss", "bits_per_byte", "accuracy", "bytes"}
  virtual nlohmann::json Evaluate(models::LanguageModel& model) const = 0;
};

std::unique_ptr<Task> MakeTask(const TrainOptions& options);

// Logits [R, vocab_size] float32 or wider of the positions that `batch` asks for.
torch::Tensor LogitsOf(models::LanguageModel& model, const Batch& batch);

}  // namespace fenwick::tasks
