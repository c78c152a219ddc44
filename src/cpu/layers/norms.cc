// Gated RMSNorm and L2 norm (fenwick/layers.h): one row at a time, vectorised along it. Both are
//   u = x or x * silu(gate),   n = u / sqrt(c * sum(u^2) + eps),   y = n * weight [* silu(gate)]
// with c = 1/D (RMSNorm) or 1 (L2), and with r the reciprocal root
//   dn = dy * weight [* silu(gate)],   du = r * (dn - n * c * sum(dn * n))
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "core/thread_pool.h"
#include "cpu/highway_targets.h"
#include "cpu/layers/cpu_layers.h"
#include "cpu/scratch.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/layers/norms.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "cpu/layers/silu-inl.h"
#include "cpu/rows-inl.h"
// clang-format on

#ifndef FENWICK_CPU_LAYERS_NORMS_ONCE
#define FENWICK_CPU_LAYERS_NORMS_ONCE
namespace fenwick::cpu {

// Rows of a task. The partial sums of the weight's gradient, one row a task, take 1/64 of x.
inline constexpr std::int64_t kNormRows = 64;

// Both norms; gate and weight may be not given.
struct Norm {
  TensorView x = {}, gate = {}, weight = {};
  double eps = 0;
  double square_scale = 1;  // c
  bool norm_before_gate = false;

  std::int64_t columns() const { return x.size(x.rank - 1); }
  std::int64_t rows() const { return columns() > 0 ? x.num_elements() / columns() : 0; }
  std::int64_t blocks() const { return (rows() + kNormRows - 1) / kNormRows; }
};

// Row `row` of a view [..., D], the leading axes counted as one.
inline std::byte* NormRow(const TensorView& view, std::int64_t row) {
  std::int64_t offset = 0;
  for (int axis = view.rank - 2; axis >= 0; --axis) {
    offset += row % view.size(axis) * view.stride(axis);
    row /= view.size(axis);
  }
  return At(view, offset);
}

}  // namespace fenwick::cpu
#endif  // FENWICK_CPU_LAYERS_NORMS_ONCE

