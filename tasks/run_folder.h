// The folder of a run:
//   config.json           what was asked for: everything that the results depend on
//   metrics.jsonl         one JSON object a line: {"step", "loss", ...} and {"step", "eval", ...}
//   model.safetensors     the weights, readable by every safetensors library
//   training.safetensors  what --resume needs: weights, moments of the optimiser and the step, in
//                         one file, so that no two of them can be of different steps
// Each is written to a temporary name and renamed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

namespace fenwick::tasks {

struct RunFolder {
  std::filesystem::path path;

  std::filesystem::path config() const { return path / "config.json"; }
  std::filesystem::path metrics() const { return path / "metrics.jsonl"; }
  std::filesystem::path model() const { return path / "model.safetensors"; }
  std::filesystem::path training() const { return path / "training.safetensors"; }

  bool Exists() const { return std::filesystem::exists(config()); }
  // Throws Error naming the file when it is missing or not the configuration of a run.
  nlohmann::json ReadConfig() const;
  void WriteConfig(const nlohmann::json& contents) const;
};

// The records of metrics.jsonl. They are kept in memory and the file is replaced as a whole.
class Metrics {
 public:
  // Takes over the records of an earlier run up to and including `last_step`.
  Metrics(std::filesystem::path path, std::int64_t last_step);
  void Add(nlohmann::json record) { records_.push_back(std::move(record)); }
  void Write() const;
  const std::vector<nlohmann::json>& records() const { return records_; }

 private:
  std::filesystem::path path_;
  std::vector<nlohmann::json> records_;
};

}  // namespace fenwick::tasks
