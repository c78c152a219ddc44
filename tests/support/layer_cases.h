// The layers of a device against the equations of fenwick/layers.h in float64, written out.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "fenwick/layers.h"
#include "support/device_tensor.h"
#include "support/problem.h"
#include "support/testing.h"

namespace fenwick::testing {

using reference::Tensor;
using support::DeviceTensor;
using support::Layout;

inline Tensor Random(std::vector<std::int64_t> sizes, std::mt19937_64& random) {
  Tensor x(std::move(sizes));
  std::normal_distribution<double> normal;
  for (double& value : x.data) value = normal(random);
  return x;
}

inline double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
inline double Silu(double x) { return x * Sigmoid(x); }
inline double SiluSlope(double x) { return Sigmoid(x) * (1 + x * (1 - Sigmoid(x))); }

inline Context RunOn(Device device, const support::Allocation& workspace) {
  return {.device = device, .workspace = workspace.data(), .workspace_bytes = workspace.bytes()};
}

struct ConvCase {
  std::vector<std::int64_t>
      offsets;  // of the sequences in B = 1; two entries: B = 3 of that length
  std::int64_t channels, width;
  bool silu, state;
};

inline void CheckConv(Device device, const ConvCase& test, DType dtype, double tolerance) {
  SCOPED_TRACE(::testing::Message() << "T" << test.offsets.back() << " D" << test.channels << " W"
                                    << test.width << " state" << test.state);
  std::mt19937_64 random(NextSeed());
  const bool packed = test.offsets.size() > 2;
  const std::int64_t B = packed ? 1 : 3, T = test.offsets.back(), D = test.channels, W = test.width;
  const std::int64_t N = packed ? static_cast<std::int64_t>(test.offsets.size()) - 1 : B;
  const Tensor x = Random({B, T, D}, random), weight = Random({D, W}, random),
               bias = Random({D}, random), d_y = Random({B, T, D}, random);
  const Tensor initial = test.state && W > 1 ? Random({N, D, W - 1}, random) : Tensor();

  Tensor y({B, T, D}), dx({B, T, D}), dw({D, W}), db({D}), d_initial, final_state;
  if (initial.given()) d_initial = final_state = Tensor({N, D, W - 1});
  for (std::int64_t n = 0; n < N; ++n) {
    const std::int64_t b = packed ? 0 : n, begin = packed ? test.offsets[n] : 0;
    const std::int64_t tokens = packed ? test.offsets[n + 1] - begin : T;
    for (std::int64_t d = 0; d < D; ++d) {
      const auto input = [&](std::int64_t t) {
        if (t >= 0) return x(b, begin + t, d);
        return initial.given() ? initial(n, d, W - 1 + t) : 0.0;
      };
      for (std::int64_t t = 0; t < tokens; ++t) {
        double z = bias(d);
        for (std::int64_t w = 0; w < W; ++w) z += weight(d, w) * input(t - (W - 1) + w);
        y(b, begin + t, d) = test.silu ? Silu(z) : z;
        const double dz = d_y(b, begin + t, d) * (test.silu ? SiluSlope(z) : 1);
        db(d) += dz;
        for (std::int64_t w = 0; w < W; ++w) {
          const std::int64_t s = t - (W - 1) + w;
          dw(d, w) += dz * input(s);
          if (s >= 0) {
            dx(b, begin + s, d) += dz * weight(d, w);
          } else if (initial.given()) {
            d_initial(n, d, W - 1 + s) += dz * weight(d, w);
          }
        }
      }
      for (std::int64_t w = 0; initial.given() && w + 1 < W; ++w) {
        final_state(n, d, w) = input(tokens - (W - 1) + w);
      }
    }
  }

  const auto in = [&](const Tensor& values) {
    return DeviceTensor(device, dtype, values, Layout::kContiguous);
  };
  const auto out = [&](const Tensor& like) {
    return like.given() ? DeviceTensor(device, dtype, like.sizes, Layout::kContiguous)
                        : DeviceTensor();
  };
  const DeviceTensor x_in = in(x), weight_in = in(weight), bias_in = in(bias), dy_in = in(d_y);
  const DeviceTensor state = in(initial), y_out = out(y);
  CausalConv conv;
  conv.x = x_in.view();
  conv.weight = weight_in.view();
  conv.bias = bias_in.view();
  conv.initial_state = state.view();
  conv.silu = test.silu;
  if (packed) conv.cu_seqlens = test.offsets;

  const DeviceTensor x_gradient = out(x), w_gradient = out(weight), b_gradient = out(bias),
                     s_gradient = out(initial);
  const CausalConvGradients gradients{.x = x_gradient.view(),
                                      .weight = w_gradient.view(),
                                      .bias = b_gradient.view(),
                                      .initial_state = s_gradient.view()};
  const support::Allocation workspace(device,
                                      CausalConv1dBackwardWorkspaceBytes(conv, gradients, device));
  CausalConv1dBackward(conv, dy_in.view(), gradients, RunOn(device, workspace));
  // The final state overwrites the initial one, as in decoding.
  CausalConv1d(conv, y_out.view(), state.view(), RunOn(device, workspace));
  support::MemoryOf(device).Synchronize();
  ExpectClose("y", y_out.Values(), y, tolerance);
  ExpectClose("dx", x_gradient.Values(), dx, tolerance);
  // Sums over all tokens, with an allowance for their number.
  const double sum_tolerance = tolerance * std::sqrt(std::max(1.0, std::log(B * T)));
  ExpectClose("dweight", w_gradient.Values(), dw, sum_tolerance);
  ExpectClose("dbias", b_gradient.Values(), db, sum_tolerance);
  if (!initial.given()) return;
  ExpectClose("dinitial", s_gradient.Values(), d_initial, tolerance);
  ExpectClose("final state", state.Values(), final_state, tolerance);
}

// All cases of a layer.
inline void CheckCausalConv(Device device) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32}) {
    const double tolerance = dtype == DType::kFloat64 ? 1e-12 : 2e-6;
    CheckConv(device, {{0, 40}, 10, 4, true, true}, dtype, tolerance);
    CheckConv(device, {{0, 300}, 3, 3, true, false}, dtype, tolerance);
    CheckConv(device, {{0, 1}, 260, 4, true, true}, dtype, tolerance);
    CheckConv(device, {{0, 2, 2, 35, 36}, 5, 4, false, true}, dtype, tolerance);
    CheckConv(device, {{0, 1, 20, 70}, 4, 7, true, true}, dtype, tolerance);
    CheckConv(device, {{0, 9}, 4, 1, true, false}, dtype, tolerance);
  }
  ConvCase many{{0}, 2, 4, true, true};
  for (int n = 0; n < 450; ++n) many.offsets.push_back(many.offsets.back() + n % 4);
  CheckConv(device, many, DType::kFloat64, 1e-12);
}

