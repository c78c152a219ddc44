// The derivative of one segment of one head, given what is incoming at its start and the gradients
// at its end: phase 3 of backward.cc.

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "cpu/gated_delta/segments.h"
#include "cpu/scratch.h"
#include "cpu/tile_layout.h"
#include "cpu/tile_pool.h"

#if defined(FENWICK_CPU_GATED_DELTA_SEGMENT_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FENWICK_CPU_GATED_DELTA_SEGMENT_BACKWARD_INL_H_
#undef FENWICK_CPU_GATED_DELTA_SEGMENT_BACKWARD_INL_H_
#else
#define FENWICK_CPU_GATED_DELTA_SEGMENT_BACKWARD_INL_H_
#endif

#include "cpu/gated_delta/chunk_backward-inl.h"
#include "cpu/gated_delta/chunk_io-inl.h"
#include "cpu/gated_delta/segment-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fenwick::cpu {
namespace HWY_NAMESPACE {

template <typename T>
struct SegmentBackward : SegmentBase<T> {
  // Gradients of the incoming nodes: after phase 1 what the segment's outputs give, then all.
  NodeStack<StateNode<T>> d_incoming;
};

// What all heads of a group share of a chunk: tiles as those of DeltaChunk, and gradients as those
// of DeltaChunkGrad, summed over the heads.
template <typename T>
struct GroupChunk {
  T *q, *k, *kk, *qk;
  T *d_kk, *d_qk;
};

template <typename T>
class SegmentAdjoint {
 public:
  SegmentAdjoint(const DeltaCall& call, const TensorView& d_o, const StateGradView& d_final,
                 const Gradients& gradients)
      : call_(call), d_o_(d_o), d_final_(d_final), out_(gradients) {}

  // Tiles live in `scratch`; the gradients begin as zero.
  GroupChunk<T> LoadGroupChunk(const Sequence& s, int64_t group, int64_t chunk,
                               Scratch& scratch) const {
    const int64_t head = group * (call_.H / call_.G);  // any of the group
    const DeltaRows rows(call_.inputs, s, head, group);
    const ChunkSpan span(s, chunk);
    GroupChunk<T> shared;
    for (T** tile : {&shared.q, &shared.k}) {
      *tile = scratch.New<T>(TileSize<T>(kStateChunk, call_.K));
    }
    for (T** tile : {&shared.kk, &shared.qk, &shared.d_kk, &shared.d_qk}) {
      *tile = scratch.New<T>(TileSize<T>(kStateChunk, kStateChunk));
    }
    for (T* tile : {shared.d_kk, shared.d_qk}) {
      std::fill_n(tile, TileSize<T>(kStateChunk, kStateChunk), T{0});
    }
    Scratch own;
    DeltaChunk<T> c(own, call_.K, call_.V, call_.L);
    Use(shared, c);
    LoadKeys(rows, span, c);
    ScoreKeys(c);
    if (span.has_queries()) {
      LoadQueries(rows, span, call_.inputs.scale, c);
      ScoreQueries(c);
    }
    return shared;
  }

  // After all heads: adds what goes through K K^T and Q K^T to dq and dk [64, K].
  void FinishGroupChunk(const ChunkSpan& span, const GroupChunk<T>& shared, T* dq, T* dk) const {
    const int64_t n = span.count, K = call_.K, ld_k = TileLd<T>(K);
    constexpr int64_t ld_c = DeltaChunk<T>::ld_c;
    MatMulLower(n, K, shared.d_kk, ld_c, shared.k, ld_k, dk, ld_k, T{1});
    MatMulLowerTransposed(n, K, shared.d_kk, ld_c, shared.k, ld_k, dk, ld_k, T{1});
    if (!span.has_queries()) return;
    Scratch scratch;
    T* product = scratch.New<T>(n * ld_k);
    MatMulLower(n, K, shared.d_qk, ld_c, shared.k, ld_k, product, ld_k, T{0});
    ScaleAdd(n * ld_k, T{1}, dq, static_cast<T>(call_.inputs.scale), product);
    MatMulLowerTransposed(n, K, shared.d_qk, ld_c, shared.q, ld_k, dk, ld_k, T{1});
  }

