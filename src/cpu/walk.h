// The walk of the Fenwick partition over chunks of kStateChunk tokens, written once for every
// transition and for both directions of time.
//
// A sequence's chunks have absolute numbers (position / kStateChunk). Before chunk c, slot b holds
// the node of 2^b chunks that bit b of c stands for; queries of chunk c read it through level
// ReadLevel(b). When chunk c ends, its own node and the slots below countr_zero(c + 1) merge into
// that slot (the recurrent form, a level up). With saturation, slots end at `top`, which then
// also absorbs itself.
//
// Aligned groups of 2^s chunks, segments, are the unit of parallelism in time. A whole segment ends
// with one node, so the same walk runs over segments: segment j ends as chunk ((j + 1) << s) - 1
// does. An operator runs
//   1. every segment by itself, from its own chunks alone, to get its node,
//   2. the walk over segments, merging those nodes: what is live where a segment begins,
//   3. every segment again, from what is live at its start, to get outputs.
// What a transition adds is Node (a state and what is needed to carry it across later chunks) and
// how an older node is merged into a newer one.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

#include "fenwick/partition.h"
#include "fenwick/state.h"

namespace fenwick::cpu {

inline constexpr int kMaxSlots = 48;          // positions reach 2^48 (core/validate.h)
inline constexpr int kNoTop = kMaxSlots - 1;  // `top` without saturation
inline constexpr int kChunkLevels = 7;        // levels 0..6 stay inside a chunk

// Slot that everything older is merged into, for a call with `num_levels` levels.
constexpr int WalkTop(bool saturate, int num_levels) {
  return saturate ? std::min(TopSlot(num_levels), kNoTop) : kNoTop;
}

// Level through which the queries of a chunk read slot `slot`.
constexpr int ReadLevel(int slot, int num_levels) {
  return std::min(kChunkLevels + slot, num_levels - 1);
}

// Slot into which the end of chunk `chunk` merges.
constexpr int MergeSlot(std::int64_t chunk, int top) {
  return std::min(std::countr_zero(static_cast<std::uint64_t>(chunk + 1)), top);
}

// The live nodes at one place of the walk. Node: default-constructed is dead; `bool live() const`.
template <class Node>
struct NodeStack {
  std::array<Node, kMaxSlots> slots{};

  // f(slot, node) for each live node, the newest first.
  template <class F>
  void ForEachLive(F&& f) const {
    for (int b = 0; b < kMaxSlots; ++b) {
      if (slots[b].live()) f(b, slots[b]);
    }
  }

  // Ends chunk `chunk`, whose own node is `node`: calls merge(node, older) for each live slot up to
  // MergeSlot, the newest first, and puts the result there. Returns the slot. A node that is not
  // live stands for none: the older ones merge by themselves.
  template <class Merge>
  int Push(std::int64_t chunk, int top, Node node, Merge&& merge) {
    const int target = MergeSlot(chunk, top);
    for (int b = 0; b <= target; ++b) {
      if (!slots[b].live()) continue;
      if (node.live()) {
        merge(node, slots[b]);
      } else {
        node = slots[b];
      }
      slots[b] = Node{};
    }
    slots[target] = node;
    return target;
  }
};

// The adjoint of Push, walking backwards: `gradients` are those of the slots after chunk `chunk`,
// and become those of `before`, the slots before it, as seen at the end of the chunk.
// take(gradient of the target slot) is called once, first: it is the gradient of the chunk's own
// node. copy(from, to) duplicates a gradient into a dead slot, release(slot) frees one.
template <class Node, class Gradient, class Take, class Copy, class Release>
void PopPush(std::int64_t chunk, int top, const NodeStack<Node>& before,
             NodeStack<Gradient>& gradients, Take&& take, Copy&& copy, Release&& release) {
  const int target = MergeSlot(chunk, top);
  take(gradients.slots[target]);
  for (int b = 0; b < target; ++b) {
    if (before.slots[b].live()) copy(gradients.slots[target], gradients.slots[b]);
  }
  if (!before.slots[target].live()) release(gradients.slots[target]);
}

}  // namespace fenwick::cpu
