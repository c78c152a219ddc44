// Backward of log-linear attention with a scalar gate. States are recomputed
// from inputs. state_gradients-inl.h gives the gradients of the nodes where segments meet; here
// every segment is walked forwards, keeping its nodes, and then backwards:
//   read of slot b by chunk c
//     Y = dO S_b^T;  dq += w Y;  dlambda_b = decay q.Y;  dS_b += (w dO)^T q
//   own node of c, gradient D
//     dv += exp(A - a) k D;  dk += exp(A - a) v D^T
//   inside the chunk: chunk_backward-inl.h
// with w[r] = lambda[r] exp(a[r] + gap). Gradients of q and k are summed over the heads of a group
// in order, by one task: the same bits for any number of threads.
//
// dg[t] is the flow across token t, the sum of P[r, s] dP[r, s] over s < t <= r. It is made of four
// parts, each a sum of its own terms: inside the chunk; from earlier tokens to the chunk's rows r
// >= t; from the chunk's tokens s < t to later rows; and past the chunk, sum_b <S_b, dS_b>.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/highway_targets.h"
#include "cpu/scalar_gate/scalar_gate.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/scalar_gate/backward.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "cpu/scalar_gate/chunk_backward-inl.h"
#include "cpu/scalar_gate/state_gradients-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fenwick::cpu {
namespace HWY_NAMESPACE {

// Segments decide the order of sums, so they depend on the shape alone: enough for a few cores
// where a sequence is short, and no longer than what a task can hold in a third-level cache (per
// chunk of K = 128, V = 64: 160 KB of tiles and 33 KB of nodes).
inline constexpr int64_t kBackwardSegments = 4;
inline constexpr int kMaxSegmentLog2 = 4;

template <typename T>
struct BackwardPass {
  using Node = ScalarNode<T>;
  using Stack = NodeStack<Node>;
  using GradientStack = NodeStack<NodeGradient<T>>;

  const ScalarGateCall<T>& call;
  const BackwardTensors& tensors;
  const StateGradients<T>& state_gradients;

  // Of a chunk, for all heads of a group.
  struct SharedTiles {
    T *q, *k, *dq, *dk;  // [n, K]
    T *qk, *d_qk;        // [n, n]
  };

  // Scratch of one chunk and head.
  struct HeadTiles {
    T *v, *v_transposed, *d_o, *dv, *scaled;  // [n, V], v_transposed [V, n]
    T *weights, *dp;                          // [n, n]
    T *lambda, *d_lambda;                     // [n, L]
    T* y;                                     // [n, K]
    T* d_node;                                // [K, V]
  };

  int64_t LdK() const { return TileLd<T>(call.key_size); }
  int64_t LdV() const { return TileLd<T>(call.value_size); }
  static constexpr int64_t LdC() { return TileLd<T>(kStateChunk); }

  void Run(int64_t index, int64_t group) const {
    const Segment& segment = call.segments[index];
    const Sequence& sequence = *segment.sequence;
    Scratch scratch;
    std::vector<SharedTiles> shared(segment.end - segment.begin);
    T* transposed = scratch.New<T>(TileSize<T>(call.key_size, kStateChunk));
    for (int64_t chunk = segment.begin; chunk < segment.end; ++chunk) {
      SharedTiles& tiles = shared[chunk - segment.begin];
      const int64_t first = chunk * kStateChunk;
      const int64_t n = Rows(sequence, chunk);
      for (T** tile : {&tiles.q, &tiles.k, &tiles.dq, &tiles.dk}) {
        *tile = scratch.New<T>(kStateChunk * LdK());
      }
      for (T** tile : {&tiles.qk, &tiles.d_qk}) *tile = scratch.New<T>(kStateChunk * LdC());
      std::fill_n(tiles.dq, kStateChunk * LdK(), T{0});
      std::fill_n(tiles.dk, kStateChunk * LdK(), T{0});
      std::fill_n(tiles.d_qk, kStateChunk * LdC(), T{0});
      call.LoadQueries(sequence, group, first, n, tiles.q);
      LoadRows(call.Keys(sequence, group), first, n, call.key_size, tiles.k, LdK());
      Transpose(n, call.key_size, tiles.k, LdK(), transposed, LdC());
      MatMulToLower(n, call.key_size, tiles.q, LdK(), transposed, LdC(), tiles.qk, LdC());
    }
    HeadTiles head_tiles = NewHeadTiles(scratch);
    const int64_t heads_per_group = call.heads / call.groups;
    for (int64_t h = group * heads_per_group; h < (group + 1) * heads_per_group; ++h) {
      Head(index, h, shared, head_tiles);
    }
    for (int64_t chunk = segment.begin; chunk < segment.end; ++chunk) {
      FinishShared(segment, chunk, group, shared[chunk - segment.begin]);
    }
  }

