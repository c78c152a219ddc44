// A table of errors beside their tolerances, printed by `fenwick verify`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fenwick::app {

class ErrorTable {
 public:
  // Rows with the same labels are one: it counts the cases and keeps the one whose error is the
  // largest part of its tolerance. False where the error is above the tolerance.
  bool Add(const std::vector<std::string>& labels, double error, double tolerance);
  void Print(const std::vector<std::string>& headings) const;
  // Prints one line that sums up; 0 when every error is within its tolerance, otherwise 1.
  int Verdict() const;

 private:
  struct Row {
    std::vector<std::string> labels;
    std::int64_t cases;
    double error;
    double tolerance;
    bool ok() const { return error <= tolerance; }
  };
  std::vector<Row> rows_;
};

// Prints columns aligned, the first row as a heading; numbers to the right.
void PrintTable(const std::vector<std::vector<std::string>>& rows);

// printf into a string.
std::string Format(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace fenwick::app
