// The state of a sequence: all that later tokens need of the tokens seen so far.
//
// Layout. The tokens of a sequence are grouped in chunks of kStateChunk. A state holds
//   * the newest tokens as they came, in a ring: k, v, g (and beta) of positions
//     [base, position), position p at slot p % kStateRing;
//   * everything older, positions [0, base), as one K x V matrix for each left node of the Fenwick
//     tree over chunks: `nodes[b]` covers 2^b chunks and is live exactly when bit b of
//     base / kStateChunk is set. Its decay (for the delta rule: its transition) runs up to `base`,
//     i.e. nodes[b] is what a reader at position base - 1 would see, before token `base` acts on
//     it.
// An aligned node that does not hold query t is read by t through one level, level(t, s) for any s
// of the node, so the ring may lag behind the tree: at least min(position, kStateChunk) tokens stay
// in the ring, and a sequence can be truncated by up to that many (speculative decoding).
// Tokens are folded into the nodes a chunk at a time, when token p arrives with
// p - base == kStateRing. Bytes grow with log2(position): NumSlots(base) matrices for each head.
//
// The merged past. When the chunk at `base` is folded, the nodes of the slots below the carry
// z = countr_zero(base / kStateChunk + 1) merge with it into slot z, and all tokens beyond that
// chunk read those nodes through one level. A step may keep their sum in slot z, which is dead
// until then. It says so by the largest float as the gate, which is never positive otherwise, in
// the ring slot of position base + kStateRing - 1: the last token before the fold overwrites it.
// Everybody else ignores both, and copies of a state copy both.
//
// Saturation (LevelPolicy::kSaturate with L levels): slots beyond TopSlot(L) are merged into slot
// TopSlot(L), since all of them are read through level L - 1 for ever; the slot is live exactly
// when base / kStateChunk >= 2^TopSlot(L). A state whose merge has begun goes on with that policy
// and L.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "fenwick/tensor_view.h"

namespace fenwick {

inline constexpr int kStateChunk = 64;              // tokens in a leaf of the tree
inline constexpr int kStateRing = 2 * kStateChunk;  // tokens the ring can hold

// Tokens that are folded into nodes once `position` tokens were appended to a state whose base was
// `base` (0 for a new sequence). Canonical: the ring keeps between one and two chunks.
constexpr std::int64_t NextBase(std::int64_t base, std::int64_t position) {
  return std::max(
      base,
      (std::max<std::int64_t>((position + kStateChunk - 1) / kStateChunk, 2) - 2) * kStateChunk);
}

// Node slots needed to hold `base` folded tokens, without saturation.
constexpr int NumSlots(std::int64_t base) {
  return std::bit_width(static_cast<std::uint64_t>(base / kStateChunk));
}

// Node slots with which steps that reach `position` can keep the merged past, which is worth it for
// two nodes or more: just after a power of two one more than NumSlots.
constexpr int NumStepSlots(std::int64_t base, std::int64_t position) {
  const std::int64_t next = NextBase(base, position);
  const bool merging = next / kStateChunk > 2 && position - next > kStateChunk;
  return NumSlots(merging ? next + kStateChunk : next);
}

// Last node slot that saturation with `num_levels` levels uses: a node of slot b is first read
// through level 7 + b, so all nodes with 7 + b >= num_levels - 1 share the last level for ever.
constexpr int TopSlot(int num_levels) { return std::max(0, num_levels - 8); }

// Views of the states of N sequences. All tensors contiguous, on the device of the call.
struct StateView {
  TensorView k;         // [N, kStateRing, G, K] storage type
  TensorView v;         // [N, kStateRing, H, V] storage type
  TensorView g;         // [N, kStateRing, H] float32 (float64 with float64 storage)
  TensorView beta;      // [N, kStateRing, H] type of the call's beta; gated delta rule only
  TensorView nodes;     // [N, H, S, K, V] float32 (float64 with float64 storage); S >= 0 slots
  TensorView position;  // [N] int64: tokens seen
  TensorView base;      // [N] int64: tokens folded into nodes, a multiple of kStateChunk
  // Upper bound of the positions ever reached (truncation does not lower it), known to the host:
  // what capacity and level checks use on a device whose memory the host cannot read. On the CPU
  // the positions themselves are checked.
  std::int64_t max_position = 0;

  bool given() const { return position.given(); }
};

// Gradients with respect to the differentiable parts of a StateView, same shapes and types
// (ring slots that hold no token, and slots that are not live, get zero / are ignored).
struct StateGradView {
  TensorView k, v, g, beta, nodes;
  bool given() const { return nodes.given(); }
};

}  // namespace fenwick