  static int64_t Rows(const Sequence& sequence, int64_t chunk) {
    return std::min<int64_t>(kStateChunk, sequence.end - chunk * kStateChunk);
  }

  HeadTiles NewHeadTiles(Scratch& scratch) const {
    HeadTiles tiles;
    for (T** tile : {&tiles.v, &tiles.d_o, &tiles.dv, &tiles.scaled}) {
      *tile = scratch.New<T>(kStateChunk * LdV());
    }
    for (T** tile : {&tiles.weights, &tiles.dp}) *tile = scratch.New<T>(kStateChunk * LdC());
    for (T** tile : {&tiles.lambda, &tiles.d_lambda}) {
      *tile = scratch.New<T>(TileSize<T>(kStateChunk, call.num_levels));
    }
    tiles.v_transposed = scratch.New<T>(TileSize<T>(call.value_size, kStateChunk));
    tiles.y = scratch.New<T>(kStateChunk * LdK());
    tiles.d_node = scratch.New<T>(TileSize<T>(call.key_size, call.value_size));
    return tiles;
  }

  // All chunks of a segment for one head.
  void Head(int64_t index, int64_t head, const std::vector<SharedTiles>& shared,
            HeadTiles& tiles) const {
    const Segment& segment = call.segments[index];
    const Sequence& sequence = *segment.sequence;
    Scratch scratch;
    TilePool<T> nodes(scratch, call.tile_size);
    TilePool<T> gradients(scratch, call.tile_size);
    const int64_t chunks = segment.end - segment.begin;
    std::vector<Gate<T>> gates(chunks);
    std::vector<Stack> before(chunks);  // slots before each chunk
    before[0] = call.starts[index * call.heads + head];
    for (int64_t i = 0; i < chunks; ++i) {
      const int64_t chunk = segment.begin + i;
      gates[i].Load(call.Gates(sequence, head), chunk * kStateChunk, Rows(sequence, chunk));
      if (i + 1 == chunks) break;
      LoadRows(call.Values(sequence, head), chunk * kStateChunk, kStateChunk, call.value_size,
               tiles.v, LdV());
      before[i + 1] = before[i];
      // Merged nodes are read again on the way back: none is given back to the pool.
      const Node node{.state = nodes.Take(), .total = gates[i].total};
      ChunkNode(call.layout, kStateChunk, call.key_size, call.value_size, gates[i], shared[i].k,
                tiles.v, tiles.scaled, node.state);
      before[i + 1].Push(chunk, call.top, node,
                         [&](Node& into, Node& older) { MergeNode(call.tile_size, into, older); });
    }

    // Slots below `own_slots` change inside the segment: their gradients are followed here, those
    // of the others in state_gradients-inl.h.
    const int own_slots = call.top < segment.log2 ? call.top + 1 : segment.log2;
    double past = own_slots > call.top ? 0.0 : state_gradients.Through(index, head);
    GradientStack stack;
    if (!segment.last) {
      stack.slots[MergeSlot(segment.end - 1, call.top)] = {
          .tile = state_gradients.NodeGradientOf(index, head)};
    }
    for (int64_t i = chunks - 1; i >= 0; --i) {
      Chunk(segment, segment.begin + i, head, own_slots, gates[i], before[i], shared[i], tiles,
            gradients, stack, past);
    }
    const TensorView& d_nodes = tensors.gradients.initial_state.nodes;
    if (!segment.first || !d_nodes.given()) return;
    for (int b = 0; b < call.FirstSegmentSlot(segment); ++b) {
      if (!before[0].slots[b].live() || !stack.slots[b].live()) continue;
      call.StoreState(stack.slots[b].tile, NodeData(d_nodes, sequence.index, head, b));
    }
  }

