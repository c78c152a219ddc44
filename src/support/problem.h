// Random problems of any shape, and the comparison of a call's results with the reference: shared
// by the property tests and `fenwick verify`.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "reference/reference.h"
#include "support/run.h"

namespace fenwick::support {

enum class Gate {
  kMild,   // exp(g) mostly in 0.7..1, heads differ
  kZero,   // g = 0
  kTiny,   // -1e-6
  kHuge,   // -90
  kReset,  // -inf
};

struct ProblemSpec {
  Transition transition = Transition::kScalarGate;
  std::int64_t B = 1, T = 1, G = 1, H = 1, K = 16, V = 16;
  std::int64_t L = 0;                      // 0: as many as the positions reached need
  std::vector<std::int64_t> lengths;       // of packed sequences; sets B = 1 and T
  std::vector<std::int64_t> state_tokens;  // tokens before the call, one for each sequence; or none
  Gate gate = Gate::kMild;
  bool gate_everywhere = false;  // false: on about one token in sixteen, mild elsewhere
  double scale = 1.0;
  bool saturate = false;
  bool d_final_state = false;
  RunOptions options;
};

struct Problem {
  ProblemSpec spec;
  reference::Arguments arguments;  // rounded to the storage types
  reference::Tensor d_o;
  reference::State d_final_state;
};

Problem RandomProblem(const ProblemSpec& spec, std::uint64_t seed);
// "gated_delta B2 T65 G1 H2 K16 V8 ...", enough to find the case again.
std::string Describe(const ProblemSpec& spec);

// Norms below this are taken as this: results of a gate of exp(-90) are near float32's smallest.
inline constexpr double kNormFloor = 1e-30;

// ||out - ref|| / max(||ref||, norm_floor); infinite where shapes differ or out is not finite.
double RelativeError(const reference::Tensor& out, const reference::Tensor& ref,
                     double norm_floor = kNormFloor);
// The largest relative error allowed for `options.dtype`.
double Tolerance(const RunOptions& options, std::int64_t tokens, bool gradient);

struct Comparison {
  std::string name;
  double error;
  double tolerance;
  bool ok() const { return error <= tolerance; }
};

// Every tensor of a result against what the reference gives. Of states, the parts that are live.
std::vector<Comparison> Compare(const Problem& problem, const reference::Result& result,
                                const reference::Result& expected);
std::vector<Comparison> Compare(const Problem& problem, const reference::Gradients& gradients,
                                const reference::Gradients& expected);
// Runs Forward, respectively Backward, with problem.spec.options and compares; a result that is
// ill-conditioned is allowed the error that its inputs' rounding causes.
std::vector<Comparison> CheckForward(const Problem& problem);
std::vector<Comparison> CheckBackward(const Problem& problem);

}  // namespace fenwick::support