struct NormCase {
  std::vector<std::int64_t> sizes;
  bool gate, norm_before_gate;
};

inline void CheckNorm(Device device, const NormCase& test, DType dtype, double tolerance) {
  SCOPED_TRACE(::testing::Message() << "D" << test.sizes.back() << " gate" << test.gate << " before"
                                    << test.norm_before_gate);
  std::mt19937_64 random(NextSeed());
  const std::int64_t D = test.sizes.back();
  const double eps = 1e-3;
  const Tensor x = Random(test.sizes, random), d_y = Random(test.sizes, random),
               weight = Random({D}, random),
               gate = test.gate ? Random(test.sizes, random) : Tensor();
  Tensor y(test.sizes), dx(test.sizes), d_gate, dw({D});
  if (test.gate) d_gate = Tensor(test.sizes);
  for (std::size_t row = 0; row < x.data.size(); row += D) {
    const auto u = [&](std::int64_t j) {
      return test.gate && !test.norm_before_gate ? x.data[row + j] * Silu(gate.data[row + j])
                                                 : x.data[row + j];
    };
    const auto after = [&](std::int64_t j) {
      return test.gate && test.norm_before_gate ? Silu(gate.data[row + j]) : 1.0;
    };
    double square = 0, dot = 0;
    for (std::int64_t j = 0; j < D; ++j) square += u(j) * u(j);
    const double r = 1 / std::sqrt(square / D + eps);
    for (std::int64_t j = 0; j < D; ++j) {
      const double dy = d_y.data[row + j];
      y.data[row + j] = u(j) * r * weight.data[j] * after(j);
      dot += dy * after(j) * weight.data[j] * u(j);
      dw.data[j] += dy * after(j) * u(j) * r;
    }
    for (std::int64_t j = 0; j < D; ++j) {
      const double dy = d_y.data[row + j];
      const double du = r * dy * after(j) * weight.data[j] - r * r * r * u(j) * dot / D;
      dx.data[row + j] = du;
      if (!test.gate) continue;
      const double z = gate.data[row + j];
      if (test.norm_before_gate) {
        d_gate.data[row + j] = dy * u(j) * r * weight.data[j] * SiluSlope(z);
      } else {
        dx.data[row + j] = du * Silu(z);
        d_gate.data[row + j] = du * x.data[row + j] * SiluSlope(z);
      }
    }
  }
  for (const Layout layout : {Layout::kContiguous, Layout::kRagged}) {
    const auto in = [&](const Tensor& values) {
      return DeviceTensor(device, dtype, values, layout);
    };
    const auto out = [&](const Tensor& like) {
      return like.given() ? DeviceTensor(device, dtype, like.sizes, layout) : DeviceTensor();
    };
    const DeviceTensor x_in = in(x), dy_in = in(d_y), gate_in = in(gate);
    const DeviceTensor weight_in(device, dtype, weight, Layout::kContiguous);
    const DeviceTensor y_out = out(y), dx_out = out(dx), d_gate_out = out(d_gate);
    const DeviceTensor dw_out(device, dtype, dw.sizes, Layout::kContiguous);
    GatedNorm norm{.x = x_in.view(), .gate = gate_in.view(), .weight = weight_in.view()};
    norm.eps = eps;
    norm.norm_before_gate = test.norm_before_gate;
    const GatedNormGradients gradients{
        .x = dx_out.view(), .gate = d_gate_out.view(), .weight = dw_out.view()};
    const support::Allocation workspace(
        device, GatedRmsNormBackwardWorkspaceBytes(norm, gradients, device));
    GatedRmsNorm(norm, y_out.view(), RunOn(device, workspace));
    GatedRmsNormBackward(norm, dy_in.view(), gradients, RunOn(device, workspace));
    support::MemoryOf(device).Synchronize();
    ExpectClose("y", y_out.Values(), y, tolerance);
    ExpectClose("dx", dx_out.Values(), dx, tolerance);
    ExpectClose("dgate", d_gate_out.Values(), d_gate, tolerance);
    ExpectClose("dweight", dw_out.Values(), dw, tolerance);
  }
}