  // One chunk of one head. `before`: nodes before it. `stack`: gradients of the own slots after it,
  // becomes those before it. `past`: flow from the other slots to rows after the chunk.
  void Chunk(const Segment& segment, int64_t chunk, int64_t head, int own_slots,
             const Gate<T>& gate, const Stack& before, const SharedTiles& shared, HeadTiles& tiles,
             TilePool<T>& pool, GradientStack& stack, double& past) const {
    const Sequence& sequence = *segment.sequence;
    const int64_t first = chunk * kStateChunk;
    const int64_t n = Rows(sequence, chunk);
    const bool queries = first + n > sequence.begin;

    // What lies after the chunk: the gradient of its node, and the flow past it.
    T* d_node = nullptr;
    T* released = nullptr;
    Stack own = before;
    for (int b = own_slots; b < kMaxSlots; ++b) own.slots[b] = {};
    if (chunk + 1 < segment.end || !segment.last) {
      PopPush(
          chunk, call.top, own, stack,
          [&](NodeGradient<T>& target) {
            d_node = target.tile;
            // A slot that absorbs itself stays live, and its gradient goes on in a copy.
            if (own.slots[MergeSlot(chunk, call.top)].live()) {
              if (target.owned) released = target.tile;
              target = CopyOf(target, pool);
            }
          },
          [&](const NodeGradient<T>& from, NodeGradient<T>& to) { to = CopyOf(from, pool); },
          [&](NodeGradient<T>& target) {
            if (target.owned) released = target.tile;
            target = {};
          });
    }
    double flow_past = past;
    double gap = 0;
    own.ForEachLive([&](int slot, const Node& node) {
      if (stack.slots[slot].live()) {
        flow_past += std::exp(gap + gate.total) * Dot(call.value_size, call.key_size, node.state,
                                                      LdK(), stack.slots[slot].tile, LdK());
      }
      gap += node.total;
    });

    LoadRows(call.Values(sequence, head), first, n, call.value_size, tiles.v, LdV());
    double flow[kStateChunk] = {};
    if (queries) {
      Queries(segment, chunk, head, own_slots, gate, before, shared, tiles, pool, stack, flow,
              past);
    } else {
      DecayGradients(own, gate, pool, stack);
    }
    Sources(gate, n, shared, tiles, d_node, queries, flow);
    if (released != nullptr) pool.Give(released);
    if (tensors.d_final_state.given()) {
      if (first == sequence.final_base()) {
        AddFinalNodes(sequence, head, own_slots, before, pool, tiles, stack, past);
      }
      if (first >= sequence.final_base()) {
        AddRows(FinalRows(tensors.d_final_state.v, sequence, head), first, n, call.value_size,
                tiles.dv, LdV());
      }
    }
    StoreRows(tiles.dv, LdV(), first, n, call.value_size,
              TokenRows(tensors.gradients.v, tensors.gradients.initial_state.v, sequence, head));
    alignas(64) T dg[kStateChunk];
    for (int64_t r = 0; r < n; ++r) dg[r] = static_cast<T>(flow[r] + flow_past);
    if (tensors.d_final_state.given() && first >= sequence.final_base()) {
      AddRows(FinalRows(tensors.d_final_state.g, sequence, head), first, n, 1, dg, 1);
    }
    StoreScalars(dg, first, n,
                 TokenRows(tensors.gradients.g, tensors.gradients.initial_state.g, sequence, head));
  }

