// Models on a GPU beside the same models on the CPU. Skipped where there is no GPU or no kernel.
#include "fenwick/ops.h"
#include "model_testing.h"

namespace fenwick::models {
namespace {

class ModelOnCuda : public EveryMixer {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available() || !DeviceAvailable(Device::kCUDA)) {
      GTEST_SKIP() << "needs a GPU and a build with CUDA";
    }
    EveryMixer::SetUp();
  }

  // The model on the CPU in `type` and a copy of it on the GPU.
  static std::pair<LanguageModel, LanguageModel> Pair(const ModelConfig& config,
                                                      torch::ScalarType type) {
    const LanguageModel cpu = RandomModel(config, type);
    LanguageModel cuda = RandomModel(config, type);
    const torch::NoGradGuard no_grad;
    const auto from = cpu->named_parameters();
    for (auto& named : cuda->named_parameters()) named.value().copy_(from[named.key()]);
    cuda->to(torch::kCUDA);
    return {cpu, cuda};
  }
};
INSTANTIATE_TEST_SUITE_P(Every, ModelOnCuda, testing::ValuesIn(kAllMixers), NameOfMixer);

TEST_P(ModelOnCuda, LogitsAndGradientsAreTheCpus) {
  const ModelConfig config = SmallConfig(GetParam());
  auto [cpu, cuda] = Pair(config, torch::kDouble);
  const torch::Tensor ids = RandomTokens(2, 300, config);
  const torch::Tensor expected = cpu->forward(ids), logits = cuda->forward(ids.cuda());
  ASSERT_TRUE(logits.is_cuda());
  EXPECT_LT(RelativeError(logits.cpu(), expected), 1e-9);
  const torch::Tensor cotangent = torch::randn_like(expected);
  (expected * cotangent).sum().backward();
  (logits * cotangent.cuda()).sum().backward();
  const auto gradients = cuda->named_parameters();
  for (const auto& named : cpu->named_parameters()) {
    EXPECT_LT(RelativeError(gradients[named.key()].grad().cpu(), named.value().grad()), 1e-7)
        << named.key();
  }
}

TEST_P(ModelOnCuda, PrefillAndStepsAreTheParallelForm) {
  const ModelConfig config = SmallConfig(GetParam());
  auto [cpu, cuda] = Pair(config, torch::kDouble);
  const torch::NoGradGuard no_grad;
  const torch::Tensor ids = RandomTokens(2, 330, config);
  const torch::Tensor expected = cpu->forward(ids);
  const torch::Tensor input = ids.cuda();
  for (const std::int64_t split : {0, 1, 64, 129, 200}) {
    ModelState state = cuda->NewState(2);
    std::vector<torch::Tensor> logits;
    if (split > 0) logits.push_back(cuda->Prefill(input.narrow(1, 0, split), state));
    std::int64_t at = split;
    for (const std::int64_t length : {1, 2, 64, 1, 62}) {
      logits.push_back(cuda->Step(input.narrow(1, at, length), state));
      at += length;
    }
    EXPECT_LT(RelativeError(torch::cat(logits, 1).cpu(), expected.narrow(1, 0, at)), 1e-9) << split;
  }
}

TEST_P(ModelOnCuda, TrainingFollowsTheCpu) {
  const ModelConfig config = SmallConfig(GetParam());
  auto [cpu, cuda] = Pair(config, torch::kFloat);
  const auto losses = [&](LanguageModel& model, const std::vector<torch::Tensor>& batches) {
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-3));
    std::vector<double> result;
    for (const torch::Tensor& batch : batches) {
      const torch::Tensor ids = batch.to(model->device());
      optimizer.zero_grad();
      const torch::Tensor loss =
          torch::nn::functional::cross_entropy(model->forward(ids).flatten(0, 1), ids.flatten());
      loss.backward();
      optimizer.step();
      result.push_back(loss.item<double>());
    }
    return result;
  };
  std::vector<torch::Tensor> batches;
  for (int i = 0; i < 30; ++i) batches.push_back(RandomTokens(4, 130, config));
  const std::vector<double> expected = losses(cpu, batches), got = losses(cuda, batches);
  EXPECT_LT(expected.back(), 0.7 * expected.front());
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_NEAR(got[i], expected[i], 2e-3 * expected[i]) << "step " << i;
  }
}

// bfloat16 on the fast kernels' shapes (K, V >= 64), against float64 on the same rounded weights:
// no worse than three times the CPU's bfloat16.
TEST_P(ModelOnCuda, BFloat16) {
  ModelConfig config = SmallConfig(GetParam());
  config.head_dim = 64;
  config.state_size = 64;
  config.expand = 8;  // Mamba-2: four heads of 64
  auto [cpu, cuda] = Pair(config, torch::kBFloat16);
  const torch::NoGradGuard no_grad;
  const torch::Tensor ids = RandomTokens(2, 400, config);
  const torch::Tensor rounded = cpu->forward(ids), logits = cuda->forward(ids.cuda()).cpu();
  cpu->to(torch::kDouble);
  const torch::Tensor exact = cpu->forward(ids);
  EXPECT_LT(RelativeError(logits, exact), 3 * RelativeError(rounded, exact) + 1e-3);
}

}  // namespace
}  // namespace fenwick::models
