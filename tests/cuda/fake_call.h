// A call of the scalar gate on memory that is never touched: for questions to plans.
#pragma once

#include <cstdint>
#include <vector>

#include "fenwick/ops.h"
#include "fenwick/partition.h"

namespace fenwick::testing {

struct FakeCall {
  std::vector<std::int64_t> cu_seqlens;
  Inputs inputs;
  Gradients gradients;

  FakeCall(std::int64_t B, std::int64_t T, std::int64_t G, std::int64_t H, std::int64_t K,
           std::int64_t V, DType dtype = DType::kBFloat16) {
    const auto address = reinterpret_cast<void*>(std::uintptr_t{1} << 20);
    inputs.q = TensorView(address, dtype, {B, T, G, K});
    inputs.k = inputs.q;
    inputs.v = TensorView(address, dtype, {B, T, H, V});
    inputs.g = TensorView(address, DType::kFloat32, {B, T, H});
    inputs.level_scales = TensorView(address, dtype, {B, T, H, NumLevels(T)});
    gradients.q = inputs.q;
    gradients.k = inputs.k;
    gradients.v = inputs.v;
    gradients.g = inputs.g;
    gradients.level_scales = inputs.level_scales;
  }

  // One to ask the forward for.
  StateView FinalState() const {
    const std::int64_t N = inputs.num_sequences(), T = inputs.q.size(1);
    StateView state;
    state.position = TensorView(inputs.q.data, DType::kInt64, {N});
    state.nodes = TensorView(
        inputs.q.data, DType::kFloat32,
        {N, inputs.v.size(2), NumSlots(NextBase(0, T)), inputs.q.size(3), inputs.v.size(3)});
    return state;
  }
};

}  // namespace fenwick::testing
