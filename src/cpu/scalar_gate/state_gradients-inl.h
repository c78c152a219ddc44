// Gradients of the carried states where segments meet: the adjoint of pass 2 of walk.h.
//
// The adjoint of a Fenwick read is a Fenwick write: a chunk adds sum_r lambda decay dO[r] q[r]^T to
// the gradient of every slot that it reads, and a merge hands the gradient of the target to all
// that was merged. Per segment j and slot b that is live at its start, with A_j the log decay
// across it,
//   G_b(start of j) = exp(A_j) G_b'(end of j) + reads of the slot inside j
// where b' is the slot that b has become. The reads are summed for all segments in parallel, then
// one walk back in time per head adds them up. It also gives
//   through_j = sum_b <S_b(start of j), exp(A_j) G_b'(end of j)>,
// the flow from before a segment to after it, which anchors dg (chunk_backward-inl.h).

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#if defined(FENWICK_CPU_SCALAR_GATE_STATE_GRADIENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FENWICK_CPU_SCALAR_GATE_STATE_GRADIENTS_INL_H_
#undef FENWICK_CPU_SCALAR_GATE_STATE_GRADIENTS_INL_H_
#else
#define FENWICK_CPU_SCALAR_GATE_STATE_GRADIENTS_INL_H_
#endif

#include "cpu/scalar_gate/segments-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fenwick::cpu {
namespace HWY_NAMESPACE {

// Gradient of a node as seen at some place of the walk: a tile [V, K].
template <typename T>
struct NodeGradient {
  T* tile = nullptr;
  bool owned = false;  // by the pool of the walk that made it
  bool live() const { return tile != nullptr; }
};

// Tensors of a backward call beside the inputs.
struct BackwardTensors {
  const TensorView& d_o;
  const StateGradView& d_final_state;
  const Gradients& gradients;
};

template <typename T>
class StateGradients {
 public:
  using Stack = NodeStack<ScalarNode<T>>;
  using GradientStack = NodeStack<NodeGradient<T>>;

  StateGradients(const ScalarGateCall<T>& call, const BackwardTensors& tensors)
      : call_(call),
        tensors_(tensors),
        node_gradients_(call.segments.size() * call.heads),
        through_(call.segments.size() * call.heads) {}

  // First segment of the wave that ends before segment `end`: as many as the memory is meant for.
  int64_t WaveBegin(int64_t end) const {
    int64_t tiles = 0;
    int64_t begin = end;
    while (begin > 0) {
      tiles += TilesOf(begin - 1);
      if (begin < end && tiles * call_.tile_size * static_cast<int64_t>(sizeof(T)) > kWaveBytes) {
        break;
      }
      --begin;
    }
    return begin;
  }

  // Handles segments [begin, end); waves must come in order, the last one first.
  void RunWave(int64_t begin, int64_t end, const std::vector<HeadRange>& ranges, int num_threads) {
    begin_ = begin;
    offsets_.assign(1, 0);
    for (int64_t i = begin; i < end; ++i) offsets_.push_back(offsets_.back() + TilesOf(i));
    kept_ = std::move(tiles_);  // carried_ points into it
    tiles_ = hwy::AllocateAligned<T>(std::max<int64_t>(1, offsets_.back() * call_.tile_size));
    ParallelFor((end - begin) * ranges.size(), num_threads, [&](int64_t i, int) {
      Reads(begin + i / static_cast<int64_t>(ranges.size()), ranges[i % ranges.size()]);
    });
    struct Run {
      int64_t begin, end;
    };
    std::vector<Run> runs;  // of one sequence each
    for (int64_t i = begin; i < end; ++i) {
      if (i == begin || call_.segments[i].first) runs.push_back({i, i});
      runs.back().end = i + 1;
    }
    // Only the newest run continues one of an earlier wave, only the oldest is continued.
    std::vector<GradientStack> carried(call_.heads);
    ParallelFor(runs.size() * call_.heads, num_threads, [&](int64_t i, int) {
      const Run& run = runs[i / call_.heads];
      const int64_t head = i % call_.heads;
      GradientStack stack;
      if (!call_.segments[run.end - 1].last) stack = carried_[head];
      for (int64_t j = run.end - 1; j >= run.begin; --j) WalkBack(j, head, stack);
      if (!call_.segments[run.begin].first) carried[head] = stack;
    });
    carried_ = std::move(carried);
  }

