// The operators in float64, naive and short: what every kernel is compared with. Nothing
// is shared with the fast code but the partition and the layout of a state (state.h).
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "fenwick/ops.h"

namespace fenwick::reference {

// A dense row-major tensor; no sizes: not given.
struct Tensor {
  std::vector<std::int64_t> sizes;
  std::vector<double> data;

  Tensor() = default;
  explicit Tensor(std::vector<std::int64_t> sizes);  // zeros

  bool given() const { return !sizes.empty(); }
  std::int64_t size(int axis) const { return sizes[axis]; }
  template <typename... Index>
  double& operator()(Index... index) {
    return data[Offset({static_cast<std::int64_t>(index)...})];
  }
  template <typename... Index>
  double operator()(Index... index) const {
    return data[Offset({static_cast<std::int64_t>(index)...})];
  }

 private:
  std::int64_t Offset(std::initializer_list<std::int64_t> index) const {
    std::int64_t offset = 0;
    for (int i = 0; const std::int64_t at : index) offset = offset * sizes[i++] + at;
    return offset;
  }
};

// States of N sequences in the layout of state.h, or the gradient of one. Ring slots without a
// token and slots that are not live are zero.
struct State {
  Tensor k;                                  // [N, kStateRing, G, K]
  Tensor v;                                  // [N, kStateRing, H, V]
  Tensor g;                                  // [N, kStateRing, H]
  Tensor beta;                               // [N, kStateRing, H]; gated delta rule only
  Tensor nodes;                              // [N, H, S, K, V]
  std::vector<std::int64_t> position, base;  // [N]; of a gradient: empty

  bool given() const { return nodes.given(); }
};

struct Arguments {
  Transition transition = Transition::kScalarGate;
  Tensor q, k;                           // [B, T, G, K]
  Tensor v;                              // [B, T, H, V]
  Tensor g;                              // [B, T, H]
  Tensor beta;                           // [B, T, H]; gated delta rule only
  Tensor level_scales;                   // [B, T, H, L]
  std::vector<std::int64_t> cu_seqlens;  // empty: B sequences of T tokens
  double scale = 1.0;
  bool saturate = false;
  State initial_state;

  std::int64_t num_sequences() const {
    return cu_seqlens.empty() ? q.size(0) : static_cast<std::int64_t>(cu_seqlens.size()) - 1;
  }
};

struct Result {
  Tensor o;  // [B, T, H, V]
  State final_state;
};

// Gradients of the arguments; initial_state only where there is one.
struct Gradients {
  Tensor q, k, v, g, beta, level_scales;
  State initial_state;
};

// The recurrent form: one K x V state per level, merged, decayed or transformed, and written token
// by token.
Result Forward(const Arguments& arguments);

// The parallel form of operator 1; no initial state.
Tensor ParallelForward(const Arguments& arguments);

// Reverse-mode derivative of the recurrent form: gradients of sum(d_o o) + sum(d_final_state
// final_state). d_final_state may be not given.
Gradients Backward(const Arguments& arguments, const Tensor& d_o,
                   const State& d_final_state = State());

}  // namespace fenwick::reference
