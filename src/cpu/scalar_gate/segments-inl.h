// What forward and backward share: sizes of the call, and the nodes that are live where each
// segment begins (passes 1 and 2 of walk.h).

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/thread_pool.h"
#include "cpu/scratch.h"
#include "cpu/segments.h"
#include "cpu/sequence.h"
#include "cpu/walk.h"

#if defined(FENWICK_CPU_SCALAR_GATE_SEGMENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FENWICK_CPU_SCALAR_GATE_SEGMENTS_INL_H_
#undef FENWICK_CPU_SCALAR_GATE_SEGMENTS_INL_H_
#else
#define FENWICK_CPU_SCALAR_GATE_SEGMENTS_INL_H_
#endif

#include "cpu/scalar_gate/chunk-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fenwick::cpu {
namespace HWY_NAMESPACE {

// A run of heads of one group: all of them share q and k.
struct HeadRange {
  int64_t group = 0, begin = 0, end = 0;
};

// Heads in runs of at most `size`.
inline std::vector<HeadRange> MakeHeadRanges(int64_t groups, int64_t heads, int64_t size) {
  std::vector<HeadRange> ranges;
  const int64_t per_group = heads / groups;
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t h = 0; h < per_group; h += size) {
      ranges.push_back(
          {group, group * per_group + h, group * per_group + std::min(per_group, h + size)});
    }
  }
  return ranges;
}

template <typename T>
struct ScalarGateCall {
  using Node = ScalarNode<T>;
  using Stack = NodeStack<Node>;

  ScalarGateCall(const Inputs& in, StateLayout state_layout)
      : inputs(in),
        layout(state_layout),
        groups(in.q.size(2)),
        heads(in.v.size(2)),
        key_size(in.q.size(3)),
        value_size(in.v.size(3)),
        tile_size(layout == StateLayout::kKeyByValue ? TileSize<T>(key_size, value_size)
                                                     : TileSize<T>(value_size, key_size)),
        num_levels(static_cast<int>(in.level_scales.size(3))),
        top(WalkTop(in.level_policy == LevelPolicy::kSaturate, num_levels)),
        sequences(MakeSequences(in)) {}

  const Inputs& inputs;
  const StateLayout layout;
  const int64_t groups, heads, key_size, value_size;  // G, H, K, V
  const int64_t tile_size;                            // of a state
  const int num_levels, top;
  const std::vector<Sequence> sequences;
  std::vector<Segment> segments;

  TokenRows Keys(const Sequence& s, int64_t group) const {
    return TokenRows(inputs.k, inputs.initial_state.k, s, group);
  }
  TokenRows Values(const Sequence& s, int64_t head) const {
    return TokenRows(inputs.v, inputs.initial_state.v, s, head);
  }
  TokenRows Gates(const Sequence& s, int64_t head) const {
    return TokenRows(inputs.g, inputs.initial_state.g, s, head);
  }
  TokenRows Queries(const Sequence& s, int64_t group) const {
    return TokenRows(inputs.q, TensorView(), s, group);
  }
  TokenRows LevelScales(const Sequence& s, int64_t head) const {
    return TokenRows(inputs.level_scales, TensorView(), s, head);
  }
  // Levels that some token of the sequence reads.
  int LevelsRead(const Sequence& s) const { return std::min(num_levels, NumLevels(s.end)); }

  // Slots from this one on belong to the walk over segments, those below to a segment's own.
  int FirstSegmentSlot(const Segment& segment) const { return std::min(segment.log2, top); }

  // Adds the nodes of the initial state with slots in [first_slot, end_slot).
  void AddInitialNodes(const Sequence& s, int64_t head, int first_slot, int end_slot,
                       Stack& stack) const {
    for (int b = first_slot; b < std::min(end_slot, initial_slots); ++b) {
      if (!SlotIsLive(s.first_chunk(), b, top)) continue;
      stack.slots[b] = {.state = initial_nodes.get() +
                                 ((s.index * heads + head) * initial_slots + b) * tile_size};
    }
  }

  // One matrix of a StateView's nodes (or of their gradient) into a tile.
  void LoadState(const std::byte* node, T* tile) const {
    if (layout == StateLayout::kKeyByValue) {
      LoadNode(node, key_size, value_size, tile);
    } else {
      Transpose(key_size, value_size, reinterpret_cast<const T*>(node), value_size, tile,
                TileLd<T>(key_size));
    }
  }

  void StoreState(const T* tile, std::byte* node) const {
    if (layout == StateLayout::kKeyByValue) {
      StoreNode(tile, T{1}, key_size, value_size, node);
    } else {
      Transpose(value_size, key_size, tile, TileLd<T>(key_size), reinterpret_cast<T*>(node),
                value_size);
    }
  }

  // Scaled queries of positions [first, first + n) into a tile [n, K].
  void LoadQueries(const Sequence& s, int64_t group, int64_t first, int64_t n, T* q) const {
    LoadRows(Queries(s, group), first, n, key_size, q, TileLd<T>(key_size));
    if (inputs.scale == 1.0) return;
    T scale[kStateChunk];
    std::fill_n(scale, kStateChunk, static_cast<T>(inputs.scale));
    ScaleRows(n, key_size, scale, q, TileLd<T>(key_size), q, TileLd<T>(key_size));
  }

