// Prefill and steps against the parallel form, and what can be done with a state in between.
#include <iostream>
#include <map>
#include <utility>

#include "fenwick/error.h"
#include "fenwick/state.h"
#include "model_testing.h"

namespace fenwick::models {
namespace {

class Decoder : public EveryMixer {};
INSTANTIATE_TEST_SUITE_P(Every, Decoder, testing::ValuesIn(kAllMixers), NameOfMixer);

constexpr double kTolerance = 1e-10;  // float64

TEST_P(Decoder, PrefillAndStepsAreTheParallelForm) {
  const ModelConfig config = SmallConfig(GetParam());
  LanguageModel model = RandomModel(config);
  const torch::NoGradGuard no_grad;
  const std::int64_t tokens = 330;
  const torch::Tensor ids = RandomTokens(2, tokens, config);
  const torch::Tensor expected = model->forward(ids);
  for (const std::int64_t rollback : {0, 5}) {
    for (const std::int64_t split : {0, 1, 3, 63, 64, 129, 200}) {
      ModelState state = model->NewState(2, rollback);
      std::vector<torch::Tensor> logits;
      if (split > 0) logits.push_back(model->Prefill(ids.narrow(1, 0, split), state));
      std::int64_t at = split;
      for (const std::int64_t length : {1, 2, 1, 64, 1}) {
        logits.push_back(model->Step(ids.narrow(1, at, length), state));
        at += length;
      }
      EXPECT_EQ(state.position(1), at);
      logits.push_back(
          model->Prefill(ids.narrow(1, at, tokens - at), state, std::nullopt, /*last_only=*/true));
      EXPECT_LT(RelativeError(
                    torch::cat(logits, 1),
                    torch::cat({expected.narrow(1, 0, at), expected.narrow(1, tokens - 1, 1)}, 1)),
                kTolerance)
          << "split " << split << " rollback " << rollback;
    }
  }
}

TEST_P(Decoder, RaggedPrefillThenStepsAtDifferentPositions) {
  const ModelConfig config = SmallConfig(GetParam());
  LanguageModel model = RandomModel(config);
  const torch::NoGradGuard no_grad;
  const std::vector<std::int64_t> lengths = {70, 2, 131, 1};
  const torch::Tensor ids = RandomTokens(4, 150, config);
  std::vector<torch::Tensor> rows;
  std::vector<std::int64_t> offsets = {0};
  for (std::int64_t n = 0; n < 4; ++n) {
    rows.push_back(ids[n].narrow(0, 0, lengths[n]));
    offsets.push_back(offsets.back() + lengths[n]);
  }
  ModelState state = model->NewState(4);
  const torch::Tensor last =
      model->Prefill(torch::cat(rows).unsqueeze(0), state, torch::tensor(offsets), true);
  std::vector<torch::Tensor> next;
  for (std::int64_t n = 0; n < 4; ++n) next.push_back(ids[n].narrow(0, lengths[n], 6));
  const torch::Tensor steps = model->Step(torch::stack(next), state);
  for (std::int64_t n = 0; n < 4; ++n) {
    const torch::Tensor alone = model->forward(ids.narrow(0, n, 1).narrow(1, 0, lengths[n] + 6))[0];
    EXPECT_LT(RelativeError(last[n], alone.narrow(0, lengths[n] - 1, 1)), kTolerance) << n;
    EXPECT_LT(RelativeError(steps[n], alone.narrow(0, lengths[n], 6)), kTolerance) << n;
    EXPECT_EQ(state.position(n), lengths[n] + 6);
  }
}

TEST_P(Decoder, ClonesAndSelectionsGoTheirOwnWays) {
  const ModelConfig config = SmallConfig(GetParam());
  LanguageModel model = RandomModel(config);
  const torch::NoGradGuard no_grad;
  const torch::Tensor ids = RandomTokens(3, 100, config);
  ModelState state = model->NewState(3);
  model->Prefill(ids.narrow(1, 0, 90), state);
  ModelState copy = state.Clone();
  ModelState beams = state.Select({2, 0, 2, 1});
  EXPECT_EQ(copy.bytes(), state.bytes());
  const torch::Tensor expected = model->Step(ids.narrow(1, 90, 10), state);
  EXPECT_TRUE(torch::equal(model->Step(ids.narrow(1, 90, 10), copy), expected));
  const torch::Tensor order = torch::tensor({2, 0, 2, 1});
  const torch::Tensor selected = model->Step(ids.narrow(1, 90, 10).index_select(0, order), beams);
  EXPECT_LT(RelativeError(selected, expected.index_select(0, order)), kTolerance);
  EXPECT_THROW(state.Select({3}), Error);
}

TEST_P(Decoder, TruncationTakesTokensBack) {
  const ModelConfig config = SmallConfig(GetParam());
  LanguageModel model = RandomModel(config);
  const torch::NoGradGuard no_grad;
  const torch::Tensor ids = RandomTokens(2, 300, config);
  const torch::Tensor expected = model->forward(ids);
  const bool linear = GetParam() == MixerKind::kMamba2 || GetParam() == MixerKind::kGatedDeltaNet;
  for (const std::int64_t before : {0, 62, 127, 190, 256}) {
    ModelState state = model->NewState(2, kStateChunk);
    if (before > 0) model->Prefill(ids.narrow(1, 0, before), state);
    model->Step(RandomTokens(2, 20, config), state);  // drafts, of which 0 and 4 are kept
    const torch::Tensor kept = ids.narrow(1, before, 4);
    if (linear) {
      EXPECT_THROW(state.Truncate({20, 16}), Error);
      continue;
    }
    state.Truncate({20, 20});
    model->Step(torch::cat({kept, RandomTokens(2, 7, config)}, 1), state);
    state.Truncate({11, 7});
    EXPECT_EQ(state.position(0), before);
    EXPECT_EQ(state.position(1), before + 4);
    const torch::Tensor next =
        torch::stack({ids[0].narrow(0, before, 9), ids[1].narrow(0, before + 4, 9)});
    const torch::Tensor logits = model->Step(next, state);
    EXPECT_LT(RelativeError(logits[0], expected[0].narrow(0, before, 9)), kTolerance) << before;
    EXPECT_LT(RelativeError(logits[1], expected[1].narrow(0, before + 4, 9)), kTolerance) << before;
  }
}

TEST_P(Decoder, TruncationBeyondWhatIsKeptIsAnError) {
  const ModelConfig config = SmallConfig(GetParam());
  LanguageModel model(config);
  const torch::NoGradGuard no_grad;
  ModelState state = model->NewState(1, 8);
  model->Prefill(RandomTokens(1, 30, config), state);
  EXPECT_THROW(state.Truncate({31}), Error);
  EXPECT_THROW(state.Truncate({-1}), Error);
  EXPECT_THROW(state.Truncate({1, 1}), Error);
  if (IsLogLinear(GetParam())) {
    EXPECT_THROW(state.Truncate({9}), Error);
    state.Truncate({5});
    EXPECT_THROW(state.Truncate({4}), Error);
    state.Truncate({3});
    EXPECT_EQ(state.position(0), 22);
  }
}

TEST_P(Decoder, GradientsFlowThroughAPrefilledState) {
  if (GetParam() == MixerKind::kAttention) GTEST_SKIP() << "the cache is cut off by contract";
  const ModelConfig config = SmallConfig(GetParam());
  LanguageModel model = RandomModel(config);
  const torch::Tensor ids = RandomTokens(1, 170, config);
  const torch::Tensor cotangent = torch::randn({1, 170, config.vocab_size}, torch::kDouble);
  (model->forward(ids) * cotangent).sum().backward();
  std::map<std::string, torch::Tensor> whole;
  for (const auto& named : model->named_parameters()) {
    whole[named.key()] = named.value().grad().clone();
  }
  model->zero_grad();
  ModelState state = model->NewState(1);
  torch::Tensor loss = torch::zeros({}, torch::kDouble);
  for (const auto& [begin, length] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{0, 70}, {70, 3}, {73, 97}}) {
    loss = loss + (model->Prefill(ids.narrow(1, begin, length), state) *
                   cotangent.narrow(1, begin, length))
                      .sum();
  }
  loss.backward();
  for (const auto& named : model->named_parameters()) {
    EXPECT_LT(RelativeError(named.value().grad(), whole.at(named.key())), 1e-9) << named.key();
  }
}

TEST(Decoding, StateOfLogLinearModelsGrowsWithTheLogarithm) {
  const torch::NoGradGuard no_grad;
  std::map<MixerKind, std::vector<std::int64_t>> bytes;
  for (const MixerKind kind : kAllMixers) {
    LanguageModel model(SmallConfig(kind));
    ModelState state = model->NewState(1);
    for (int i = 0; i < 4; ++i) {
      model->Prefill(RandomTokens(1, 256, model->config()), state);
      bytes[kind].push_back(state.bytes());
    }
  }
  EXPECT_EQ(bytes[MixerKind::kMamba2].front(), bytes[MixerKind::kMamba2].back());
  const std::vector<std::int64_t>& log_linear = bytes[MixerKind::kLogLinearMamba2];
  EXPECT_LT(log_linear.back(), 2 * log_linear.front());
  EXPECT_GE(bytes[MixerKind::kAttention].back(), 4 * bytes[MixerKind::kAttention].front());
}

TEST(Decoding, SaturatedModelGoesOnPastItsLevels) {
  std::cout << "seed " << FreshSeed() << "\n";
  for (const MixerKind kind : {MixerKind::kLogLinearMamba2, MixerKind::kLogLinearGatedDeltaNet}) {
    ModelConfig config = SmallConfig(kind);
    config.num_levels = 8;  // 128 tokens
    LanguageModel strict = RandomModel(config);
    const torch::NoGradGuard no_grad;
    const torch::Tensor ids = RandomTokens(1, 500, config);
    EXPECT_ANY_THROW(strict->forward(ids));
    config.saturate = true;
    LanguageModel model = RandomModel(config);
    const torch::Tensor expected = model->forward(ids);
    ModelState state = model->NewState(1);
    std::vector<torch::Tensor> logits = {model->Prefill(ids.narrow(1, 0, 300), state)};
    for (std::int64_t t = 300; t < 500; t += 20) {
      logits.push_back(model->Step(ids.narrow(1, t, 20), state));
    }
    EXPECT_LT(RelativeError(torch::cat(logits, 1), expected), kTolerance) << MixerName(kind);
  }
}

}  // namespace
}  // namespace fenwick::models
