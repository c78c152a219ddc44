// `fenwick train`, `eval`, `generate` and `info`.
#include <torch/torch.h>
#include <torch/version.h>

#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <thread>
#include <utility>

#include "apps/fenwick/commands.h"
#include "apps/fenwick/report.h"
#include "fenwick/fenwick.h"
#include "models/language_model.h"
#include "models/safetensors.h"
#include "tasks/device.h"
#include "tasks/files.h"
#include "tasks/run_folder.h"
#include "tasks/sampler.h"
#include "tasks/task.h"

namespace fenwick::app {
namespace {

using nlohmann::json;

struct Loaded {
  tasks::TrainOptions options;
  models::LanguageModel model{nullptr};
};

// For a folder that holds a model but no run (Python's save_pretrained wrote it): a model of bytes,
// in the element type that its configuration names.
tasks::TrainOptions OptionsOfModel(const std::string& path, const json& config,
                                   const models::ModelConfig& model) {
  if (model.vocab_size != tasks::kByteVocabulary) {
    throw Error(path + ": expected a run folder or a model of bytes, vocab_size " +
                std::to_string(tasks::kByteVocabulary) + ", got vocab_size " +
                std::to_string(model.vocab_size));
  }
  tasks::TrainOptions options;
  options.task = "text";
  options.levels = model.num_levels;
  options.saturate = model.saturate;
  if (config.contains("dtype") && config["dtype"].is_string()) options.dtype = config["dtype"];
  return options;
}

// config.json of a run, or of a model that save_pretrained wrote.
json ReadModelConfig(const std::filesystem::path& file) {
  const std::string text = tasks::ReadFile(file);
  try {
    json config = models::ParseJson(text);
    if (!config.is_object()) throw Error("expected a JSON object");
    return config;
  } catch (const Error& error) {
    throw Error(file.string() + ": " + error.what());
  }
}

Loaded LoadRun(const std::string& path, const std::string& device, const std::string& dtype) {
  Loaded run;
  run.model = models::LoadModel(path);
  const std::filesystem::path file = tasks::RunFolder{path}.config();
  const json config = ReadModelConfig(file);
  run.options = config.contains("fenwick_run")
                    ? tasks::OptionsFromJson(config["fenwick_run"], file.string())
                    : OptionsOfModel(path, config, run.model->config());
  run.model->to(tasks::DeviceOf(device), tasks::DTypeOf(dtype.empty() ? run.options.dtype : dtype));
  run.model->eval();
  return run;
}

void PrintEvaluation(const json& evaluation) {
  std::vector<std::vector<std::string>> rows{{"figure", "value"}};
  for (const auto& [name, value] : evaluation.items()) {
    if (!value.is_object()) {
      rows.push_back({name, Format("%.6g", value.get<double>())});
      continue;
    }
    std::vector<std::pair<int, double>> by_pairs;
    for (const auto& [pairs, accuracy] : value.items()) {
      by_pairs.emplace_back(std::stoi(pairs), accuracy.get<double>());
    }
    std::sort(by_pairs.begin(), by_pairs.end());
    for (const auto& [pairs, accuracy] : by_pairs) {
      rows.push_back({Format("accuracy, %d pairs", pairs), Format("%.4f", accuracy)});
    }
  }
  PrintTable(rows);
}

std::string Shape(const torch::Tensor& tensor) {
  std::string text;
  for (const std::int64_t size : tensor.sizes())
    text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

void PrintTensors(const std::string& path) {
  const models::SafetensorsFile file = models::LoadSafetensors(path);
  std::vector<std::vector<std::string>> rows{{"tensor", "type", "shape"}};
  std::int64_t total = 0;
  for (const auto& [name, tensor] : file.tensors) {
    rows.push_back({name, c10::toString(tensor.scalar_type()), Shape(tensor)});
    total += tensor.numel();
  }
  PrintTable(rows);
  std::printf("%zu tensors, %lld elements\n", file.tensors.size(), static_cast<long long>(total));
  for (const auto& [key, value] : file.metadata)
    std::printf("%s: %s\n", key.c_str(), value.c_str());
}

}  // namespace

void SetThreads(int threads) {
  if (threads == 0) return;
  torch::set_num_threads(threads);
  SetNumThreads(threads);
}

int RunInfo(const InfoOptions& options) {
  if (options.path.empty()) {
    const bool cuda = DeviceAvailable(Device::kCUDA) && torch::cuda::is_available();
    PrintTable(
        {{"fenwick", FENWICK_VERSION},
         {"torch", TORCH_VERSION},
         {"cpu threads", std::to_string(GetNumThreads())},
         {"cuda", cuda ? std::to_string(torch::cuda::device_count()) + " device(s)" : "none"},
         {"models",
          "log_linear_mamba2, mamba2, log_linear_gated_deltanet, gated_deltanet, "
          "transformer"}});
    return 0;
  }
  if (!std::filesystem::is_directory(options.path)) {
    PrintTensors(options.path);
    return 0;
  }
  const tasks::RunFolder folder{options.path};
  const json config = ReadModelConfig(folder.config());
  std::printf("%s\n", config.value("fenwick_run", config).dump(2).c_str());
  if (std::filesystem::exists(folder.model())) {
    std::printf("parameters: %lld\n",
                static_cast<long long>(models::LoadModel(options.path)->num_parameters()));
  }
  const tasks::Metrics metrics(folder.metrics(), std::numeric_limits<std::int64_t>::max());
  if (!metrics.records().empty()) {
    std::printf("last record: %s\n", metrics.records().back().dump().c_str());
  }
  return 0;
}

int RunTrain(const tasks::TrainOptions& options, const tasks::RunControl& control) {
  const tasks::RunResult result = tasks::Train(options, control);
  if (!result.finished) {
    std::printf("stopped at step %lld of %lld; go on with --resume\n",
                static_cast<long long>(result.step), static_cast<long long>(options.steps));
    return 0;
  }
  PrintEvaluation(result.evaluation);
  return 0;
}

int RunEval(const EvalOptions& options) {
  Loaded run = LoadRun(options.run, options.device, options.dtype);
  if (options.rows > 0) run.options.eval_rows = options.rows;
  if (options.length > 0) run.options.length = options.length;
  tasks::ValidateOptions(run.options);
  if (!options.data.empty()) {
    if (run.options.task != "text") throw Error("--data: " + options.run + " is not a run on text");
    run.options.data = options.data;
    run.options.extensions.clear();
    run.options.held_out = 1;
    run.options.max_bytes = 0;
  }
  const json evaluation = tasks::MakeTask(run.options)->Evaluate(run.model);
  if (options.json) {
    std::printf("%s\n", evaluation.dump().c_str());
  } else {
    PrintEvaluation(evaluation);
  }
  return 0;
}

int RunGenerate(const GenerateOptions& options) {
  tasks::ValidateSampling(options.sampling);
  std::string prompt =
      options.prompt_file.empty() ? options.prompt : tasks::ReadFile(options.prompt_file);
  Loaded run = LoadRun(options.run, options.device, options.dtype);
  if (run.options.task != "text") {
    throw Error(options.run + ": expected a run of `train text`, got one of `train " +
                run.options.task + "`");
  }
  const std::string shown = prompt;
  if (prompt.empty()) prompt.assign(1, '\0');  // the byte between documents
  std::vector<std::int64_t> tokens;
  for (const unsigned char byte : prompt) tokens.push_back(byte);
  tasks::RequireLevels(run.model->config(),
                       static_cast<std::int64_t>(tokens.size()) + options.tokens, "--tokens");
  std::fwrite(shown.data(), 1, shown.size(), stdout);
  tasks::Generate(run.model, tokens, options.tokens, options.sampling, [](std::int64_t token) {
    std::fputc(static_cast<int>(token), stdout);
    std::fflush(stdout);
    return true;
  });
  std::fputc('\n', stdout);
  return 0;
}

}  // namespace fenwick::app