  // Query side: dq, dlambda, reads of the own slots, everything inside the chunk but dk. Adds the
  // flows that end in the chunk to `flow`, and those of them that other slots feed to `past`.
  void Queries(const Segment& segment, int64_t chunk, int64_t head, int own_slots,
               const Gate<T>& gate, const Stack& before, const SharedTiles& shared,
               HeadTiles& tiles, TilePool<T>& pool, GradientStack& stack, double* flow,
               double& past) const {
    const Sequence& sequence = *segment.sequence;
    const int64_t first = chunk * kStateChunk;
    const int64_t n = Rows(sequence, chunk);
    const int levels = call.LevelsRead(sequence);
    const int64_t ld_lambda = TileLd<T>(call.num_levels);
    LoadRows(TokenRows(tensors.d_o, TensorView(), sequence, head), first, n, call.value_size,
             tiles.d_o, LdV());
    LoadRows(call.LevelScales(sequence, head), first, n, levels, tiles.lambda, ld_lambda);
    std::fill_n(tiles.d_lambda, n * ld_lambda, T{0});
    Transpose(n, call.value_size, tiles.v, LdV(), tiles.v_transposed, LdC());
    MatMulToLower(n, call.value_size, tiles.d_o, LdV(), tiles.v_transposed, LdC(), tiles.dp, LdC());
    ChunkBackward(n, gate, shared.qk, tiles.dp, tiles.lambda, ld_lambda, levels - 1, tiles.weights,
                  shared.d_qk, tiles.d_lambda, flow);

    double read_flow[kStateChunk] = {};  // from carried states to each row
    alignas(64) T from_begin[kStateChunk];
    gate.FromBegin(0, n, from_begin);
    double gap = 0;
    before.ForEachLive([&](int slot, const Node& node) {
      alignas(64) T decay[kStateChunk], scale[kStateChunk], dots[kStateChunk];
      gate.FromBegin(gap, n, decay);
      const int level = ReadLevel(slot, call.num_levels);
      for (int64_t r = 0; r < n; ++r) scale[r] = tiles.lambda[r * ld_lambda + level] * decay[r];
      MatMul<Op::kNone>(n, call.key_size, call.value_size, tiles.d_o, LdV(), node.state, LdK(),
                        tiles.y, LdK());
      ReadBackward(n, call.key_size, shared.q, tiles.y, scale, shared.dq, dots);
      for (int64_t r = 0; r < n; ++r) {
        tiles.d_lambda[r * ld_lambda + level] += decay[r] * dots[r];
        const double row_flow = static_cast<double>(scale[r]) * dots[r];
        read_flow[r] += row_flow;
        if (slot >= own_slots) past += row_flow;
      }
      if (slot < own_slots) {
        NodeGradient<T>& gradient = stack.slots[slot];
        const T beta = gradient.live() ? static_cast<T>(std::exp(gate.total)) : T{0};
        if (!gradient.owned) {
          gradient = gradient.live() ? CopyOf(gradient, pool)
                                     : NodeGradient<T>{.tile = pool.Take(), .owned = true};
        }
        // With respect to the node as it is where the chunk begins: without the gap.
        for (int64_t r = 0; r < n; ++r) {
          scale[r] = tiles.lambda[r * ld_lambda + level] * from_begin[r];
        }
        ScaleRows(n, call.value_size, scale, tiles.d_o, LdV(), tiles.scaled, LdV());
        MatMul<Op::kTranspose>(call.value_size, call.key_size, n, tiles.scaled, LdV(), shared.q,
                               LdK(), gradient.tile, LdK(), Epilogue<T>{.beta = beta});
      }
      gap += node.total;
    });
    double later = 0;
    for (int64_t r = n - 1; r >= 0; --r) flow[r] += later += read_flow[r];

    const int64_t first_query = std::max(first, sequence.begin);
    StoreRows(tiles.d_lambda + (first_query - first) * ld_lambda, ld_lambda, first_query,
              first + n - first_query, call.num_levels,
              TokenRows(tensors.gradients.level_scales, TensorView(), sequence, head));
  }

  // Source side: dv, and dk through the chunk's own node. Adds the flows that begin in the chunk
  // and end after it to `flow`.
  void Sources(const Gate<T>& gate, int64_t n, const SharedTiles& shared, HeadTiles& tiles,
               const T* d_node, bool queries, double* flow) const {
    std::fill_n(tiles.dv, n * LdV(), T{0});
    if (d_node != nullptr) {
      alignas(64) T to_end[kStateChunk], dots[kStateChunk];
      gate.ToEnd(n, to_end);
      Transpose(call.value_size, call.key_size, d_node, LdK(), tiles.d_node, LdV());
      MatMul<Op::kNone>(n, call.value_size, call.key_size, shared.k, LdK(), tiles.d_node, LdV(),
                        tiles.scaled, LdV());
      ReadBackward(n, call.value_size, tiles.v, tiles.scaled, to_end, tiles.dv, dots);
      MatMul<Op::kNone>(n, call.key_size, call.value_size, tiles.v, LdV(), d_node, LdK(), shared.dk,
                        LdK(), Epilogue<T>{.beta = 1, .row_scale = to_end});
      double earlier = 0;
      for (int64_t r = 0; r < n; ++r) {
        flow[r] += earlier;
        earlier += static_cast<double>(to_end[r]) * dots[r];
      }
    }
    if (queries) {
      MatMulLowerTransposed<T>(n, call.value_size, tiles.weights, LdC(), tiles.d_o, LdV(), tiles.dv,
                               LdV(), 1);
    }
  }

