// fenwick: train, evaluate, generate, measure and verify from the command line.
//
// Exit status: 0 done; 1 a check or a run failed; 2 a bad option or a missing or foreign file, with
// one line on standard error that names it.
#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <limits>
#include <string>
#include <type_traits>

#include "apps/fenwick/commands.h"
#include "fenwick/error.h"
#include "fenwick/version.h"
#include "tasks/run_folder.h"

namespace fenwick::app {
namespace {

volatile std::sig_atomic_t interrupted = 0;

const std::vector<std::string> kDTypes{"float32", "bfloat16", "float16", "float64"};
const std::vector<std::string> kModels{"log_linear_mamba2", "mamba2", "log_linear_gated_deltanet",
                                       "gated_deltanet", "transformer"};

struct Options {
  InfoOptions info;
  VerifyOptions verify;
  EvalOptions eval;
  GenerateOptions generate;
  BenchOptions bench;
  tasks::TrainOptions train;
  tasks::RunControl control;
  int threads = 0;
};

constexpr std::int64_t kMaxThreads = 1024;  // far above this OpenMP ends the program

// A whole number within limits. CLI11 takes the nearest that fits its type, without a word, and its
// own check for ranges prints the largest double in full.
CLI::Validator Whole(std::int64_t least = std::numeric_limits<std::int64_t>::min(),
                     std::int64_t most = std::numeric_limits<std::int64_t>::max()) {
  const auto check = [least, most](const std::string& text) -> std::string {
    std::int64_t value = 0;
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    if (error == std::errc::result_out_of_range) return "expected less than 2^63, got " + text;
    if (error == std::errc() && stop == end && value >= least && value <= most) return "";
    std::string expected = "expected a whole number";
    if (least != std::numeric_limits<std::int64_t>::min()) {
      expected += " of at least " + std::to_string(least);
    }
    if (most != std::numeric_limits<std::int64_t>::max()) {
      expected += " and at most " + std::to_string(most);
    }
    return expected + ", got " + text;
  };
  return {check, ""};
}

// A finite number of at least 0.
CLI::Validator NotNegative() {
  const auto check = [](const std::string& text) -> std::string {
    double value = 0;
    const bool number = CLI::detail::lexical_cast(text, value);
    if (number && std::isfinite(value) && value >= 0) return "";
    return "expected a finite number of at least 0, got " + text;
  };
  return {check, ""};
}

// An option with the checks of its type.
template <typename T>
CLI::Option* AddOption(CLI::App* command, const char* name, T& value, const char* help) {
  CLI::Option* option = command->add_option(name, value, help);
  if constexpr (std::is_integral_v<T>) option->check(Whole());
  return option;
}

void AddDevice(CLI::App* command, std::string& device) {
  command->add_option("--device", device, "cpu, cuda or cuda:N")->capture_default_str();
}

void AddDType(CLI::App* command, std::string& dtype, const char* help) {
  command->add_option("--dtype", dtype, help)->check(CLI::IsMember(kDTypes))->capture_default_str();
}

// Values separated by commas: words after them are not taken, they may be positional.
template <typename T>
CLI::Option* AddList(CLI::App* command, const char* name, std::vector<T>& values,
                     const char* help) {
  CLI::Option* option = command->add_option(name, values, help);
  if constexpr (std::is_integral_v<T>) option->check(Whole());
  return option->delimiter(',')->allow_extra_args(false);
}

CLI::App* AddVerify(CLI::App& app, Options& options) {
  VerifyOptions& o = options.verify;
  CLI::App* command = app.add_subcommand(
      "verify", "compare every kernel with the float64 reference, or with golden files");
  command->add_option("files", o.files,
                      "safetensors files of operators, a model or a layer; none: the kernels on "
                      "random ragged shapes");
  AddList(command, "--device", o.devices, "devices to check (default: all that are there)");
  AddList(command, "--dtype", o.dtypes, "element types to check (default: all)")
      ->check(CLI::IsMember(kDTypes));
  command->add_option("--cases", o.cases, "random shapes for each operator and type")
      ->check(Whole(1))
      ->capture_default_str();
  command->add_option("--seed", o.seed, "of the random shapes (default: a new one, printed)")
      ->check(Whole(0));
  command->footer(
      "Examples:\n"
      "  fenwick verify\n"
      "  fenwick verify --device cpu --dtype float32,bfloat16 --seed 7\n"
      "  fenwick verify tests/golden/*.safetensors");
  return command;
}

void AddTrainOptions(CLI::App* command, Options& options) {
  tasks::TrainOptions& o = options.train;
  tasks::RunControl& c = options.control;
  const auto add = [&](const char* name, auto& value, const char* help, const char* group) {
    return AddOption(command, name, value, help)->capture_default_str()->group(group);
  };
  add("--out", c.out, "folder of the run", "Run")->required();
  command->add_flag("--resume", c.resume, "go on with the run in --out")->group("Run");
  add("--device", c.device, "cpu, cuda or cuda:N", "Run");
  add("--dtype", o.dtype, "type of the weights", "Run")->check(CLI::IsMember(kDTypes));
  add("--seed", o.seed, "of the weights and the batches", "Run");
  add("--log-every", c.log_every, "steps between records in metrics.jsonl", "Run")->check(Whole(1));
  add("--eval-every", c.eval_every, "steps between evaluations (0: at the end)", "Run")
      ->check(Whole(0));
  add("--save-every", c.save_every, "steps between checkpoints (0: at the end)", "Run")
      ->check(Whole(0));
  add("--stop-at", c.stop_at, "stop behind this step; --resume goes on (0: never)", "Run")
      ->check(Whole(0));
  add("--max-minutes", c.max_minutes, "stop after this time; --resume goes on (0: never)", "Run")
      ->check(NotNegative());
  command->add_flag("--quiet", c.quiet, "no progress bar")->group("Run");

  add("--model", o.model, "the token mixer", "Model")->check(CLI::IsMember(kModels));
  add("--dim", o.dim, "width of the model", "Model");
  add("--layers", o.layers, "blocks", "Model");
  add("--heads", o.heads, "heads (0: what fills the inner width)", "Model");
  add("--head-dim", o.head_dim, "value size V of a head", "Model");
  add("--state", o.state, "key size K: a head's state is K x V", "Model");
  add("--levels", o.levels, "levels of the log-linear models", "Model");
  command->add_flag("--saturate", o.saturate, "the top level absorbs what is older")
      ->group("Model");
  command->add_flag("--tie", o.tie, "one matrix for embedding and head")->group("Model");

  add("--steps", o.steps, "steps of the whole run", "Optimisation");
  add("--batch", o.batch, "sequences a step", "Optimisation");
  add("--lr", o.lr, "highest learning rate", "Optimisation");
  add("--min-lr", o.min_lr, "last learning rate, as a fraction of --lr", "Optimisation");
  add("--warmup", o.warmup, "steps of linear warm-up", "Optimisation");
  add("--weight-decay", o.weight_decay, "of matrices", "Optimisation");
  add("--beta1", o.beta1, "of AdamW", "Optimisation");
  add("--beta2", o.beta2, "of AdamW", "Optimisation");
  add("--clip", o.clip, "largest global norm of the gradient (0: none)", "Optimisation");
}

CLI::App* AddTrain(CLI::App& app, Options& options) {
  tasks::TrainOptions& o = options.train;
  CLI::App* train = app.add_subcommand("train", "train a model: `train mqar` or `train text`");
  train->require_subcommand(1);

  CLI::App* mqar = train->add_subcommand("mqar", "multi-query associative recall");
  AddTrainOptions(mqar, options);
  AddOption(mqar, "--length", o.length, "tokens of a sequence")->capture_default_str();
  AddOption(mqar, "--vocab", o.vocab, "tokens to choose from")->capture_default_str();
  AddList(mqar, "--pairs", o.pairs, "numbers of key-value pairs, in turn over a batch")
      ->capture_default_str();
  AddOption(mqar, "--eval-rows", o.eval_rows, "sequences to evaluate for each number of pairs")
      ->capture_default_str();
  mqar->footer(
      "Examples:\n"
      "  fenwick train mqar --model log_linear_mamba2 --out out/mqar --lr 3e-3 --steps 1500\n"
      "  fenwick train mqar --model gated_deltanet --state 16 --pairs 4,8,16 --out out/delta\n"
      "  fenwick train mqar --out out/mqar --resume");

  CLI::App* text = train->add_subcommand("text", "bytes of files and folders");
  AddTrainOptions(text, options);
  AddList(text, "--data", o.data, "files and folders");
  AddList(text, "--ext", o.extensions, "take only these endings within folders, e.g. .py");
  text->add_option("--held-out", o.held_out, "fraction kept for evaluation")->capture_default_str();
  AddOption(text, "--max-bytes", o.max_bytes, "take no more text than this (0: all)")
      ->capture_default_str();
  AddOption(text, "--length", o.length, "bytes of a sequence")->capture_default_str();
  AddOption(text, "--eval-rows", o.eval_rows, "windows to evaluate")->capture_default_str();
  text->footer(
      "Examples:\n"
      "  fenwick train text --data src,docs --out out/text --dim 128 --length 512 --steps 2000\n"
      "  fenwick train text --data .venv/lib --ext .py --max-bytes 32000000 --out out/python\n"
      "  fenwick train text --out out/text --resume");
  return train;
}

CLI::App* AddEval(CLI::App& app, Options& options) {
  EvalOptions& o = options.eval;
  CLI::App* command = app.add_subcommand("eval", "evaluate a run on held-out data");
  command->add_option("run", o.run, "folder of the run")->required();
  AddDevice(command, o.device);
  AddDType(command, o.dtype, "type of the weights (default: the run's)");
  command->add_option("--rows", o.rows, "sequences (default: the run's)")->check(Whole(1));
  command->add_option("--length", o.length, "tokens of a sequence (default: the run's)")
      ->check(Whole(1));
  AddList(command, "--data", o.data, "text: files and folders to evaluate on instead");
  command->add_flag("--json", o.json, "print one JSON object");
  command->footer(
      "Examples:\n"
      "  fenwick eval out/mqar\n"
      "  fenwick eval out/text --length 4096 --json");
  return command;
}

CLI::App* AddGenerate(CLI::App& app, Options& options) {
  GenerateOptions& o = options.generate;
  CLI::App* command = app.add_subcommand("generate", "continue a text with a trained byte model");
  command->add_option("run", o.run, "folder of the run")->required();
  CLI::Option* prompt = command->add_option("--prompt", o.prompt, "text to continue");
  command->add_option("--prompt-file", o.prompt_file, "file whose text to continue")
      ->excludes(prompt);
  command->add_option("--tokens", o.tokens, "bytes to generate")
      ->check(Whole(0))
      ->capture_default_str();
  command->add_option("--temperature", o.sampling.temperature, "0: always the likeliest byte")
      ->capture_default_str();
  AddOption(command, "--top-k", o.sampling.top_k, "choose among the k likeliest (0: all)")
      ->capture_default_str();
  command->add_option("--top-p", o.sampling.top_p, "choose among the likeliest of this probability")
      ->capture_default_str();
  AddOption(command, "--seed", o.sampling.seed, "of the choices")->capture_default_str();
  AddDevice(command, o.device);
  AddDType(command, o.dtype, "type of the weights (default: the run's)");
  command->footer(
      "Examples:\n"
      "  fenwick generate out/python --prompt 'def main():' --tokens 400\n"
      "  fenwick generate out/python --prompt-file setup.py --temperature 0");
  return command;
}

CLI::App* AddBench(CLI::App& app, Options& options) {
  BenchOptions& o = options.bench;
  CLI::App* command =
      app.add_subcommand("bench", "time the operators: forward, backward and decoding");
  const auto add = [&](const char* name, auto& value, const char* help) {
    return AddOption(command, name, value, help)->capture_default_str();
  };
  add("what", o.what, "forward (and backward), decode, or all")
      ->check(CLI::IsMember({"forward", "decode", "all"}));
  AddList(command, "--op", o.operators, "operators")
      ->check(CLI::IsMember({"scalar_gate", "gated_delta"}))
      ->capture_default_str();
  AddList(command, "--lengths", o.lengths, "T of forward and backward")->capture_default_str();
  AddList(command, "--contexts", o.contexts, "tokens seen before decoding")->capture_default_str();
  add("--batch", o.batch, "B")->check(Whole(1));
  add("--heads", o.heads, "H")->check(Whole(1));
  add("--groups", o.groups, "G")->check(Whole(1));
  add("--key-size", o.key_size, "K")->check(Whole(1));
  add("--value-size", o.value_size, "V")->check(Whole(1));
  add("--seconds", o.seconds, "time to spend on each figure")->check(NotNegative());
  add("--seed", o.seed, "of the inputs");
  AddDevice(command, o.device);
  AddDType(command, o.dtype, "storage type");
  command->add_flag("--json", o.json, "print one JSON object");
  command->footer(
      "Examples:\n"
      "  fenwick bench\n"
      "  fenwick bench forward --op scalar_gate --lengths 4096,65536 --threads 2\n"
      "  fenwick bench decode --contexts 1024,16384,262144");
  return command;
}

// A resumed run has the options of its folder; those on the command line are read again on top, so
// that one that differs is noticed.
void ReadStoredOptions(CLI::App& app, int argc, char** argv, Options& options) {
  const tasks::RunFolder folder{options.control.out};
  const std::string task = options.train.task;
  options.train =
      tasks::OptionsFromJson(folder.ReadConfig()["fenwick_run"], folder.config().string());
  if (options.train.task != task) {
    throw Error(options.control.out.string() + ": holds a run of `train " + options.train.task +
                "`, not of `train " + task + "`");
  }
  app.parse(argc, argv);
}

int Run(int argc, char** argv) {
  Options options;
  CLI::App app{"Log-linear attention: train, evaluate, generate, measure and verify.", "fenwick"};
  app.set_version_flag("--version", std::string("fenwick ") + FENWICK_VERSION);
  app.require_subcommand(1);
  app.fallthrough();
  app.add_option("--threads", options.threads, "CPU threads (default: all cores)")
      ->check(Whole(0, kMaxThreads));
  app.footer(
      "Examples:\n"
      "  fenwick verify tests/golden/*.safetensors\n"
      "  fenwick train mqar --model log_linear_mamba2 --out out/mqar\n"
      "  fenwick eval out/mqar\n"
      "`fenwick COMMAND --help` describes a command.");
  CLI::App* info = app.add_subcommand("info", "describe this build, a run or a safetensors file");
  info->add_option("path", options.info.path, "run folder or safetensors file");
  info->footer(
      "Examples:\n  fenwick info\n  fenwick info out/mqar\n  fenwick info model.safetensors");
  CLI::App* verify = AddVerify(app, options);
  CLI::App* train = AddTrain(app, options);
  CLI::App* eval = AddEval(app, options);
  CLI::App* generate = AddGenerate(app, options);
  CLI::App* bench = AddBench(app, options);

  try {
    app.parse(argc, argv);
    if (train->parsed()) {
      options.train.task = train->get_subcommands().front()->get_name();
      if (options.control.resume) ReadStoredOptions(app, argc, argv, options);
    }
  } catch (const CLI::Success& success) {
    return app.exit(success);
  } catch (const CLI::RequiredError& error) {
    const std::vector<std::string> unknown = app.remaining(true);
    throw Error(unknown.empty() ? error.what() : unknown.front() + ": no such command or option");
  } catch (const CLI::ParseError& error) {
    throw Error(error.what());
  }

  SetThreads(options.threads);
  if (info->parsed()) return RunInfo(options.info);
  if (verify->parsed()) {
    return options.verify.files.empty() ? RunVerifyKernels(options.verify)
                                        : RunVerifyFiles(options.verify);
  }
  if (train->parsed()) {
    std::signal(SIGINT, [](int) { interrupted = 1; });
    std::signal(SIGTERM, [](int) { interrupted = 1; });
    options.control.interrupted = [] { return interrupted != 0; };
    return RunTrain(options.train, options.control);
  }
  if (eval->parsed()) return RunEval(options.eval);
  if (generate->parsed()) return RunGenerate(options.generate);
  if (bench->parsed()) return RunBench(options.bench);
  return 2;
}

std::string FirstLine(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace
}  // namespace fenwick::app

int main(int argc, char** argv) {
  try {
    return fenwick::app::Run(argc, argv);
  } catch (const fenwick::Error& error) {
    std::fprintf(stderr, "fenwick: %s\n", fenwick::app::FirstLine(error.what()).c_str());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fenwick: failed: %s\n", fenwick::app::FirstLine(error.what()).c_str());
    return 1;
  }
}
