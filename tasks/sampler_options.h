// How the next token is drawn.
#pragma once

#include <cstdint>

namespace fenwick::tasks {

struct SamplingOptions {
  double temperature = 0.8;  // 0: the likeliest token
  std::int64_t top_k = 0;    // only the k likeliest; 0: all
  double top_p = 1.0;        // only the likeliest that together reach this probability
  std::int64_t seed = 0;
};

// Throws Error naming the option.
void ValidateSampling(const SamplingOptions& options);

}  // namespace fenwick::tasks
