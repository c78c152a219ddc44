#include "cpu/gated_delta/segments.h"

#include <algorithm>

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
      sequences(MakeSequences(inputs)) {}

std::vector<Segment> DeltaCall::Segments(const Sequence& sequence) const {
  std::vector<Segment> segments;
  for (std::int64_t c = sequence.first_chunk(); c < sequence.end_chunk();) {
    const std::int64_t end =
        std::min(((c >> kSegmentLog2) + 1) << kSegmentLog2, sequence.end_chunk());
    segments.push_back({.begin = c,
                        .end = end,
                        .first = c == sequence.first_chunk(),
                        .last = end == sequence.end_chunk()});
    c = end;
  }
  return segments;
}

}  // namespace fenwick::cpu