inline void CheckGatedRmsNorm(Device device) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32}) {
    const double tolerance = dtype == DType::kFloat64 ? 1e-12 : 2e-6;
    CheckNorm(device, {{2, 7, 3, 33}, true, true}, dtype, tolerance);
    CheckNorm(device, {{3, 11, 64}, true, false}, dtype, tolerance);
    CheckNorm(device, {{2, 3, 700}, true, false}, dtype, tolerance);
    CheckNorm(device, {{2, 3, 700}, true, true}, dtype, tolerance);
    CheckNorm(device, {{9, 600}, false, false}, dtype, tolerance);
  }
}

inline void CheckL2Norm(Device device) {
  std::mt19937_64 random(NextSeed());
  for (const std::int64_t D : {16, 600}) {
    const Tensor x = Random({3, 5, D}, random), d_y = Random({3, 5, D}, random);
    Tensor y(x.sizes), dx(x.sizes);
    for (std::size_t row = 0; row < x.data.size(); row += D) {
      double square = 0, dot = 0;
      for (std::int64_t j = 0; j < D; ++j) {
        square += x.data[row + j] * x.data[row + j];
        dot += d_y.data[row + j] * x.data[row + j];
      }
      const double r = 1 / std::sqrt(square + 1e-6);
      for (std::int64_t j = 0; j < D; ++j) {
        y.data[row + j] = x.data[row + j] * r;
        dx.data[row + j] = r * d_y.data[row + j] - r * r * r * x.data[row + j] * dot;
      }
    }
    const DeviceTensor x_in(device, DType::kFloat32, x, Layout::kContiguous);
    const DeviceTensor dy_in(device, DType::kFloat32, d_y, Layout::kContiguous);
    const DeviceTensor y_out(device, DType::kFloat32, y.sizes, Layout::kContiguous);
    const DeviceTensor dx_out(device, DType::kFloat32, dx.sizes, Layout::kContiguous);
    const Context context{.device = device};
    L2Norm(x_in.view(), 1e-6, y_out.view(), context);
    L2NormBackward(x_in.view(), 1e-6, dy_in.view(), dx_out.view(), context);
    support::MemoryOf(device).Synchronize();
    ExpectClose("y", y_out.Values(), y, 2e-6);
    ExpectClose("dx", dx_out.Values(), dx, 2e-6);
  }
}

}  // namespace fenwick::testing
