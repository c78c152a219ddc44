// The training loop: a run folder goes from one step to a later one.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "tasks/train_options.h"

namespace fenwick::tasks {

// What does not change the results: where a run stands, when it is written, when it stops.
struct RunControl {
  std::filesystem::path out;
  std::string device = "cpu";
  bool resume = false;
  bool quiet = false;
  std::int64_t log_every = 10;
  std::int64_t eval_every = 0;        // 0: at the end
  std::int64_t save_every = 0;        // 0: at the end
  std::int64_t stop_at = 0;           // stop behind this step as an interruption would; 0: never
  double max_minutes = 0;             // the same by time; 0: no limit
  std::function<bool()> interrupted;  // asked once a step
};

struct RunResult {
  std::int64_t step = 0;  // steps done in all
  bool finished = false;  // false: stopped early, --resume goes on
  nlohmann::json evaluation;
};

// Trains in `control.out`. A new run needs a folder without a run in it; with `resume` the options
// must be those of the run there, and the result is what an uninterrupted run gives, loss by loss.
RunResult Train(const TrainOptions& options, const RunControl& control);

}  // namespace fenwick::tasks
