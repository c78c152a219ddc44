// Checks of every argument of the calls in ops.h. Pure: nothing is written, and on the CPU only
// state positions are read. Each throws Error with a message that names the argument, what was
// expected and what came; after a check passed, a backend need not look at an argument again.
#pragma once

#include "fenwick/ops.h"

namespace fenwick {

// Largest position that a sequence may reach; far beyond memory, and safe from overflow.
inline constexpr std::int64_t kMaxPosition = std::int64_t{1} << 48;

// Inputs of Forward, Backward and their workspace queries, with the initial state if given.
void ValidateInputs(const Inputs& inputs, Device device);

// o or d_o [B, T, H, V]. `written` says that the call writes it, so that its elements must be
// distinct in memory.
void ValidateOutput(const Inputs& inputs, const TensorView& o, const char* name, bool written);

// Final state of Forward (may be not given): shapes, slots for the positions reached, and no
// memory shared with the initial state.
void ValidateFinalState(const Inputs& inputs, const StateView& final_state, Device device);

// Gradient of the final state that Backward reads, and the gradients that it writes.
void ValidateFinalStateGrad(const Inputs& inputs, const StateGradView& d_final_state,
                            Device device);
void ValidateGradients(const Inputs& inputs, const Gradients& gradients);

// All arguments of Step: as for Forward, with the state that is updated in place.
void ValidateStep(const Inputs& inputs, const TensorView& o, Device device);

}  // namespace fenwick