  // Stores what belongs to the head; adds to dq and dk [tokens, K] and to what `chunks` sum.
  void Run(const SegmentBackward<T>& work, const SegmentBackward<T>* next,
           const std::vector<GroupChunk<T>>& chunks, T* dq, T* dk) const {
    Scratch scratch;
    const Sequence& s = work.sequence();
    const int64_t K = call_.K, V = call_.V;
    const DeltaRows rows(call_.inputs, s, work.head, call_.group(work.head));
    const TokenRows d_o_rows = TokenRows(d_o_, TensorView(), s, work.head);
    DeltaChunk<T> c(scratch, K, V, call_.L);
    DeltaChunkGrad<T> grad(scratch, c);
    const int64_t ld_k = c.ld_k, ld_v = c.ld_v;
    T* d_o = scratch.New<T>(kStateChunk * ld_v);
    T* transposed = scratch.New<T>(V * ld_k);
    T* final_node = scratch.New<T>(state_size());
    T* d_transition = nullptr;           // [K, K] P', ld_k
    NodeStack<StateNode<T>> incoming_t;  // [V, K] transposes of the incoming nodes, ld_k
    TilePool<T> pool(scratch, state_size());
    NodeStack<StateNode<T>> d_local;
    SegmentStates states;
    const bool uses_product = UsesProduct(work);
    RecomputeStates(work, rows, chunks, uses_product, scratch, c, states);

    if (next != nullptr) {
      const int target = work.target(call_.top);
      next->d_incoming.ForEachLive([&](int slot, const StateNode<T>& node) {
        if (uses_product && slot != target) return;
        d_local.slots[slot].state = pool.Take();
        std::copy_n(node.state, state_size(), d_local.slots[slot].state);
      });
    }
    if (uses_product) {
      d_transition = scratch.New<T>(K * ld_k);
      std::fill_n(d_transition, K * ld_k, T{0});
      work.incoming.ForEachLive([&](int slot, const StateNode<T>& node) {
        T* st = incoming_t.slots[slot].state = scratch.New<T>(V * ld_k);
        Transpose(K, V, node.state, ld_v, st, ld_k);
        if (next == nullptr) return;
        MatMul<Op::kNone>(K, K, V, GradientAtEnd(work, *next, slot), ld_v, st, ld_k, d_transition,
                          ld_k, Epilogue<T>{.beta = 1});
      });
    }

    for (int64_t chunk = work.segment.end - 1; chunk >= work.segment.begin; --chunk) {
      const int64_t i = chunk - work.segment.begin;
      const bool carries = chunk + 1 != s.end_chunk();
      const ChunkSpan span(s, chunk);
      const NodeStack<CarriedState>& before = states.local[i];
      Use(chunks[i], c);
      LoadValues(rows, span, c);
      PrepareKeys(c);
      if (span.has_queries()) {
        LoadLevels(rows, span, c.L, c.lambda);
        PrepareQueries(c);
        LoadRows(d_o_rows, span.first, c.n, V, d_o, ld_v);
      }
      grad.Clear(c);
      grad.kk = chunks[i].d_kk;
      grad.qk = chunks[i].d_qk;
      const int target = carries ? MergeSlot(chunk, call_.top) : -1;  // slots up to it merge
      if (carries) {
        PopPush(
            chunk, call_.top, before, d_local,
            [&](const StateNode<T>& node) {
              const CarriedState& sum = states.merging[i];
              if (sum.live()) Transpose(K, V, sum.state, ld_v, transposed, ld_k);
              AdvanceAdjoint(c, sum.state, transposed, sum.edits, node.state, grad);
            },
            [&](const StateNode<T>& from, StateNode<T>& to) {
              to.state = pool.Take();
              std::copy_n(from.state, state_size(), to.state);
            },
            [&](StateNode<T>& node) {
              pool.Give(node.state);
              node.state = nullptr;
            });
      } else {
        before.ForEachLive([&](int slot, const CarriedState&) {
          d_local.slots[slot].state = pool.Take();
          std::fill_n(d_local.slots[slot].state, state_size(), T{0});
        });
      }
      before.ForEachLive([&](int slot, const CarriedState& node) {
        T* ds = d_local.slots[slot].state;
        Transpose(K, V, node.state, ld_v, transposed, ld_k);
        if (carries && slot > target) {
          CarryAdjoint(c, V, node.state, transposed, node.edits, ds, ld_v, grad);
        }
        if (span.has_queries()) {
          ReadAdjoint(c, ReadLevel(slot, call_.L), d_o, transposed, ds, grad);
        }
      });
      if (uses_product) {
        ProductAdjoint(c, carries, span.has_queries() ? d_o : nullptr, incoming_t,
                       states.transition[i], d_transition, grad);
      }
      if (d_final_.given() && chunk == s.final_base() / kStateChunk) {
        d_local.ForEachLive([&](int slot, const StateNode<T>& node) {
          LoadFinalNode(work, slot, final_node);
          ScaleAdd(state_size(), T{1}, node.state, T{1}, final_node);
        });
        incoming_t.ForEachLive([&](int slot, const StateNode<T>& node) {
          LoadFinalNode(work, slot, final_node);
          MatMul<Op::kNone>(K, K, V, final_node, ld_v, node.state, ld_k, d_transition, ld_k,
                            Epilogue<T>{.beta = 1});
        });
      }
      FinishChunk(c, span.has_queries() ? d_o : nullptr, grad);
      StoreHead(work, span, c, grad);
      const int64_t offset = i * kStateChunk * ld_k;
      if (span.has_queries()) {
        ScaleAdd(c.n * ld_k, T{1}, dq + offset, static_cast<T>(call_.inputs.scale), grad.q);
      }
      ScaleAdd(c.n * ld_k, T{1}, dk + offset, T{1}, grad.k);
    }
    if (work.segment.first && out_.initial_state.given()) {
      d_local.ForEachLive(
          [&](int slot, const StateNode<T>& node) { StoreInitialNode(work, slot, node.state); });
      work.d_incoming.ForEachLive(
          [&](int slot, const StateNode<T>& node) { StoreInitialNode(work, slot, node.state); });
    }
  }

