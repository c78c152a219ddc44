#include "tasks/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

namespace fenwick::tasks {
namespace {

constexpr int kBarCells = 24;

std::string Duration(double seconds) {
  const auto s = static_cast<long>(seconds + 0.5);
  char text[32];
  if (s >= 3600) {
    std::snprintf(text, sizeof text, "%ld:%02ld:%02ld", s / 3600, s / 60 % 60, s % 60);
  } else {
    std::snprintf(text, sizeof text, "%ld:%02ld", s / 60, s % 60);
  }
  return text;
}

}  // namespace

Progress::Progress(std::string label, std::int64_t total, std::int64_t done, bool quiet)
    : label_(std::move(label)),
      total_(std::max<std::int64_t>(total, 1)),
      first_(done),
      done_(done),
      quiet_(quiet),
      terminal_(isatty(STDERR_FILENO) != 0),
      begin_(Clock::now()),
      last_draw_(begin_) {}

Progress::~Progress() { Finish(); }

void Progress::Update(std::int64_t done, const std::string& note) {
  done_ = done;
  note_ = note;
  if (quiet_) return;
  const auto interval = terminal_ ? std::chrono::milliseconds(100) : std::chrono::seconds(10);
  const auto now = Clock::now();
  if (now - last_draw_ < interval) return;
  last_draw_ = now;
  Draw();
}

void Progress::Clear() {
  if (terminal_ && !quiet_) std::fputs("\r\033[K", stderr);
}

void Progress::Finish() {
  if (quiet_) return;
  Draw();
  if (terminal_) std::fputc('\n', stderr);
  quiet_ = true;
}

void Progress::Draw() {
  const double elapsed = std::chrono::duration<double>(Clock::now() - begin_).count();
  const double left =
      done_ > first_ ? elapsed / static_cast<double>(done_ - first_) * (total_ - done_) : 0.0;
  const int filled = static_cast<int>(kBarCells * done_ / total_);
  std::string bar;
  for (int i = 0; i < kBarCells; ++i) bar += i < filled ? "━" : "─";
  std::fprintf(stderr, "%s%s %s %3d%%  %lld/%lld  %s  %s left %s%s", terminal_ ? "\r" : "",
               label_.c_str(), bar.c_str(), static_cast<int>(100 * done_ / total_),
               static_cast<long long>(done_), static_cast<long long>(total_), note_.c_str(),
               Duration(elapsed).c_str(), Duration(left).c_str(), terminal_ ? "\033[K" : "\n");
  std::fflush(stderr);
}

}  // namespace fenwick::tasks
