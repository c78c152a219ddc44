#include "tasks/task.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>
#include <string>
#include <utility>
#include <vector>

#include "fenwick/error.h"
#include "tasks/mqar.h"
#include "tasks/rng.h"
#include "tasks/text_corpus.h"

namespace fenwick::tasks {
namespace {

using nlohmann::json;

torch::Tensor ToTensor(const std::vector<std::int64_t>& values,
                       std::initializer_list<std::int64_t> sizes) {
  return torch::tensor(values, torch::kInt64).view(torch::IntArrayRef(sizes));
}

struct Score {
  double loss = 0;  // sum over positions
  std::int64_t right = 0;
  std::int64_t asked = 0;

  void operator+=(const Score& other) {
    loss += other.loss;
    right += other.right;
    asked += other.asked;
  }
  double mean_loss() const { return loss / static_cast<double>(asked); }
  double accuracy() const { return static_cast<double>(right) / static_cast<double>(asked); }
};

Score ScoreOf(models::LanguageModel& model, const Batch& batch) {
  torch::NoGradGuard no_grad;
  const torch::Tensor labels = batch.labels.to(model->device());
  const torch::Tensor logits = LogitsOf(model, batch);
  namespace F = torch::nn::functional;
  Score score;
  score.loss = F::cross_entropy(logits, labels, F::CrossEntropyFuncOptions().reduction(torch::kSum))
                   .item<double>();
  score.right = logits.argmax(-1).eq(labels).sum().item<std::int64_t>();
  score.asked = labels.numel();
  return score;
}

Batch FromMqar(const MqarBatch& generated, std::int64_t batch_size, std::int64_t length) {
  std::vector<std::int64_t> labels, rows;
  for (std::size_t i = 0; i < generated.labels.size(); ++i) {
    if (generated.labels[i] == kIgnoreLabel) continue;
    labels.push_back(generated.labels[i]);
    rows.push_back(static_cast<std::int64_t>(i));
  }
  return {ToTensor(generated.inputs, {batch_size, length}), torch::tensor(labels, torch::kInt64),
          torch::tensor(rows, torch::kInt64)};
}

class MqarTask : public Task {
 public:
  explicit MqarTask(const TrainOptions& options)
      : config_(MqarConfigOf(options)),
        batch_(options.batch),
        eval_rows_(options.eval_rows),
        seed_(static_cast<std::uint64_t>(options.seed)) {
    ValidateMqar(config_);
  }

  Batch TrainBatch(std::int64_t step) const override {
    Rng rng(seed_, Stream::kTrain, static_cast<std::uint64_t>(step));
    return FromMqar(MakeMqarBatch(config_, batch_, rng), batch_, config_.length);
  }

  // The sequences are the same for every seed, so that runs can be compared.
  json Evaluate(models::LanguageModel& model) const override {
    Score all;
    json by_pairs = json::object();
    for (const std::int64_t pairs : config_.pairs) {
      MqarConfig config = config_;
      config.pairs = {pairs};
      Rng rng(0, Stream::kEvaluation, static_cast<std::uint64_t>(pairs));
      Score score;
      for (std::int64_t done = 0; done < eval_rows_; done += batch_) {
        const std::int64_t rows = std::min(batch_, eval_rows_ - done);
        score += ScoreOf(model, FromMqar(MakeMqarBatch(config, rows, rng), rows, config.length));
      }
      by_pairs[std::to_string(pairs)] = score.accuracy();
      all += score;
    }
    return {
        {"loss", all.mean_loss()}, {"accuracy", all.accuracy()}, {"accuracy_by_pairs", by_pairs}};
  }

 private:
  MqarConfig config_;
  std::int64_t batch_;
  std::int64_t eval_rows_;
  std::uint64_t seed_;
};

Batch FromWindows(const std::vector<std::int64_t>& windows, std::int64_t rows,
                  std::int64_t length) {
  const torch::Tensor bytes = ToTensor(windows, {rows, length + 1});
  return {bytes.narrow(1, 0, length).contiguous(), bytes.narrow(1, 1, length).reshape({-1}), {}};
}

class TextTask : public Task {
 public:
  explicit TextTask(const TrainOptions& options)
      : corpus_(LoadText(TextConfigOf(options))),
        length_(options.length),
        batch_(options.batch),
        eval_rows_(options.eval_rows),
        seed_(static_cast<std::uint64_t>(options.seed)) {
    // Now, not when a run of hours comes to its evaluation.
    const auto require = [&](const char* what, std::size_t size) {
      if (static_cast<std::int64_t>(size) > length_) return;
      throw Error(std::string(what) + ": expected more than --length " + std::to_string(length_) +
                  " bytes, got " + std::to_string(size));
    };
    if (options.held_out < 1) require("text to train on", corpus_.train.size());
    require("held-out text (see --held-out)", corpus_.held_out.size());
  }

  Batch TrainBatch(std::int64_t step) const override {
    Rng rng(seed_, Stream::kTrain, static_cast<std::uint64_t>(step));
    return FromWindows(RandomWindows(corpus_.train, length_, batch_, rng), batch_, length_);
  }

  // Windows spread evenly over the held-out text.
  json Evaluate(models::LanguageModel& model) const override {
    const auto size = static_cast<std::int64_t>(corpus_.held_out.size());
    const std::int64_t windows = std::min(eval_rows_, (size - 1) / length_);
    Score score;
    for (std::int64_t done = 0; done < windows; done += batch_) {
      const std::int64_t rows = std::min(batch_, windows - done);
      std::vector<std::int64_t> bytes;
      for (std::int64_t row = done; row < done + rows; ++row) {
        const auto begin = corpus_.held_out.begin() + (size - length_ - 1) * row / windows;
        bytes.insert(bytes.end(), begin, begin + length_ + 1);
      }
      score += ScoreOf(model, FromWindows(bytes, rows, length_));
    }
    return {{"loss", score.mean_loss()},
            {"bits_per_byte", score.mean_loss() / std::numbers::ln2},
            {"accuracy", score.accuracy()},
            {"bytes", score.asked}};
  }

 private:
  TextCorpus corpus_;
  std::int64_t length_;
  std::int64_t batch_;
  std::int64_t eval_rows_;
  std::uint64_t seed_;
};

}  // namespace

std::unique_ptr<Task> MakeTask(const TrainOptions& options) {
  if (options.task == "mqar") return std::make_unique<MqarTask>(options);
  if (options.task == "text") return std::make_unique<TextTask>(options);
  throw Error("task: expected mqar or text, got " + options.task);
}

torch::Tensor LogitsOf(models::LanguageModel& model, const Batch& batch) {
  const torch::Device device = model->device();
  torch::Tensor hidden = model->Hidden(batch.inputs.to(device)).flatten(0, 1);  // [B*T, D]
  if (batch.rows.defined()) hidden = hidden.index_select(0, batch.rows.to(device));
  const torch::Tensor logits = model->Head(hidden);
  return logits.element_size() < 4 ? logits.to(torch::kFloat32) : logits;
}

}  // namespace fenwick::tasks
