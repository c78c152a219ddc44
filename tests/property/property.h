// What the property tests share: the suite over devices and transitions, and shapes to try.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "support/testing.h"

namespace fenwick::testing {

class PropertyTest : public ::testing::TestWithParam<Target> {
 protected:
  PropertyTest() : random_(NextSeed()) {}

  support::ProblemSpec Spec(DType dtype = DType::kFloat32) const {
    support::ProblemSpec spec;
    spec.transition = GetParam().transition;
    spec.options.device = GetParam().device;
    spec.options.dtype = dtype;
    spec.options.beta_dtype = spec.options.scales_dtype =
        dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    return spec;
  }

  std::int64_t Uniform(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random_);
  }

  template <typename T>
  T OneOf(std::initializer_list<T> values) {
    return values.begin()[Uniform(0, static_cast<std::int64_t>(values.size()) - 1)];
  }

  // Any shape that the operators take, small enough for the reference.
  support::ProblemSpec RandomSpec(std::int64_t max_tokens = 330) {
    using support::Gate;
    using support::Layout;
    support::ProblemSpec spec =
        Spec(OneOf({DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}));
    if (Uniform(0, 1)) spec.options.beta_dtype = spec.options.dtype;
    if (Uniform(0, 1)) spec.options.scales_dtype = spec.options.dtype;
    spec.G = Uniform(1, 2);
    spec.H = spec.G * Uniform(1, 3);
    spec.K = OneOf<std::int64_t>({1, 3, 8, 16, 24, 31, 40, 64, 65});
    // With one key dimension the delta rule's transition is the number 1 - beta k^2: where beta k^2
    // is near 1, what is left of a state has no bounded relative error in any float type.
    if (spec.transition == Transition::kGatedDelta) spec.K = std::max<std::int64_t>(spec.K, 3);
    spec.V = OneOf<std::int64_t>({1, 2, 8, 16, 20, 33, 64, 72});
    std::int64_t sequences;
    if (Uniform(0, 1)) {
      spec.B = sequences = Uniform(1, 3);
      spec.T = Uniform(1, max_tokens);
    } else {
      sequences = Uniform(1, 5);
      for (std::int64_t n = 0; n < sequences; ++n) {
        spec.lengths.push_back(Uniform(0, 3) ? Uniform(1, max_tokens / 2) : 0);
      }
    }
    if (Uniform(0, 2) == 0) {
      for (std::int64_t n = 0; n < sequences; ++n) {
        spec.state_tokens.push_back(OneOf<std::int64_t>({0, 1, 64, 127, 128, 129, 200, 300, 512}));
      }
    }
    if (Uniform(0, 3) == 0) {
      spec.saturate = true;
      spec.L = Uniform(1, 9);
    }
    spec.gate = OneOf({Gate::kMild, Gate::kZero, Gate::kTiny, Gate::kHuge, Gate::kReset});
    spec.gate_everywhere = Uniform(0, 3) == 0;
    spec.scale = Uniform(0, 1) ? 1.0 : 0.37;
    spec.options.layout = OneOf({Layout::kContiguous, Layout::kPadded, Layout::kRagged});
    spec.options.num_threads = static_cast<int>(Uniform(0, 3));
    spec.options.spare_slots = static_cast<int>(Uniform(0, 1));
    spec.options.final_state = Uniform(0, 1) == 1;
    return spec;
  }

  std::mt19937_64 random_;
};

// A suite whose TEST_P bodies run once for each available device and transition.
#define FENWICK_PROPERTY_SUITE(suite)                                                          \
  class suite : public ::fenwick::testing::PropertyTest {};                                    \
  INSTANTIATE_TEST_SUITE_P(Targets, suite, ::testing::ValuesIn(::fenwick::testing::Targets()), \
                           ::fenwick::testing::TargetName)

}  // namespace fenwick::testing
