// A segment's part in the walk over segments (segments.h), shared by forward and backward.

#include <algorithm>
#include <cstdint>

#include "cpu/gated_delta/segments.h"
#include "cpu/scratch.h"
#include "cpu/tile_layout.h"
#include "cpu/tile_pool.h"
#include "cpu/walk.h"

#if defined(FENWICK_CPU_GATED_DELTA_SEGMENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FENWICK_CPU_GATED_DELTA_SEGMENT_INL_H_
#undef FENWICK_CPU_GATED_DELTA_SEGMENT_INL_H_
#else
#define FENWICK_CPU_GATED_DELTA_SEGMENT_INL_H_
#endif

#include "cpu/rows-inl.h"
#include "cpu/tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fenwick::cpu {
namespace HWY_NAMESPACE {

// A node's state, or the gradient of one.
template <typename T>
struct StateNode {
  T* state = nullptr;  // [K, V], ld_v
  bool live() const { return state != nullptr; }
};

// Memory handed out front to back; without memory it only counts.
template <typename T>
class TileArena {
 public:
  explicit TileArena(T* memory) : memory_(memory) {}
  T* Take(bool needed, int64_t size) {
    if (!needed) return nullptr;
    used_ += size;
    return memory_ == nullptr ? nullptr : memory_ + used_ - size;
  }
  int64_t used() const { return used_; }

 private:
  T* memory_;
  int64_t used_ = 0;
};

// One segment of one head. Tiles are null where nothing needs them.
template <typename T>
struct SegmentBase {
  Segment segment;
  int64_t head = 0;
  bool has_incoming = false;

  NodeStack<StateNode<T>> incoming;  // as they are where the segment begins
  T* transition = nullptr;  // [K, K] P of the whole segment, ld_k; if incoming and not last
  T* node = nullptr;        // [K, V] the segment's own node, ld_v; if not last

  void LayoutBase(const DeltaCall& call, TileArena<T>& arena) {
    has_incoming = call.NumIncoming(segment) > 0;
    transition = arena.Take(has_incoming && !segment.last, TileSize<T>(call.K, call.K));
    node = arena.Take(!segment.last, TileSize<T>(call.K, call.V));
    call.ForEachIncoming(segment, [&](int slot) {
      incoming.slots[slot].state = arena.Take(true, TileSize<T>(call.K, call.V));
    });
  }

  const Sequence& sequence() const { return *segment.sequence; }

  bool holds_final_base() const {
    const int64_t chunk = sequence().final_base() / kStateChunk;
    return segment.begin <= chunk && chunk < segment.end;
  }

  // Slot of the next segment's start into which this segment's node goes.
  int target(int top) const { return MergeSlot(segment.end - 1, top); }
};

template <typename T>
void LoadInitialNode(const DeltaCall& call, const SegmentBase<T>& work, int slot, T* state) {
  LoadNode(NodeData(call.inputs.initial_state.nodes, work.sequence().index, work.head, slot),
           call.K, call.V, state);
}

// Incoming nodes of `next`, the segment after `work`: columns [column, column + columns) of V.
template <typename T>
void WalkOn(const DeltaCall& call, const SegmentBase<T>& work, const NodeStack<StateNode<T>>& next,
            int64_t column, int64_t columns) {
  const int64_t K = call.K, ld_k = TileLd<T>(K), ld_v = TileLd<T>(call.V);
  const int target = work.target(call.top);
  T* merged = next.slots[target].state + column;
  for (int64_t i = 0; i < K; ++i) {
    std::copy_n(work.node + column + i * ld_v, columns, merged + i * ld_v);
  }
  work.incoming.ForEachLive([&](int slot, const StateNode<T>& node) {
    const bool merges = slot <= target;
    T* to = merges ? merged : next.slots[slot].state + column;
    MatMul<Op::kNone>(K, columns, K, work.transition, ld_k, node.state + column, ld_v, to, ld_v,
                      Epilogue<T>{.beta = merges ? T{1} : T{0}});
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fenwick::cpu
HWY_AFTER_NAMESPACE();

#endif  // FENWICK_CPU_GATED_DELTA_SEGMENT_INL_H_
