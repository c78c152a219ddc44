#include "apps/fenwick/report.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdarg>
#include <cstdio>

namespace fenwick::app {

std::string Format(const char* format, ...) {
  char text[256];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return text;
}

void PrintTable(const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> widths;
  std::vector<bool> numbers;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (std::size_t i = 0; i < widths.size(); ++i) {
    const auto& cell = rows.size() > 1 && i < rows[1].size() ? rows[1][i] : std::string();
    numbers.push_back(!cell.empty() && std::isdigit(static_cast<unsigned char>(cell[0])) != 0);
  }
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::string fill(widths[i] - row[i].size(), ' ');
      line += (i > 0 ? "  " : "") + (numbers[i] ? fill + row[i] : row[i] + fill);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    std::puts(line.c_str());
  }
}

bool ErrorTable::Add(const std::vector<std::string>& labels, double error, double tolerance) {
  if (std::isnan(error)) error = INFINITY;
  const auto row = std::find_if(rows_.begin(), rows_.end(),
                                [&](const Row& one) { return one.labels == labels; });
  if (row == rows_.end()) {
    rows_.push_back({labels, 1, error, tolerance});
  } else {
    ++row->cases;
    if (row->error * tolerance <= error * row->tolerance && row->ok()) {
      row->error = error;
      row->tolerance = tolerance;
    }
  }
  return error <= tolerance;
}

void ErrorTable::Print(const std::vector<std::string>& headings) const {
  std::vector<std::vector<std::string>> lines{headings};
  for (const char* heading : {"cases", "error", "tolerance", ""}) lines[0].push_back(heading);
  for (const Row& row : rows_) {
    lines.push_back(row.labels);
    lines.back().push_back(std::to_string(row.cases));
    lines.back().push_back(Format("%.1e", row.error));
    lines.back().push_back(Format("%.1e", row.tolerance));
    lines.back().push_back(row.ok() ? "ok" : "FAILED");
  }
  PrintTable(lines);
}

int ErrorTable::Verdict() const {
  std::int64_t checks = 0, failed = 0;
  for (const Row& row : rows_) {
    checks += row.cases;
    failed += !row.ok();
  }
  if (failed == 0) {
    std::printf("%lld checks, all within tolerance\n", static_cast<long long>(checks));
  } else {
    std::printf("%lld of %zu rows outside tolerance\n", static_cast<long long>(failed),
                rows_.size());
  }
  return failed == 0 ? 0 : 1;
}

}  // namespace fenwick::app
