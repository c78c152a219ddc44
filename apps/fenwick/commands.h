// The commands of the program: options as the command line fills them, and one function each that
// prints its result and returns the exit status. They throw Error for what the caller got wrong
// (exit 2); status 1 means that the command ran and found a failure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tasks/sampler_options.h"
#include "tasks/train_options.h"
#include "tasks/trainer.h"

namespace fenwick::app {

struct InfoOptions {
  std::string path;  // a run folder or a safetensors file; empty: this program and this machine
};

struct VerifyOptions {
  std::vector<std::string> files;
  std::vector<std::string> devices;  // empty: all that are there
  std::vector<std::string> dtypes;   // empty: all
  std::int64_t cases = 24;           // random shapes for each operator and dtype
  std::int64_t seed = -1;            // -1: a new one
};

struct EvalOptions {
  std::string run;
  std::string device = "cpu";
  std::string dtype;              // empty: the run's
  std::int64_t rows = 0;          // 0: the run's
  std::int64_t length = 0;        // 0: the run's
  std::vector<std::string> data;  // text: evaluate on these instead
  bool json = false;
};

struct GenerateOptions {
  std::string run;
  std::string prompt;
  std::string prompt_file;
  std::int64_t tokens = 200;
  std::string device = "cpu";
  std::string dtype;
  tasks::SamplingOptions sampling;
};

struct BenchOptions {
  std::string what = "all";  // forward, decode, all
  std::vector<std::string> operators{"scalar_gate", "gated_delta"};
  std::vector<std::int64_t> lengths{256, 1024, 4096, 16384};
  std::vector<std::int64_t> contexts{1024, 16384, 262144};
  std::int64_t batch = 1;
  std::int64_t heads = 8;
  std::int64_t groups = 1;
  std::int64_t key_size = 128;
  std::int64_t value_size = 64;
  std::string device = "cpu";
  std::string dtype = "float32";
  std::int64_t seed = 0;
  double seconds = 0.3;  // spent on each figure
  bool json = false;
};

int RunInfo(const InfoOptions& options);
int RunVerifyKernels(const VerifyOptions& options);
int RunVerifyFiles(const VerifyOptions& options);
int RunTrain(const tasks::TrainOptions& options, const tasks::RunControl& control);
int RunEval(const EvalOptions& options);
int RunGenerate(const GenerateOptions& options);
int RunBench(const BenchOptions& options);

// Threads of torch and of the kernels; 0 keeps the default.
void SetThreads(int threads);

}  // namespace fenwick::app
