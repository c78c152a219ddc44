#include "cpu/gated_delta/segments.h"

namespace fenwick::cpu {

DeltaCall::DeltaCall(const Inputs& inputs, const Context& context)
    : inputs(inputs),
      G(inputs.q.size(2)),
      H(inputs.v.size(2)),
      K(inputs.q.size(3)),
      V(inputs.v.size(3)),
      L(static_cast<int>(inputs.level_scales.size(3))),
      top(WalkTop(inputs.level_policy == LevelPolicy::kSaturate, L)),
      num_threads(context.num_threads > 0 ? context.num_threads : GetNumThreads()),
      sequences(MakeSequences(inputs)),
      segments(MakeSegments(sequences, [](std::int64_t) { return kSegmentLog2; })) {}

}  // namespace fenwick::cpu
