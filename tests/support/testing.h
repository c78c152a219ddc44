// GoogleTest helpers over src/support: seeds, comparisons, and one test body for every device.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "fenwick/error.h"
#include "support/problem.h"

namespace fenwick::testing {

// A fresh seed for this process, printed once; FENWICK_TEST_SEED sets it to repeat a run.
inline std::uint64_t Seed() {
  static const std::uint64_t seed = [] {
    const char* text = std::getenv("FENWICK_TEST_SEED");
    const std::uint64_t value =
        text != nullptr ? std::strtoull(text, nullptr, 10) : std::random_device()();
    std::printf("FENWICK_TEST_SEED=%llu\n", static_cast<unsigned long long>(value));
    return value;
  }();
  return seed;
}

// A different seed at every call, fixed by Seed() and the order of calls in a test.
inline std::uint64_t NextSeed() {
  static std::uint64_t count = 0;
  return Seed() + 0x9e3779b97f4a7c15ull * ++count;
}

// What the Error that f() throws says.
template <typename F>
std::string ErrorOf(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

// One failure for each tensor whose error is above its tolerance.
inline void ExpectClose(const std::vector<support::Comparison>& comparisons) {
  for (const support::Comparison& c : comparisons) {
    EXPECT_LE(c.error, c.tolerance) << c.name;
  }
}

inline void ExpectClose(const char* name, const reference::Tensor& out,
                        const reference::Tensor& ref, double tolerance) {
  EXPECT_LE(support::RelativeError(out, ref), tolerance) << name;
}

// Every gradient that `ref` has.
inline void ExpectClose(const reference::Gradients& out, const reference::Gradients& ref,
                        double tolerance) {
  ExpectClose("dq", out.q, ref.q, tolerance);
  ExpectClose("dk", out.k, ref.k, tolerance);
  ExpectClose("dv", out.v, ref.v, tolerance);
  ExpectClose("dg", out.g, ref.g, tolerance);
  ExpectClose("dbeta", out.beta, ref.beta, tolerance);
  ExpectClose("dlevel_scales", out.level_scales, ref.level_scales, tolerance);
}

// Bitwise equality.
inline constexpr reference::Tensor reference::Gradients::*kGradientFields[] = {
    &reference::Gradients::q, &reference::Gradients::k,    &reference::Gradients::v,
    &reference::Gradients::g, &reference::Gradients::beta, &reference::Gradients::level_scales};

inline void ExpectSame(const char* name, const reference::Tensor& a, const reference::Tensor& b) {
  ASSERT_EQ(a.sizes, b.sizes) << name;
  EXPECT_EQ(a.data, b.data) << name << " is not bitwise equal";
}

inline void ExpectSame(const reference::Gradients& a, const reference::Gradients& b) {
  for (const auto field : kGradientFields) ExpectSame("gradient", a.*field, b.*field);
  ExpectSame("d_initial_state.nodes", a.initial_state.nodes, b.initial_state.nodes);
  ExpectSame("d_initial_state.k", a.initial_state.k, b.initial_state.k);
  ExpectSame("d_initial_state.v", a.initial_state.v, b.initial_state.v);
  ExpectSame("d_initial_state.g", a.initial_state.g, b.initial_state.g);
}

// Suite base: TEST_P bodies run once for each available device and transition.
struct Target {
  Device device;
  Transition transition;
};

inline std::vector<Target> Targets() {
  std::vector<Target> targets;
  for (const Device device : support::AvailableDevices()) {
    targets.push_back({device, Transition::kScalarGate});
    targets.push_back({device, Transition::kGatedDelta});
  }
  return targets;
}

inline std::string TargetName(const ::testing::TestParamInfo<Target>& info) {
  return std::string(info.param.transition == Transition::kScalarGate ? "ScalarGate"
                                                                      : "GatedDelta") +
         (info.param.device == Device::kCPU ? "Cpu" : "Cuda");
}

inline void PrintTo(const Target& target, std::ostream* os) {
  *os << TargetName(::testing::TestParamInfo<Target>(target, 0));
}

}  // namespace fenwick::testing
