// What a backend provides. ops.cc validates, then calls through this table; a backend never sees a
// bad argument and never validates again.
#pragma once

#include <cstddef>

#include "fenwick/ops.h"

namespace fenwick {

struct Backend {
  void (*forward)(const Inputs&, const TensorView& o, const StateView& final_state, const Context&);
  void (*backward)(const Inputs&, const TensorView& d_o, const StateGradView& d_final_state,
                   const Gradients&, const Context&);
  void (*step)(const Inputs&, const TensorView& o, const Context&);
  std::size_t (*forward_workspace_bytes)(const Inputs&, const StateView& final_state);
  std::size_t (*backward_workspace_bytes)(const Inputs&, const StateGradView& d_final_state,
                                          const Gradients&);
};

const Backend& CpuBackend();
// Null where the build has no CUDA kernels or the machine no usable GPU.
const Backend* CudaBackend();

}  // namespace fenwick