  // rows += gradient of the final state's ring, for the tokens that went into it.
  void AddFinalRing(const TensorView& ring, const Sequence& s, int64_t head, int64_t first,
                    int64_t count, int64_t columns, T* rows, int64_t ld) const {
    if (!d_final_.given() || !ring.given()) return;
    Scratch scratch;
    const TokenRows from(TensorView(), ring, Sequence{.index = s.index, .begin = s.end}, head);
    T* row = scratch.New<T>(PaddedColumns<T>(columns));
    for (int64_t p = std::max(first, s.final_base()); p < first + count; ++p) {
      LoadRow(from.dtype(), from.Row(p), columns, row);
      for (int64_t j = 0; j < columns; ++j) rows[(p - first) * ld + j] += row[j];
    }
  }
  // Gradient, at the end of `work`, of the node that was in `slot` at its start.
  const T* GradientAtEnd(const SegmentBackward<T>& work, const SegmentBackward<T>& next,
                         int slot) const {
    return next.d_incoming.slots[std::max(slot, work.target(call_.top))].state;
  }
  void LoadFinalNode(const SegmentBackward<T>& work, int slot, T* state) const {
    LoadNode(NodeData(d_final_.nodes, work.sequence().index, work.head, slot), call_.K, call_.V,
             state);
  }

 private:
  int64_t state_size() const { return TileSize<T>(call_.K, call_.V); }

