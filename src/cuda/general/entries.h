// What general.cc calls: one function for each operator, direction and arithmetic.
#pragma once

#include <cstddef>

#include "fenwick/ops.h"

namespace fenwick::cuda::general {

// Arithmetic of a call; tile.cuh defines them.
template <typename T>
struct FmaMath;     // multiply-adds in T
struct TensorMath;  // tensor cores: tf32 products, float32 sums

template <typename Math>
std::size_t ScalarForwardBytes(const Inputs& inputs);
template <typename Math>
void ScalarForward(const Inputs& inputs, const TensorView& o, const StateView& final_state,
                   const Context& context);

template <typename Math>
std::size_t ScalarBackwardBytes(const Inputs& inputs);
template <typename Math>
void ScalarBackward(const Inputs& inputs, const TensorView& d_o, const StateGradView& d_final_state,
                    const Gradients& gradients, const Context& context);

template <typename Math>
std::size_t DeltaForwardBytes(const Inputs& inputs, const StateView& final_state);
template <typename Math>
void DeltaForward(const Inputs& inputs, const TensorView& o, const StateView& final_state,
                  const Context& context);

template <typename Math>
std::size_t DeltaBackwardBytes(const Inputs& inputs, const StateGradView& d_final_state);
template <typename Math>
void DeltaBackward(const Inputs& inputs, const TensorView& d_o, const StateGradView& d_final_state,
                   const Gradients& gradients, const Context& context);

template <typename T>
void DeltaStep(const Inputs& inputs, const TensorView& o, const Context& context);

template <typename T>
void ScalarStep(const Inputs& inputs, const TensorView& o, const Context& context);

}  // namespace fenwick::cuda::general
