#include "tasks/trainer.h"

#include <torch/torch.h>

#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <utility>

#include "fenwick/error.h"
#include "models/language_model.h"
#include "models/safetensors.h"
#include "tasks/adamw.h"
#include "tasks/device.h"
#include "tasks/progress.h"
#include "tasks/run_folder.h"
#include "tasks/task.h"

namespace fenwick::tasks {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

constexpr double kMetricsSeconds = 2;  // metrics.jsonl is replaced as a whole: not at every record
constexpr char kStepKey[] = "step";

double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

std::string Note(const char* name, double value) {
  char text[64];
  std::snprintf(text, sizeof text, "%s %.4f", name, value);
  return text;
}

// config.json: the model's configuration in the peers' keys, so that the folder loads as a model,
// and what the run needs beside it.
json ConfigOf(const TrainOptions& options) {
  json config = models::ConfigToJson(ModelConfigOf(options));
  config["dtype"] = options.dtype;
  config["fenwick_run"] = OptionsToJson(options);
  return config;
}

// Biases of the short convolutions start uniform, as torch's Conv1d and the authors' Mamba-2 have
// it. Where they start at zero, as in the peers' Hugging Face classes, the recurrence of a small
// Mamba-2 is so weak beside its skip that recall is not learnt in thousands of steps.
void InitialiseConvolutionBiases(models::LanguageModel& model) {
  torch::NoGradGuard no_grad;
  const double bound = 1 / std::sqrt(static_cast<double>(model->config().conv_kernel));
  for (auto& item : model->named_parameters()) {
    if (item.key().ends_with("conv1d.bias")) item.value().uniform_(-bound, bound);
  }
}

class Run {
 public:
  Run(const TrainOptions& options, const RunControl& control)
      : options_(options),
        control_(control),
        folder_{control.out},
        device_(DeviceOf(control.device)),
        task_(MakeTask(options)),
        model_(nullptr) {
    torch::manual_seed(static_cast<std::uint64_t>(options.seed));
    model_ = models::LanguageModel(ModelConfigOf(options));
    InitialiseConvolutionBiases(model_);
    model_->to(device_, DTypeOf(options.dtype));
    optimizer_ = std::make_unique<AdamW>(
        *model_, AdamWOptions{options.beta1, options.beta2, 1e-8, options.weight_decay});
  }

  RunResult Go() {
    if (control_.resume) {
      Restore();
    } else {
      folder_.WriteConfig(ConfigOf(options_));
    }
    Metrics metrics(folder_.metrics(), step_);
    metrics.Write();
    const Clock::time_point begin = Clock::now();
    Clock::time_point written = begin;
    Progress bar(options_.task + " " + options_.model, options_.steps, step_, control_.quiet);
    json evaluation;
    while (step_ < options_.steps && !MustStop(begin)) {
      json record = Step();
      if (step_ % control_.log_every == 0 || step_ == options_.steps) {
        bar.Update(step_, Note("loss", record["loss"]));
        record["seconds"] = SecondsSince(begin);
        metrics.Add(std::move(record));
      }
      const bool last = step_ == options_.steps;
      if (last || (control_.eval_every > 0 && step_ % control_.eval_every == 0)) {
        evaluation = task_->Evaluate(model_);
        metrics.Add({{kStepKey, step_}, {"eval", evaluation}});
      }
      if (!last && control_.save_every > 0 && step_ % control_.save_every == 0) {
        metrics.Write();
        Save();
      }
      if (SecondsSince(written) > kMetricsSeconds) {
        metrics.Write();
        written = Clock::now();
      }
    }
    bar.Finish();
    metrics.Write();
    Save();
    const bool finished = step_ == options_.steps;
    if (finished && evaluation.is_null()) evaluation = task_->Evaluate(model_);
    return {step_, finished, evaluation};
  }

 private:
  json Step() {
    const double lr = LearningRate(options_, step_);
    const Batch batch = task_->TrainBatch(step_);
    const torch::Tensor loss =
        torch::nn::functional::cross_entropy(LogitsOf(model_, batch), batch.labels.to(device_));
    const double loss_value = loss.item<double>();
    if (!std::isfinite(loss_value)) {
      throw std::runtime_error("step " + std::to_string(step_) + ": the loss is " +
                               std::to_string(loss_value) + "; try a lower --lr");
    }
    loss.backward();
    const double norm = optimizer_->ClipGradients(options_.clip);
    optimizer_->Step(lr);
    optimizer_->ZeroGradients();
    ++step_;
    return {{kStepKey, step_}, {"loss", loss_value}, {"lr", lr}, {"grad_norm", norm}};
  }

  bool MustStop(Clock::time_point begin) const {
    return (control_.stop_at > 0 && step_ >= control_.stop_at) ||
           (control_.max_minutes > 0 && SecondsSince(begin) > 60 * control_.max_minutes) ||
           (control_.interrupted && control_.interrupted());
  }

  void Save() const {
    std::map<std::string, torch::Tensor> state = optimizer_->State();
    models::SaveSafetensors(folder_.training(), state,
                            {{kStepKey, std::to_string(step_)}, {"format", "fenwick training"}});
    models::SaveWeights(*model_, folder_.model());
  }

  // A run that ended before its first checkpoint begins again.
  void Restore() {
    if (!std::filesystem::exists(folder_.training())) return;
    const models::SafetensorsFile file = models::LoadSafetensors(folder_.training());
    const auto metadata = file.metadata.find(kStepKey);
    std::int64_t step = -1;
    if (metadata != file.metadata.end()) {
      const std::string& text = metadata->second;
      std::from_chars(text.data(), text.data() + text.size(), step);
    }
    if (step < 0) {
      throw Error(folder_.training().string() + ": not the training state of a fenwick run");
    }
    try {
      optimizer_->Load(file.tensors);
    } catch (const Error& error) {
      throw Error(folder_.training().string() + ": " + error.what());
    }
    step_ = step;
  }

  const TrainOptions& options_;
  const RunControl& control_;
  RunFolder folder_;
  torch::Device device_;
  std::unique_ptr<Task> task_;
  models::LanguageModel model_;
  std::unique_ptr<AdamW> optimizer_;
  std::int64_t step_ = 0;
};

}  // namespace

RunResult Train(const TrainOptions& options, const RunControl& control) {
  ValidateOptions(options);
  const RunFolder folder{control.out};
  if (control.resume) {
    const TrainOptions stored =
        OptionsFromJson(folder.ReadConfig()["fenwick_run"], folder.config().string());
    RequireSame(stored, options, control.out.string());
  } else if (folder.Exists()) {
    throw Error(control.out.string() + ": holds a run already; pass --resume to go on with it");
  }
  return Run(options, control).Go();
}

}  // namespace fenwick::tasks