  // A state as it is where a chunk begins, and, if the chunk was seen to carry it, what that writes
  // with K~: -W S, or U - W S if it merges with the new state.
  struct CarriedState {
    T* state = nullptr;
    T* edits = nullptr;
    bool live() const { return state != nullptr; }
  };
  struct SegmentStates {
    std::array<NodeStack<CarriedState>, kSegmentChunks> local;
    std::array<CarriedState, kSegmentChunks> merging;     // sum of what merges at the chunk's end
    std::array<CarriedState, kSegmentChunks> transition;  // P [K, K], ld_k; [0]: none, P = I
  };

  // Whether phase 3 differentiates P. In products of C x K x K it costs 9, and C x K x V for each
  // incoming node; carrying a node costs eight times that. Slots below kSegmentLog2 are those of
  // local nodes (an incoming node is there where saturation ends so low).
  bool UsesProduct(const SegmentBackward<T>& work) const {
    return work.has_incoming && (call_.top < kSegmentLog2 ||
                                 7 * call_.NumIncoming(work.segment) * call_.V > 9 * call_.K);
  }

  static void Use(const GroupChunk<T>& shared, DeltaChunk<T>& c) {
    c.q = shared.q;
    c.k = shared.k;
    c.kk = shared.kk;
    c.qk = shared.qk;
  }

  void RecomputeStates(const SegmentBackward<T>& work, const DeltaRows& rows,
                       const std::vector<GroupChunk<T>>& chunks, bool uses_product,
                       Scratch& scratch, DeltaChunk<T>& c, SegmentStates& states) const {
    const int64_t K = call_.K, V = call_.V;
    // The state after the chunk in c.
    const auto carry = [&](CarriedState& from, int64_t columns, int64_t ld) {
      T* to = scratch.New<T>(K * ld);
      std::copy_n(from.state, K * ld, to);
      from.edits = scratch.New<T>(c.n * ld);
      ApplyTransition(c, columns, to, ld, from.edits);
      return CarriedState{.state = to};
    };
    call_.ForEachInitialLocal(work.segment, [&](int slot) {
      T* state = scratch.New<T>(state_size());
      LoadInitialNode(call_, work, slot, state);
      states.local[0].slots[slot].state = state;
    });
    if (!uses_product) {
      work.incoming.ForEachLive([&](int slot, const StateNode<T>& node) {
        states.local[0].slots[slot].state = node.state;
      });
    }
    const auto merge = [&](CarriedState& newer, const CarriedState& older) {
      T* sum = scratch.New<T>(state_size());
      std::copy_n(newer.state, state_size(), sum);
      ScaleAdd(state_size(), T{1}, sum, T{1}, older.state);
      newer.state = sum;
    };
    for (int64_t i = 0; i < work.segment.end - work.segment.begin; ++i) {
      const int64_t chunk = work.segment.begin + i;
      NodeStack<CarriedState> next = states.local[i];
      const int target = next.Push(chunk, call_.top, CarriedState(), merge);
      CarriedState& sum = states.merging[i] = next.slots[target];
      if (chunk + 1 == work.segment.end) break;
      Use(chunks[i], c);
      LoadValues(rows, ChunkSpan(work.sequence(), chunk), c);
      PrepareKeys(c);
      if (uses_product && i == 0) {
        states.transition[1].state = scratch.New<T>(K * c.ld_k);
        WriteTransition(c, states.transition[1].state);
      } else if (uses_product) {
        states.transition[i + 1] = carry(states.transition[i], K, c.ld_k);
      }
      for (int slot = target + 1; slot < kMaxSlots; ++slot) {
        CarriedState& node = states.local[i].slots[slot];
        if (node.live()) next.slots[slot] = carry(node, V, c.ld_v);
      }
      T* end = next.slots[target].state = scratch.New<T>(state_size());
      if (sum.live()) {
        std::copy_n(sum.state, state_size(), end);
        sum.edits = scratch.New<T>(c.n * c.ld_v);
        AdvanceState(c, end, sum.edits);
      } else {
        AddNewState(c, /*accumulate=*/false, end);
      }
      states.local[i + 1] = next;
    }
  }