HWY_BEFORE_NAMESPACE();
namespace fenwick::cpu {
namespace HWY_NAMESPACE {

template <typename T>
std::vector<T> LoadWeight(const Norm& norm) {
  std::vector<T> weight(PaddedColumns<T>(norm.columns()), static_cast<T>(1));
  if (norm.weight.given()) {
    LoadRow(norm.weight.dtype, At(norm.weight, 0), norm.columns(), weight.data());
  }
  return weight;
}

// sum(a * b); the padding holds zeros.
template <typename T>
T DotRow(const T* a, const T* b, int64_t columns) {
  const hn::ScalableTag<T> d;
  auto sum = hn::Zero(d);
  for (int64_t j = 0; j < columns; j += static_cast<int64_t>(hn::Lanes(d))) {
    sum = hn::MulAdd(hn::LoadU(d, a + j), hn::LoadU(d, b + j), sum);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// One row's buffers, all [PaddedColumns].
template <typename T>
struct NormRowData {
  NormRowData(const Norm& norm, Scratch& scratch)
      : norm(norm), columns(norm.columns()), has_gate(norm.gate.given()) {
    const int64_t ld = PaddedColumns<T>(columns);
    x = scratch.New<T>(ld);
    gate = scratch.New<T>(ld);
    sigmoid = scratch.New<T>(ld);
    u = scratch.New<T>(ld);
  }

  // Loads a row and computes u and, of the gate, the sigmoid. Returns r.
  T Load(int64_t row) {
    const hn::ScalableTag<T> d;
    LoadRow(norm.x.dtype, NormRow(norm.x, row), columns, x);
    if (has_gate) LoadRow(norm.gate.dtype, NormRow(norm.gate, row), columns, gate);
    for (int64_t j = 0; j < columns; j += static_cast<int64_t>(hn::Lanes(d))) {
      auto value = hn::LoadU(d, x + j);
      if (has_gate) {
        const auto g = hn::LoadU(d, gate + j);
        const auto s = Sigmoid(d, g);
        hn::StoreU(s, d, sigmoid + j);
        if (!norm.norm_before_gate) value = hn::Mul(value, hn::Mul(g, s));
      }
      hn::StoreU(value, d, u + j);
    }
    const T square = DotRow(u, u, columns);
    return static_cast<T>(1) /
           std::sqrt(square * static_cast<T>(norm.square_scale) + static_cast<T>(norm.eps));
  }

  // silu(gate) where it multiplies after the norm, else 1.
  template <class D>
  HWY_INLINE hn::Vec<D> GateAfter(D d, int64_t j) const {
    if (!has_gate || !norm.norm_before_gate) return hn::Set(d, 1);
    return hn::Mul(hn::LoadU(d, gate + j), hn::LoadU(d, sigmoid + j));
  }

  const Norm& norm;
  int64_t columns;
  bool has_gate;
  T *x, *gate, *sigmoid, *u;
};

template <typename T>
void Forward(const Norm& norm, const TensorView& y, int num_threads) {
  const std::vector<T> weight = LoadWeight<T>(norm);
  ParallelFor(norm.blocks(), num_threads, [&](int64_t block, int) HWY_ATTR {
    const hn::ScalableTag<T> d;
    Scratch scratch;
    NormRowData<T> row(norm, scratch);
    T* out = scratch.New<T>(PaddedColumns<T>(row.columns));
    const int64_t end = std::min(norm.rows(), (block + 1) * kNormRows);
    for (int64_t i = block * kNormRows; i < end; ++i) {
      const auto r = hn::Set(d, row.Load(i));
      for (int64_t j = 0; j < row.columns; j += static_cast<int64_t>(hn::Lanes(d))) {
        const auto n = hn::Mul(hn::LoadU(d, row.u + j), r);
        const auto w = hn::LoadU(d, weight.data() + j);
        hn::StoreU(hn::Mul(hn::Mul(n, w), row.GateAfter(d, j)), d, out + j);
      }
      StoreRow(y.dtype, out, row.columns, NormRow(y, i));
    }
  });
}

void NormForward(const Norm& norm, const TensorView& y, int num_threads) {
  if (norm.x.dtype == DType::kFloat64) {
    Forward<double>(norm, y, num_threads);
  } else {
    Forward<float>(norm, y, num_threads);
  }
}

// Rows [block * kNormRows, ...); d_weight [PaddedColumns] receives their sum.
template <typename T>
void BackwardBlock(const Norm& norm, const std::vector<T>& weight, int64_t block,
                   const TensorView& d_y, const GatedNormGradients& gradients, T* d_weight) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  Scratch scratch;
  NormRowData<T> row(norm, scratch);
  const int64_t columns = row.columns, ld = PaddedColumns<T>(columns);
  T* dy = scratch.New<T>(ld);
  T* dn = scratch.New<T>(ld);
  std::memset(d_weight, 0, ld * sizeof(T));
  const int64_t end = std::min(norm.rows(), (block + 1) * kNormRows);
  for (int64_t i = block * kNormRows; i < end; ++i) {
    const T scale = row.Load(i);
    const auto r = hn::Set(d, scale);
    LoadRow(d_y.dtype, NormRow(d_y, i), columns, dy);
    for (int64_t j = 0; j < columns; j += lanes) {
      const auto n = hn::Mul(hn::LoadU(d, row.u + j), r);
      const auto gated = hn::Mul(hn::LoadU(d, dy + j), row.GateAfter(d, j));
      hn::StoreU(hn::MulAdd(gated, n, hn::LoadU(d, d_weight + j)), d, d_weight + j);
      hn::StoreU(hn::Mul(gated, hn::LoadU(d, weight.data() + j)), d, dn + j);
    }
    // c * sum(dn * n), n = u * r.
    const T dot = DotRow(dn, row.u, columns) * scale * static_cast<T>(norm.square_scale);
    for (int64_t j = 0; j < columns; j += lanes) {
      const auto n = hn::Mul(hn::LoadU(d, row.u + j), r);
      auto dx = hn::Mul(r, hn::NegMulAdd(n, hn::Set(d, dot), hn::LoadU(d, dn + j)));
      if (row.has_gate) {
        const auto g = hn::LoadU(d, row.gate + j), s = hn::LoadU(d, row.sigmoid + j);
        const auto inner = norm.norm_before_gate ? hn::Mul(hn::Mul(hn::LoadU(d, dy + j), n),
                                                           hn::LoadU(d, weight.data() + j))
                                                 : hn::Mul(dx, hn::LoadU(d, row.x + j));
        if (!norm.norm_before_gate) dx = hn::Mul(dx, hn::Mul(g, s));
        hn::StoreU(hn::Mul(inner, SiluSlope(d, g, s)), d, row.gate + j);
      }
      hn::StoreU(dx, d, row.x + j);
    }
    if (gradients.x.given()) StoreRow(gradients.x.dtype, row.x, columns, NormRow(gradients.x, i));
    if (gradients.gate.given()) {
      StoreRow(gradients.gate.dtype, row.gate, columns, NormRow(gradients.gate, i));
    }
  }
}

template <typename T>
void Backward(const Norm& norm, const TensorView& d_y, const GatedNormGradients& gradients,
              int num_threads) {
  const std::vector<T> weight = LoadWeight<T>(norm);
  const int64_t blocks = norm.blocks(), columns = norm.columns(), ld = PaddedColumns<T>(columns);
  const std::unique_ptr<T[]> sums(new T[blocks * ld]);
  ParallelFor(blocks, num_threads, [&](int64_t block, int) {
    BackwardBlock(norm, weight, block, d_y, gradients, sums.get() + block * ld);
  });
  if (!gradients.weight.given()) return;
  std::vector<double> total(columns, 0.0);
  for (int64_t block = 0; block < blocks; ++block) {
    const T* row = sums.get() + block * ld;
    for (int64_t j = 0; j < columns; ++j) total[j] += row[j];
  }
  std::vector<T> out(ld);
  for (int64_t j = 0; j < columns; ++j) out[j] = static_cast<T>(total[j]);
  StoreRow(gradients.weight.dtype, out.data(), columns, At(gradients.weight, 0));
}

void NormBackward(const Norm& norm, const TensorView& d_y, const GatedNormGradients& gradients,
                  int num_threads) {
  if (norm.x.dtype == DType::kFloat64) {
    Backward<double>(norm, d_y, gradients, num_threads);
  } else {
    Backward<float>(norm, d_y, gradients, num_threads);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fenwick::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fenwick::cpu {
namespace {

HWY_EXPORT(NormForward);
HWY_EXPORT(NormBackward);

Norm FromGated(const GatedNorm& inputs) {
  return {.x = inputs.x,
          .gate = inputs.gate,
          .weight = inputs.weight,
          .eps = inputs.eps,
          .square_scale = 1.0 / static_cast<double>(inputs.x.size(inputs.x.rank - 1)),
          .norm_before_gate = inputs.norm_before_gate};
}

}  // namespace

void GatedRmsNorm(const GatedNorm& inputs, const TensorView& y, const Context& context) {
  HWY_DYNAMIC_DISPATCH(NormForward)(FromGated(inputs), y, NumThreads(context));
}

void GatedRmsNormBackward(const GatedNorm& inputs, const TensorView& d_y,
                          const GatedNormGradients& gradients, const Context& context) {
  HWY_DYNAMIC_DISPATCH(NormBackward)(FromGated(inputs), d_y, gradients, NumThreads(context));
}

void L2Norm(const TensorView& x, double eps, const TensorView& y, const Context& context) {
  HWY_DYNAMIC_DISPATCH(NormForward)(Norm{.x = x, .eps = eps}, y, NumThreads(context));
}

void L2NormBackward(const TensorView& x, double eps, const TensorView& d_y, const TensorView& d_x,
                    const Context& context) {
  HWY_DYNAMIC_DISPATCH(NormBackward)
  (Norm{.x = x, .eps = eps}, d_y, GatedNormGradients{.x = d_x}, NumThreads(context));
}

}  // namespace fenwick::cpu
#endif  // HWY_ONCE
