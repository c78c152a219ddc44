// Prefill, a saved state, one more token: with K = V = 1, g = 0 and all keys, queries and level
// scales 1, output t is the sum of the values up to t.
#include <cmath>
#include <cstdio>
#include <vector>

#include "fenwick/fenwick.h"

namespace {

constexpr std::int64_t kTokens = 300;

// `tokens` tokens with values first, first + 1, ...
std::vector<float> Run(fenwick::HostState& state, std::int64_t first, std::int64_t tokens) {
  const std::int64_t levels = fenwick::NumLevels(kTokens + 1);
  std::vector<float> ones(tokens * levels, 1.0f), zeros(tokens, 0.0f), v(tokens), o(tokens);
  for (std::int64_t t = 0; t < tokens; ++t) v[t] = static_cast<float>(first + t);
  using fenwick::DType;
  using fenwick::TensorView;
  fenwick::Inputs inputs;
  inputs.q = inputs.k = TensorView(ones.data(), DType::kFloat32, {1, tokens, 1, 1});
  inputs.v = TensorView(v.data(), DType::kFloat32, {1, tokens, 1, 1});
  inputs.g = TensorView(zeros.data(), DType::kFloat32, {1, tokens, 1});
  inputs.level_scales = TensorView(ones.data(), DType::kFloat32, {1, tokens, 1, levels});
  inputs.initial_state = state.View();
  fenwick::HostState next(state.spec());
  next.Reserve(state.max_position() + tokens);
  fenwick::Forward(inputs, TensorView(o.data(), DType::kFloat32, {1, tokens, 1, 1}), next.View(),
                   {});
  state = next;
  return o;
}

}  // namespace

int main() {
  try {
    fenwick::HostState state(
        {.num_sequences = 1, .groups = 1, .heads = 1, .key_size = 1, .value_size = 1});
    Run(state, 0, kTokens);
    state = fenwick::HostState::Load(state.Save());
    const float out = Run(state, kTokens, 1)[0], expected = kTokens * (kTokens + 1) / 2;
    std::printf("fenwick %s: %g, expected %g\n", FENWICK_VERSION, out, expected);
    return std::fabs(out - expected) < 1.0f && state.position(0) == kTokens + 1 ? 0 : 1;
  } catch (const fenwick::Error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
