// A thin progress bar on standard error: one line redrawn on a terminal, a line every ten seconds
// elsewhere.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace fenwick::tasks {

class Progress {
 public:
  Progress(std::string label, std::int64_t total, std::int64_t done = 0, bool quiet = false);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `note` follows the bar, e.g. "loss 2.345".
  void Update(std::int64_t done, const std::string& note);
  // Empties the line of the bar, so that a line of output may take its place.
  void Clear();
  // Ends the line of the bar, so that other output may follow.
  void Finish();

 private:
  using Clock = std::chrono::steady_clock;
  void Draw();

  std::string label_;
  std::string note_;
  std::int64_t total_;
  std::int64_t first_;  // where a resumed run began
  std::int64_t done_;
  bool quiet_;
  bool terminal_;
  bool drawn_ = false;
  Clock::time_point begin_;
  Clock::time_point last_draw_;
};

}  // namespace fenwick::tasks
