// `fenwick verify`: forward, backward and step of both operators against src/reference on random
// ragged shapes, for every device and element type.
#include <algorithm>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "apps/fenwick/commands.h"
#include "apps/fenwick/report.h"
#include "fenwick/partition.h"
#include "support/problem.h"
#include "tasks/progress.h"
#include "tasks/rng.h"

namespace fenwick::app {
namespace {

using Index = std::int64_t;
using tasks::Rng;

template <typename T>
T Pick(Rng& rng, std::initializer_list<T> values) {
  return values.begin()[rng.Below(static_cast<Index>(values.size()))];
}

// At and around chunk borders, or anything up to 260.
Index RandomLength(Rng& rng) {
  return rng.Uniform() < 0.5 ? Pick<Index>(rng, {0, 1, 2, 63, 64, 65, 127, 128, 129, 200})
                             : rng.Below(260) + 1;
}

// What differs from case to case but not from type to type: the same seed gives the same shapes.
support::ProblemSpec RandomSpec(Rng& rng, Transition transition, bool step) {
  support::ProblemSpec spec;
  spec.transition = transition;
  spec.G = Pick<Index>(rng, {1, 1, 2});
  spec.H = spec.G * Pick<Index>(rng, {1, 2, 3});
  spec.K = Pick<Index>(rng, {1, 8, 16, 20, 32, 48, 64});
  // With one key dimension the delta rule's transition is the number 1 - beta k^2: where beta k^2
  // is near 1, what is left of a state has no bounded relative error in any float type.
  if (transition == Transition::kGatedDelta) spec.K = std::max<Index>(spec.K, 8);
  spec.V = Pick<Index>(rng, {1, 8, 16, 24, 32, 64});
  spec.B = Pick<Index>(rng, {1, 2, 3});
  spec.T = step ? Pick<Index>(rng, {1, 2, 5, 64, 150}) : std::max<Index>(RandomLength(rng), 1);
  Index sequences = spec.B;
  if (!step && rng.Uniform() < 0.35) {
    sequences = Pick<Index>(rng, {2, 3, 5});
    for (Index n = 0; n < sequences; ++n) spec.lengths.push_back(RandomLength(rng));
  }
  if (step || rng.Uniform() < 0.4) {
    for (Index n = 0; n < sequences; ++n) {
      spec.state_tokens.push_back(rng.Uniform() < 0.2 ? 0 : rng.Below(400));
    }
  }
  if (rng.Uniform() < 0.2) {
    spec.saturate = true;
    spec.L = Pick<Index>(rng, {1, 2, 5, 8, 9});
  }
  using support::Gate;
  spec.gate =
      Pick(rng, {Gate::kMild, Gate::kMild, Gate::kZero, Gate::kTiny, Gate::kHuge, Gate::kReset});
  spec.gate_everywhere = rng.Uniform() < 0.1;
  spec.scale = Pick(rng, {1.0, 0.5});
  spec.d_final_state = rng.Uniform() < 0.5;
  using support::Layout;
  spec.options.layout = Pick(rng, {Layout::kContiguous, Layout::kPadded, Layout::kRagged});
  spec.options.spare_slots = static_cast<int>(rng.Below(3));
  return spec;
}

// Sizes of 1 to kStateChunk tokens that sum to `tokens`.
std::vector<Index> RandomSteps(Rng& rng, Index tokens) {
  std::vector<Index> steps;
  for (Index left = tokens; left > 0; left -= steps.back()) {
    steps.push_back(std::min(left, Pick<Index>(rng, {1, 1, 2, 7, kStateChunk})));
  }
  return steps;
}

DType DTypeOf(const std::string& name) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    if (name == DTypeName(dtype)) return dtype;
  }
  throw Error("--dtype: expected float32, bfloat16, float16 or float64, got " + name);
}

std::vector<Device> DevicesOf(const std::vector<std::string>& names) {
  if (names.empty()) return support::AvailableDevices();
  std::vector<Device> devices;
  for (const std::string& name : names) {
    if (name != "cpu" && name != "cuda") {
      throw Error("--device: expected cpu or cuda, got " + name);
    }
    devices.push_back(name == "cpu" ? Device::kCPU : Device::kCUDA);
    if (!DeviceAvailable(devices.back())) {
      throw Error("--device: this build or this machine has no kernels for " + name);
    }
  }
  return devices;
}

std::vector<support::Comparison> CheckSteps(const support::Problem& problem, Rng& rng) {
  const auto result =
      support::RunSteps(problem.arguments, RandomSteps(rng, problem.spec.T), problem.spec.options);
  auto all = support::Compare(problem, result, reference::Forward(problem.arguments));
  for (support::Comparison& one : all) one.name = "step: " + one.name;
  return all;
}

}  // namespace

int RunVerifyKernels(const VerifyOptions& options) {
  const std::uint64_t seed = options.seed >= 0 ? static_cast<std::uint64_t>(options.seed)
                                               : std::random_device()() % 1000000;
  const std::vector<Device> devices = DevicesOf(options.devices);
  std::vector<DType> dtypes;
  for (const std::string& name : options.dtypes) dtypes.push_back(DTypeOf(name));
  if (dtypes.empty()) {
    dtypes = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};
  }
  ErrorTable table;
  tasks::Progress bar("verify",
                      static_cast<Index>(devices.size() * dtypes.size()) * 2 * options.cases);
  Index done = 0;
  for (const Device device : devices) {
    for (const Transition transition : {Transition::kScalarGate, Transition::kGatedDelta}) {
      const char* name = transition == Transition::kScalarGate ? "scalar_gate" : "gated_delta";
      for (const DType dtype : dtypes) {
        for (Index i = 0; i < options.cases; ++i) {
          Rng rng(seed, tasks::Stream::kVerify, static_cast<std::uint64_t>(i));
          const bool step = i % 4 == 3;
          support::ProblemSpec spec = RandomSpec(rng, transition, step);
          spec.options.device = device;
          spec.options.dtype = dtype;
          const DType wide = spec.options.wide_dtype();
          spec.options.beta_dtype = Pick(rng, {dtype, wide});
          spec.options.scales_dtype = Pick(rng, {dtype, wide});
          const support::Problem problem = support::RandomProblem(spec, rng.Next());
          const auto add = [&](const std::vector<support::Comparison>& comparisons) {
            for (const support::Comparison& one : comparisons) {
              if (table.Add({name, support::DeviceName(device), DTypeName(dtype), one.name},
                            one.error, one.tolerance)) {
                continue;
              }
              bar.Clear();
              std::printf("%s: error %.1e, tolerance %.1e in %s\n", one.name.c_str(), one.error,
                          one.tolerance, support::Describe(problem.spec).c_str());
            }
          };
          if (step) {
            add(CheckSteps(problem, rng));
          } else {
            add(support::CheckForward(problem));
            add(support::CheckBackward(problem));
          }
          bar.Update(++done, std::string(name) + " " + DTypeName(dtype));
        }
      }
    }
  }
  bar.Finish();
  table.Print({"operator", "device", "dtype", "tensor"});
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  return table.Verdict();
}

}  // namespace fenwick::app