  // Gradient of the segment's own node at its end (null: none), and the flow through it.
  T* NodeGradientOf(int64_t segment, int64_t head) const {
    return node_gradients_[segment * call_.heads + head];
  }
  double Through(int64_t segment, int64_t head) const {
    return through_[segment * call_.heads + head];
  }

 private:
  // Memory for the gradients of one wave (two are held): waves are few, and it stays small beside
  // the tensors of calls that need several.
  static constexpr int64_t kWaveBytes = int64_t{128} << 20;

  // Slots of the walk over segments that are live before segment i; the same for every head.
  int64_t LiveSlots(int64_t i) const {
    int64_t count = 0;
    call_.starts[i * call_.heads].ForEachLive(
        [&](int b, const auto&) { count += b >= call_.FirstSegmentSlot(call_.segments[i]); });
    return count;
  }
  int64_t TilesOf(int64_t i) const { return LiveSlots(i) * call_.heads; }
  T* TileOf(int64_t segment, int64_t head, int64_t index) const {
    return tiles_.get() +
           (offsets_[segment - begin_] + head * LiveSlots(segment) + index) * call_.tile_size;
  }

  // The reads inside one segment of the slots live at its start, for some heads.
  void Reads(int64_t index, const HeadRange& range) const {
    const Segment& segment = call_.segments[index];
    const Sequence& sequence = *segment.sequence;
    const int64_t slots = LiveSlots(index);
    if (slots == 0) return;
    const int first_slot = call_.FirstSegmentSlot(segment);
    const int64_t ld_k = TileLd<T>(call_.key_size), ld_v = TileLd<T>(call_.value_size);
    const int levels = call_.LevelsRead(sequence);
    const int64_t ld_lambda = TileLd<T>(levels);
    Scratch scratch;
    T* q = scratch.New<T>(kStateChunk * ld_k);
    T* d_o = scratch.New<T>(kStateChunk * ld_v);
    T* scaled = scratch.New<T>(kStateChunk * ld_v);
    T* lambda = scratch.New<T>(kStateChunk * ld_lambda);
    T* final_node = scratch.New<T>(call_.tile_size);
    std::vector<double> gap(range.end - range.begin, 0.0);  // from the segment's begin
    for (int64_t h = range.begin; h < range.end; ++h) {
      std::fill_n(TileOf(index, h, 0), slots * call_.tile_size, T{0});
    }
    Gate<T> gate;
    for (int64_t chunk = segment.begin; chunk < segment.end; ++chunk) {
      const int64_t first = chunk * kStateChunk;
      const int64_t n = std::min<int64_t>(kStateChunk, sequence.end - first);
      const bool queries = first + n > sequence.begin;
      if (queries) call_.LoadQueries(sequence, range.group, first, n, q);
      for (int64_t h = range.begin; h < range.end; ++h) {
        double& head_gap = gap[h - range.begin];
        gate.Load(call_.Gates(sequence, h), first, n);
        if (queries) {
          LoadRows(TokenRows(tensors_.d_o, TensorView(), sequence, h), first, n, call_.value_size,
                   d_o, ld_v);
          LoadRows(call_.LevelScales(sequence, h), first, n, levels, lambda, ld_lambda);
        }
        const bool final_here = tensors_.d_final_state.given() && first == sequence.final_base();
        alignas(64) T decay[kStateChunk], row_scale[kStateChunk];
        gate.FromBegin(head_gap, n, decay);
        int64_t slot_index = 0;
        call_.starts[index * call_.heads + h].ForEachLive([&](int slot, const auto&) {
          if (slot < first_slot) return;
          T* gradient = TileOf(index, h, slot_index++);
          if (final_here) {
            call_.LoadState(NodeData(tensors_.d_final_state.nodes, sequence.index, h, slot),
                            final_node);
            ScaleAdd<T>(call_.tile_size, 1, gradient, static_cast<T>(std::exp(head_gap)),
                        final_node);
          }
          if (!queries) return;
          const int level = ReadLevel(slot, call_.num_levels);
          for (int64_t r = 0; r < n; ++r) row_scale[r] = lambda[r * ld_lambda + level] * decay[r];
          ScaleRows(n, call_.value_size, row_scale, d_o, ld_v, scaled, ld_v);
          MatMul<Op::kTranspose>(call_.value_size, call_.key_size, n, scaled, ld_v, q, ld_k,
                                 gradient, ld_k, Epilogue<T>{.beta = 1});
        });
        head_gap += gate.total;
      }
    }
  }

