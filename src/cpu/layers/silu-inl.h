// The logistic function on vectors; silu(x) = x * sigmoid(x).

#if defined(FENWICK_CPU_LAYERS_SILU_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FENWICK_CPU_LAYERS_SILU_INL_H_
#undef FENWICK_CPU_LAYERS_SILU_INL_H_
#else
#define FENWICK_CPU_LAYERS_SILU_INL_H_
#endif

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fenwick::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// 1 / (1 + exp(-x)), by the exponential of a non-positive number, which cannot overflow.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Sigmoid(D d, V x) {
  const V one = hn::Set(d, 1);
  const V e = hn::Exp(d, hn::Neg(hn::Abs(x)));
  return hn::Div(hn::IfThenElse(hn::Lt(x, hn::Zero(d)), e, one), hn::Add(one, e));
}

// Derivative of silu at x, where s = sigmoid(x).
template <class D, class V = hn::Vec<D>>
HWY_INLINE V SiluSlope(D d, V x, V s) {
  const V one = hn::Set(d, 1);
  return hn::Mul(s, hn::MulAdd(x, hn::Sub(one, s), one));
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fenwick::cpu
HWY_AFTER_NAMESPACE();

#endif  // FENWICK_CPU_LAYERS_SILU_INL_H_