  // Copies the initial state's nodes into tiles.
  void LoadInitialNodes(int num_threads) {
    const TensorView& nodes = inputs.initial_state.nodes;
    if (!inputs.initial_state.given()) return;
    for (const Sequence& s : sequences) {
      for (int b = 0; b <= top; ++b) {
        if (SlotIsLive(s.first_chunk(), b, top)) initial_slots = std::max(initial_slots, b + 1);
      }
    }
    if (initial_slots == 0) return;
    initial_nodes = hwy::AllocateAligned<T>(sequences.size() * heads * initial_slots * tile_size);
    ParallelFor(sequences.size() * heads, num_threads, [&](int64_t i, int) {
      const Sequence& s = sequences[i / heads];
      for (int b = 0; b < initial_slots; ++b) {
        if (!SlotIsLive(s.first_chunk(), b, top)) continue;
        LoadState(NodeData(nodes, s.index, i % heads, b),
                  initial_nodes.get() + (i * initial_slots + b) * tile_size);
      }
    });
  }

  // Fills `starts` for `segments`. `ranges` cut the heads into tasks; they change no bit.
  void FindStarts(const std::vector<HeadRange>& ranges, int num_threads) {
    starts.assign(segments.size() * heads, Stack{});
    const bool several =
        std::any_of(segments.begin(), segments.end(), [](const Segment& s) { return !s.last; });
    if (several) {
      segment_nodes = hwy::AllocateAligned<T>(segments.size() * heads * tile_size);
      segment_totals.assign(segments.size() * heads, 0);
      ParallelFor(segments.size() * ranges.size(), num_threads, [&](int64_t i, int) {
        const int64_t segment = i / static_cast<int64_t>(ranges.size());
        if (!segments[segment].last) SegmentNode(segment, ranges[i % ranges.size()]);
      });
    }
    ParallelFor(heads * sequences.size(), num_threads,
                [&](int64_t i, int) { WalkSegments(sequences[i / heads], i % heads); });
  }

  // Pass 1: the node of one segment for some heads, its own chunks alone (and in the first segment
  // the initial nodes that lie in it).
  void SegmentNode(int64_t segment_index, const HeadRange& range) {
    const Segment& segment = segments[segment_index];
    const Sequence& sequence = *segment.sequence;
    Scratch scratch;
    T* k = scratch.New<T>(TileSize<T>(kStateChunk, key_size));
    T* v = scratch.New<T>(TileSize<T>(kStateChunk, value_size));
    T* scaled = scratch.New<T>(TileSize<T>(kStateChunk, value_size));
    TilePool<T> pool(scratch, tile_size);
    std::vector<Stack> stacks(range.end - range.begin);
    if (segment.first) {
      for (int64_t h = range.begin; h < range.end; ++h) {
        AddInitialNodes(sequence, h, 0, FirstSegmentSlot(segment), stacks[h - range.begin]);
      }
    }
    int target = 0;
    Gate<T> gate;
    for (int64_t chunk = segment.begin; chunk < segment.end; ++chunk) {
      const int64_t first = chunk * kStateChunk;
      LoadRows(Keys(sequence, range.group), first, kStateChunk, key_size, k, TileLd<T>(key_size));
      for (int64_t h = range.begin; h < range.end; ++h) {
        gate.Load(Gates(sequence, h), first, kStateChunk);
        LoadRows(Values(sequence, h), first, kStateChunk, value_size, v, TileLd<T>(value_size));
        target = PushChunk(chunk, gate, kStateChunk, k, v, scaled, pool, stacks[h - range.begin]);
      }
    }
    for (int64_t h = range.begin; h < range.end; ++h) {
      const Node& node = stacks[h - range.begin].slots[target];
      std::copy_n(node.state, tile_size, SegmentState(segment_index, h));
      segment_totals[segment_index * heads + h] = node.total;
    }
  }

  // Adds a chunk's own node to a walk. k [n, K], v [n, V], scaled [n, V] scratch.
  int PushChunk(int64_t chunk, const Gate<T>& gate, int64_t n, const T* k, const T* v, T* scaled,
                TilePool<T>& pool, Stack& stack) const {
    const Node node{.state = pool.Take(), .total = gate.total, .owned = true};
    ChunkNode(layout, n, key_size, value_size, gate, k, v, scaled, node.state);
    return stack.Push(chunk, top, node, [&](Node& into, Node& older) {
      MergeNode(tile_size, into, older);
      if (older.owned) pool.Give(older.state);
    });
  }

  // Pass 2: the walk over the segments of one sequence and head. Merged nodes take the place of
  // the segments' own.
  void WalkSegments(const Sequence& sequence, int64_t head) {
    Stack stack;
    for (size_t i = 0; i < segments.size(); ++i) {
      const Segment& segment = segments[i];
      if (segment.sequence != &sequence) continue;
      if (segment.first)
        AddInitialNodes(sequence, head, FirstSegmentSlot(segment), kMaxSlots, stack);
      starts[i * heads + head] = stack;
      if (segment.first) {
        AddInitialNodes(sequence, head, 0, FirstSegmentSlot(segment), starts[i * heads + head]);
      }
      if (segment.last) return;
      const Node node{.state = SegmentState(i, head), .total = segment_totals[i * heads + head]};
      stack.Push(segment.end - 1, top, node,
                 [&](Node& into, Node& older) { MergeNode(tile_size, into, older); });
    }
  }

  T* SegmentState(int64_t segment, int64_t head) const {
    return segment_nodes.get() + (segment * heads + head) * tile_size;
  }

  int initial_slots = 0;
  hwy::AlignedFreeUniquePtr<T[]> initial_nodes;  // tiles [N, H, initial_slots]
  hwy::AlignedFreeUniquePtr<T[]> segment_nodes;  // tiles [segments, H]
  std::vector<double> segment_totals;            // [segments, H]
  std::vector<Stack> starts;                     // [segments, H] live nodes before each segment
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fenwick::cpu
HWY_AFTER_NAMESPACE();

#endif  // FENWICK_CPU_SCALAR_GATE_SEGMENTS_INL_H_
