#include "tasks/sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "fenwick/error.h"

namespace fenwick::tasks {

void ValidateSampling(const SamplingOptions& options) {
  if (!(options.temperature >= 0)) {
    throw Error("--temperature: expected at least 0, got " + std::to_string(options.temperature));
  }
  if (options.top_k < 0) {
    throw Error("--top-k: expected at least 0, got " + std::to_string(options.top_k));
  }
  if (!(options.top_p > 0 && options.top_p <= 1)) {
    throw Error("--top-p: expected above 0, at most 1, got " + std::to_string(options.top_p));
  }
}

std::int64_t SampleToken(const torch::Tensor& logits, const SamplingOptions& options, Rng& rng) {
  const torch::Tensor values = logits.detach().to(torch::kCPU, torch::kFloat64).contiguous();
  const double* logit = values.const_data_ptr<double>();
  const std::int64_t vocab = values.numel();
  std::vector<std::int64_t> order(vocab);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int64_t a, std::int64_t b) { return logit[a] > logit[b]; });
  if (options.temperature == 0) return order[0];

  std::int64_t kept = options.top_k > 0 ? std::min(options.top_k, vocab) : vocab;
  std::vector<double> weight(kept);
  for (std::int64_t i = 0; i < kept; ++i) {
    weight[i] = std::exp((logit[order[i]] - logit[order[0]]) / options.temperature);
  }
  double total = std::accumulate(weight.begin(), weight.end(), 0.0);
  if (options.top_p < 1) {
    double sum = 0;
    std::int64_t i = 0;
    do {
      sum += weight[i++];
    } while (i < kept && sum < options.top_p * total);
    kept = i;
    total = sum;
  }
  double rest = rng.Uniform() * total;
  for (std::int64_t i = 0; i < kept; ++i) {
    rest -= weight[i];
    if (rest < 0) return order[i];
  }
  return order[kept - 1];
}

void Generate(models::LanguageModel& model, const std::vector<std::int64_t>& prompt,
              std::int64_t count, const SamplingOptions& options,
              const std::function<bool(std::int64_t)>& emit) {
  ValidateSampling(options);
  if (prompt.empty()) throw Error("prompt: expected at least one token, got none");
  torch::NoGradGuard no_grad;
  Rng rng(static_cast<std::uint64_t>(options.seed), Stream::kSampling);
  const torch::Device device = model->device();
  models::ModelState state = model->NewState(1);
  torch::Tensor logits =
      model->Prefill(torch::tensor(prompt, torch::kInt64).view({1, -1}).to(device), state,
                     std::nullopt, /*last_only=*/true);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t token = SampleToken(logits.flatten(), options, rng);
    if (!emit(token) || i + 1 == count) return;
    logits = model->Step(torch::full({1, 1}, token, torch::kInt64).to(device), state);
  }
}

}  // namespace fenwick::tasks
