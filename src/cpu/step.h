// The recurrent step of both operators on the CPU.
#pragma once

#include "fenwick/ops.h"

namespace fenwick::cpu {

void Step(const Inputs& inputs, const TensorView& o, const Context& context);

}  // namespace fenwick::cpu
