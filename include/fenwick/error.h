// The one exception type of the library.
#pragma once

#include <stdexcept>
#include <string>

namespace fenwick {

// Thrown for every bad argument. The message names the argument, what was expected and what came,
// e.g. "level_scales: expected at least 9 levels for 200 tokens, got 8". No output was touched.
// Also thrown where CUDA refuses a launch ("CUDA: ...").
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message) : std::runtime_error(message) {}
};

}  // namespace fenwick