  // The chunk's share of P' and what P gives to the chunk's gradients. st: transposes of the
  // incoming nodes; p [K, K]: P where the chunk begins, none for I; dp: P' at its end, becomes that
  // at its start.
  void ProductAdjoint(const DeltaChunk<T>& c, bool carries, const T* d_o,
                      const NodeStack<StateNode<T>>& st, const CarriedState& p, T* dp,
                      DeltaChunkGrad<T>& grad) const {
    Scratch scratch;
    const int64_t K = call_.K, ld_k = c.ld_k;
    const auto read_levels = [&](const T* read, T* d_read) {
      st.ForEachLive([&](int slot, const StateNode<T>& node) {
        LevelAdjoint(c, ReadLevel(slot, call_.L), d_o, node.state, read, d_read, grad);
      });
    };
    if (!p.live()) {
      if (carries) IdentityAdjoint(c, dp, grad);
      if (d_o != nullptr) read_levels(c.q_read, grad.q_read);
      return;
    }
    T* pt = scratch.New<T>(K * ld_k);
    Transpose(K, K, p.state, ld_k, pt, ld_k);
    if (carries) CarryAdjoint(c, K, p.state, pt, p.edits, dp, ld_k, grad);
    if (d_o == nullptr) return;
    T* read = scratch.New<T>(c.n * ld_k);    // Q~ P
    T* d_read = scratch.New<T>(c.n * ld_k);  // its gradient
    MatMul<Op::kNone>(c.n, K, K, c.q_read, ld_k, p.state, ld_k, read, ld_k);
    std::fill_n(d_read, c.n * ld_k, T{0});
    read_levels(read, d_read);
    MatMul<Op::kNone>(c.n, K, K, d_read, ld_k, pt, ld_k, grad.q_read, ld_k, Epilogue<T>{.beta = 1});
    MatMul<Op::kTranspose>(K, K, c.n, c.q_read, ld_k, d_read, ld_k, dp, ld_k,
                           Epilogue<T>{.beta = 1});
  }

  void StoreHead(const SegmentBackward<T>& work, const ChunkSpan& span, const DeltaChunk<T>& c,
                 DeltaChunkGrad<T>& grad) const {
    Scratch scratch;
    const Sequence& s = work.sequence();
    const int64_t n = c.n, first = span.first, head = work.head;
    const StateGradView& initial = out_.initial_state;
    AddFinalRing(d_final_.v, s, head, first, n, call_.V, grad.v, c.ld_v);
    AddFinalRing(d_final_.g, s, head, first, n, 1, grad.g, 1);
    AddFinalRing(d_final_.beta, s, head, first, n, 1, grad.beta, 1);
    StoreRows(grad.v, c.ld_v, first, n, call_.V, TokenRows(out_.v, initial.v, s, head));
    StoreScalars(grad.g, first, n, TokenRows(out_.g, initial.g, s, head));
    StoreScalars(grad.beta, first, n, TokenRows(out_.beta, initial.beta, s, head));
    const TokenRows lambda(out_.level_scales, TensorView(), s, head);
    T* row = scratch.New<T>(PaddedColumns<T>(call_.L));
    for (int64_t i = 0; i < n; ++i) {
      for (int l = 0; l < call_.L; ++l) row[l] = grad.lambda[l * kStateChunk + i];
      StoreRows(row, 0, first + i, 1, call_.L, lambda);
    }
  }

  void StoreInitialNode(const SegmentBackward<T>& work, int slot, const T* state) const {
    StoreNode(state, T{1}, call_.K, call_.V,
              NodeData(out_.initial_state.nodes, work.sequence().index, work.head, slot));
  }
  const DeltaCall& call_;
  const TensorView& d_o_;
  const StateGradView& d_final_;
  const Gradients& out_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fenwick::cpu
HWY_AFTER_NAMESPACE();

#endif  // FENWICK_CPU_GATED_DELTA_SEGMENT_BACKWARD_INL_H_
