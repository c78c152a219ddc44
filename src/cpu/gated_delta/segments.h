// How a call of the gated delta rule is cut into tasks: lines (one head of one sequence) and, along
// a line, segments of 2^kSegmentLog2 chunks.
//
// Inside a segment two kinds of states are carried from chunk to chunk:
//   local     nodes that began inside the segment (and, where a call goes on from a state in the
//             middle of a segment, the nodes of slots below kSegmentLog2 that it brought);
//   incoming  older nodes. They are not carried one by one: P, the product of the transitions since
//             the segment's start, is (K x K, the same for all), and an incoming S is read as
//             (Q~ P) S with S as it was at the segment's start.
// So a chunk costs three products for each local node, three (K wide) for P and one for each
// incoming node, and segments need of each other only the incoming states, which a short walk over
// segments provides: S at the next start is P S at this one.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/segments.h"
#include "cpu/sequence.h"
#include "cpu/walk.h"
#include "fenwick/ops.h"

namespace fenwick::cpu {

// log2 of the chunks in a segment. Longer: more local nodes are carried chunk by chunk, which costs
// three times a read. Shorter: the walk over segments, K x K x V for each live node, is longer.
inline constexpr int kSegmentLog2 = 4;
inline constexpr std::int64_t kSegmentChunks = std::int64_t{1} << kSegmentLog2;
inline constexpr std::int64_t kSegmentTokens = kSegmentChunks * kStateChunk;

// Columns of V that a task of the walk over segments takes.
inline constexpr std::int64_t kWalkColumns = 32;

// What every task needs to know of a call.
struct DeltaCall {
  DeltaCall(const Inputs& inputs, const Context& context);

  const Inputs& inputs;
  std::int64_t G, H, K, V;
  int L;
  int top;  // WalkTop
  int num_threads;
  std::vector<Sequence> sequences;
  std::vector<Segment> segments;  // of all sequences, in order

  std::int64_t group(std::int64_t head) const { return head / (H / G); }

  bool IsLocal(const Segment& segment, int slot) const {
    return segment.first && slot < kSegmentLog2;
  }

  // f(slot) for each incoming node of a segment, the newest first.
  template <class F>
  void ForEachIncoming(const Segment& segment, F&& f) const {
    for (int b = 0; b <= top && segment.begin >> b != 0; ++b) {
      if (SlotIsLive(segment.begin, b, top) && !IsLocal(segment, b)) f(b);
    }
  }
  // f(slot) for the local nodes that are live where the segment begins: those of an initial state.
  template <class F>
  void ForEachInitialLocal(const Segment& segment, F&& f) const {
    for (int b = 0; b <= top && segment.begin >> b != 0; ++b) {
      if (SlotIsLive(segment.begin, b, top) && IsLocal(segment, b)) f(b);
    }
  }
  int NumIncoming(const Segment& segment) const {
    int count = 0;
    ForEachIncoming(segment, [&](int) { ++count; });
    return count;
  }
};

}  // namespace fenwick::cpu