  static NodeGradient<T> CopyOf(const NodeGradient<T>& from, TilePool<T>& pool, int64_t size) {
    if (!from.live()) return {};
    NodeGradient<T> copy{.tile = pool.Take(), .owned = true};
    std::copy_n(from.tile, size, copy.tile);
    return copy;
  }
  NodeGradient<T> CopyOf(const NodeGradient<T>& from, TilePool<T>& pool) const {
    return CopyOf(from, pool, call.tile_size);
  }

  // Across a chunk without queries, gradients of the slots only decay.
  void DecayGradients(const Stack& own, const Gate<T>& gate, TilePool<T>& pool,
                      GradientStack& stack) const {
    own.ForEachLive([&](int slot, const Node&) {
      NodeGradient<T>& gradient = stack.slots[slot];
      if (!gradient.live()) return;
      if (!gradient.owned) gradient = CopyOf(gradient, pool);
      const T decay = static_cast<T>(std::exp(gate.total));
      for (int64_t i = 0; i < call.tile_size; ++i) gradient.tile[i] *= decay;
    });
  }

  // At final_base: the gradient of the final state's nodes joins.
  void AddFinalNodes(const Sequence& sequence, int64_t head, int own_slots, const Stack& before,
                     TilePool<T>& pool, HeadTiles& tiles, GradientStack& stack,
                     double& past) const {
    double gap = 0;
    T* d_final = pool.Take();
    before.ForEachLive([&](int slot, const Node& node) {
      call.LoadState(NodeData(tensors.d_final_state.nodes, sequence.index, head, slot), d_final);
      if (slot < own_slots) {
        NodeGradient<T>& gradient = stack.slots[slot];
        if (!gradient.owned) gradient = CopyOf(gradient, pool);
        if (gradient.live()) {
          ScaleAdd<T>(call.tile_size, 1, gradient.tile, 1, d_final);
        } else {
          gradient = CopyOf({.tile = d_final}, pool);
        }
      } else {
        past +=
            std::exp(gap) * Dot(call.value_size, call.key_size, node.state, LdK(), d_final, LdK());
      }
      gap += node.total;
    });
    pool.Give(d_final);
  }

  // Gradient of the final state's ring, by position.
  static TokenRows FinalRows(const TensorView& ring, const Sequence& sequence, int64_t head) {
    return TokenRows(TensorView(), ring,
                     Sequence{.index = sequence.index, .begin = sequence.end + kStateRing}, head);
  }

