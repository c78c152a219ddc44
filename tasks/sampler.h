// Drawing the next token, and a generated continuation.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "models/language_model.h"
#include "tasks/rng.h"
#include "tasks/sampler_options.h"

namespace fenwick::tasks {

// One token from logits [vocab_size]. Computed in float64 on the CPU, so that a seed gives the same
// choice from the same logits on every device.
std::int64_t SampleToken(const torch::Tensor& logits, const SamplingOptions& options, Rng& rng);

// Appends up to `count` tokens to `prompt` (not empty): prefill, then one step a token.
// `emit` receives each new token and returns false to stop.
void Generate(models::LanguageModel& model, const std::vector<std::int64_t>& prompt,
              std::int64_t count, const SamplingOptions& options,
              const std::function<bool(std::int64_t)>& emit);

}  // namespace fenwick::tasks