  // `stack`: gradients of the slots after the segment; becomes those before it.
  void WalkBack(int64_t index, int64_t head, GradientStack& stack) {
    const Segment& segment = call_.segments[index];
    const Sequence& sequence = *segment.sequence;
    const int first_slot = call_.FirstSegmentSlot(segment);
    const int64_t at = index * call_.heads + head;
    Stack before = call_.starts[at];
    for (int b = 0; b < first_slot; ++b) before.slots[b] = {};
    if (!segment.last) {
      PopPush(
          segment.end - 1, call_.top, before, stack,
          [&](const NodeGradient<T>& target) { node_gradients_[at] = target.tile; },
          [](const NodeGradient<T>& from, NodeGradient<T>& to) { to = from; },
          [](NodeGradient<T>& target) { target = {}; });
    }
    const double total = segment.last ? 0.0 : call_.segment_totals[at];
    double gap = 0;
    int64_t slot_index = 0;
    const int64_t ld_k = TileLd<T>(call_.key_size);
    before.ForEachLive([&](int slot, const ScalarNode<T>& node) {
      T* gradient = TileOf(index, head, slot_index++);
      if (stack.slots[slot].live()) {
        const double decay = std::exp(total);
        if (decay != 0) {
          const T* later = stack.slots[slot].tile;
          through_[at] += std::exp(total + gap) *
                          Dot(call_.value_size, call_.key_size, node.state, ld_k, later, ld_k);
          ScaleAdd<T>(call_.tile_size, 1, gradient, static_cast<T>(decay), later);
        }
      }
      stack.slots[slot] = {.tile = gradient};
      gap += node.total;
    });
    const TensorView& d_nodes = tensors_.gradients.initial_state.nodes;
    if (!segment.first || !d_nodes.given()) return;
    before.ForEachLive([&](int slot, const ScalarNode<T>&) {
      call_.StoreState(stack.slots[slot].tile, NodeData(d_nodes, sequence.index, head, slot));
    });
  }

  const ScalarGateCall<T>& call_;
  const BackwardTensors& tensors_;
  int64_t begin_ = 0;
  std::vector<int64_t> offsets_;          // of each segment's first tile in tiles_
  hwy::AlignedFreeUniquePtr<T[]> tiles_;  // [segment of the wave, H, live slots]
  hwy::AlignedFreeUniquePtr<T[]> kept_;   // of the wave before
  std::vector<GradientStack> carried_;    // [H] of the sequence that the next wave continues
  std::vector<T*> node_gradients_;        // [segments, H]
  std::vector<double> through_;           // [segments, H]
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fenwick::cpu
HWY_AFTER_NAMESPACE();

#endif  // FENWICK_CPU_SCALAR_GATE_STATE_GRADIENTS_INL_H_