  // What all heads of the group have added to q k^T becomes dq and dk.
  void FinishShared(const Segment& segment, int64_t chunk, int64_t group,
                    const SharedTiles& tiles) const {
    const Sequence& sequence = *segment.sequence;
    const int64_t first = chunk * kStateChunk;
    const int64_t n = Rows(sequence, chunk);
    MatMulLower<T>(n, call.key_size, tiles.d_qk, LdC(), tiles.k, LdK(), tiles.dq, LdK(), 1);
    MatMulLowerTransposed<T>(n, call.key_size, tiles.d_qk, LdC(), tiles.q, LdK(), tiles.dk, LdK(),
                             1);
    if (call.inputs.scale != 1.0) {
      T scale[kStateChunk];
      std::fill_n(scale, kStateChunk, static_cast<T>(call.inputs.scale));
      ScaleRows(n, call.key_size, scale, tiles.dq, LdK(), tiles.dq, LdK());
    }
    if (tensors.d_final_state.given() && first >= sequence.final_base()) {
      AddRows(FinalRows(tensors.d_final_state.k, sequence, group), first, n, call.key_size,
              tiles.dk, LdK());
    }
    const int64_t first_query = std::max(first, sequence.begin);
    StoreRows(tiles.dq + (first_query - first) * LdK(), LdK(), first_query,
              std::max<int64_t>(0, first + n - first_query), call.key_size,
              TokenRows(tensors.gradients.q, TensorView(), sequence, group));
    StoreRows(tiles.dk, LdK(), first, n, call.key_size,
              TokenRows(tensors.gradients.k, tensors.gradients.initial_state.k, sequence, group));
  }
};

inline void Clear(const TensorView& contiguous) {
  if (!contiguous.given() || contiguous.num_elements() == 0) return;
  std::memset(contiguous.data, 0, contiguous.num_elements() * ElementSize(contiguous.dtype));
}

template <typename T>
void Backward(const Inputs& inputs, const TensorView& d_o, const StateGradView& d_final_state,
              const Gradients& gradients, int num_threads) {
  const StateGradView& d_initial = gradients.initial_state;
  for (const TensorView* view : {&d_initial.k, &d_initial.v, &d_initial.g, &d_initial.nodes}) {
    Clear(*view);
  }
  ScalarGateCall<T> call(inputs, StateLayout::kValueByKey);
  call.segments = MakeSegments(call.sequences, [&](int64_t chunks) {
    return SegmentLog2(chunks, kBackwardSegments, kMaxSegmentLog2);
  });
  const std::vector<HeadRange> ranges = MakeHeadRanges(call.groups, call.heads, 1);
  call.LoadInitialNodes(num_threads);
  call.FindStarts(ranges, num_threads);
  const BackwardTensors tensors{d_o, d_final_state, gradients};
  StateGradients<T> state_gradients(call, tensors);
  const BackwardPass<T> pass{call, tensors, state_gradients};
  for (int64_t end = call.segments.size(); end > 0;) {
    const int64_t begin = state_gradients.WaveBegin(end);
    state_gradients.RunWave(begin, end, ranges, num_threads);
    ParallelFor((end - begin) * call.groups, num_threads,
                [&](int64_t i, int) { pass.Run(begin + i / call.groups, i % call.groups); });
    end = begin;
  }
  if (!d_final_state.given() || !d_initial.nodes.given()) return;
  // A sequence without any token passes the gradient of its nodes on.
  for (const Sequence& sequence : call.sequences) {
    if (sequence.first_chunk() != sequence.end_chunk()) continue;
    for (int64_t h = 0; h < call.heads; ++h) {
      NodeStack<ScalarNode<T>> stack;
      call.AddInitialNodes(sequence, h, 0, kMaxSlots, stack);
      stack.ForEachLive([&](int slot, const ScalarNode<T>&) {
        std::memcpy(NodeData(d_initial.nodes, sequence.index, h, slot),
                    NodeData(d_final_state.nodes, sequence.index, h, slot),
                    call.key_size * call.value_size * sizeof(T));
      });
    }
  }
}

void BackwardFloat(const Inputs& inputs, const TensorView& d_o, const StateGradView& d_final_state,
                   const Gradients& gradients, int num_threads) {
  Backward<float>(inputs, d_o, d_final_state, gradients, num_threads);
}

void BackwardDouble(const Inputs& inputs, const TensorView& d_o, const StateGradView& d_final_state,
                    const Gradients& gradients, int num_threads) {
  Backward<double>(inputs, d_o, d_final_state, gradients, num_threads);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fenwick::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fenwick::cpu {

HWY_EXPORT(BackwardFloat);
HWY_EXPORT(BackwardDouble);

void ScalarGateBackward(const Inputs& inputs, const TensorView& d_o,
                        const StateGradView& d_final_state, const Gradients& gradients,
                        const Context& context) {
  const int num_threads = context.num_threads > 0 ? context.num_threads : GetNumThreads();
  if (inputs.q.dtype == DType::kFloat64) {
    HWY_DYNAMIC_DISPATCH(BackwardDouble)(inputs, d_o, d_final_state, gradients, num_threads);
  } else {
    HWY_DYNAMIC_DISPATCH(BackwardFloat)(inputs, d_o, d_final_state, gradients, num_threads);
  }
}

}  // namespace fenwick::cpu
#endif  // HWY_ONCE
