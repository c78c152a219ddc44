#include "tasks/run_folder.h"

#include <sstream>
#include <utility>

#include "fenwick/error.h"
#include "tasks/files.h"

namespace fenwick::tasks {

using nlohmann::json;

json RunFolder::ReadConfig() const {
  if (!std::filesystem::exists(path)) throw Error(path.string() + ": no such run folder");
  json parsed = json::parse(ReadFile(config()), nullptr, false);
  if (parsed.is_discarded() || !parsed.is_object() || !parsed.contains("fenwick_run")) {
    throw Error(config().string() + ": not the configuration of a fenwick run");
  }
  return parsed;
}

void RunFolder::WriteConfig(const json& contents) const {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) throw Error(path.string() + ": cannot be made: " + error.message());
  WriteFileAtomically(config(), contents.dump(2) + "\n");
}

Metrics::Metrics(std::filesystem::path path, std::int64_t last_step) : path_(std::move(path)) {
  if (last_step <= 0 || !std::filesystem::exists(path_)) return;
  std::istringstream lines(ReadFile(path_));
  for (std::string line; std::getline(lines, line);) {
    json record = json::parse(line, nullptr, false);
    if (!record.is_object() || !record.contains("step") || !record["step"].is_number_integer()) {
      throw Error(path_.string() + ": not the metrics of a fenwick run");
    }
    if (record["step"].get<std::int64_t>() <= last_step) records_.push_back(std::move(record));
  }
}

void Metrics::Write() const {
  std::string text;
  for (const json& record : records_) text += record.dump() + "\n";
  WriteFileAtomically(path_, text);
}

}  // namespace fenwick::tasks
