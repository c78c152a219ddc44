// Backward of the log-linear gated delta rule. The adjoint of a read of a node is a write into its
// gradient, and the gradient of a merged node is that of each node that went into it, so time runs
// backwards through the same segments (segments.h):
//   1. every segment by itself: its node and P (as forward), and for each incoming node S, read as
//      (Q~ P) S, what the segment's outputs give to S': sum of (Q~ P)^T diag(lambda) dO;
//   2. the walk over segments, forwards for the incoming S and backwards for their gradients:
//      S' at the start = (that sum) + P^T (S' at the end);
//   3. every segment: states at each chunk's start once more, then chunk by chunk backwards
//      (chunk_backward-inl.h). Few incoming nodes are carried like the local ones; for many, P is
//      one more carried state, K wide, with the gradient P' = sum S'(end) S^T at the end and
//      Q~^T (sum diag(lambda) dO S^T) at each chunk.
// Nothing is kept from the forward. Heads of a group are summed by one task, in order.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "core/thread_pool.h"
#include "cpu/gated_delta/gated_delta.h"
#include "cpu/gated_delta/segments.h"
#include "cpu/highway_targets.h"
#include "cpu/scratch.h"
#include "cpu/tile_layout.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/gated_delta/backward.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "cpu/gated_delta/chunk_io-inl.h"
#include "cpu/gated_delta/segment_backward-inl.h"
#include "hwy/aligned_allocator.h"
#include "hwy/highway.h"

#ifndef FENWICK_CPU_GATED_DELTA_BACKWARD_ONCE_
#define FENWICK_CPU_GATED_DELTA_BACKWARD_ONCE_
namespace fenwick::cpu {

// Memory between the phases: whole groups of heads are worked off together while they fit.
inline constexpr std::int64_t kBatchBytesPerThread = std::int64_t{32} << 20;

}  // namespace fenwick::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace fenwick::cpu {
namespace HWY_NAMESPACE {

// All segments of the heads of one group of one sequence: segments[h * num_segments + i].
template <typename T>
struct GroupWork {
  const Sequence* sequence;
  int64_t group;
  int64_t num_segments;
  std::vector<SegmentBackward<T>> segments;
};

template <typename T>
class DeltaBackwardPass {
 public:
  DeltaBackwardPass(const DeltaCall& call, const TensorView& d_o, const StateGradView& d_final,
                    const Gradients& gradients)
      : call_(call),
        d_o_(d_o),
        d_final_(d_final),
        out_(gradients),
        adjoint_(call, d_o, d_final, gradients) {}

  void Run() {
    for (const TensorView* view :
         {&out_.initial_state.k, &out_.initial_state.v, &out_.initial_state.g,
          &out_.initial_state.beta, &out_.initial_state.nodes}) {
      if (view->given() && view->num_elements() > 0) {
        std::memset(view->data, 0, view->num_elements() * ElementSize(view->dtype));
      }
    }
    std::vector<GroupWork<T>> batch;
    int64_t elements = 0;
    const int64_t max_bytes = kBatchBytesPerThread * call_.num_threads;
    auto segment = call_.segments.begin();
    for (const Sequence& s : call_.sequences) {
      const auto begin = segment;
      while (segment != call_.segments.end() && segment->sequence == &s) ++segment;
      if (begin == segment) PassThrough(s);
      for (int64_t group = 0; group < call_.G && begin != segment; ++group) {
        GroupWork<T> work{&s, group, segment - begin, {}};
        int64_t size = 0;
        for (int64_t h = 0; h < heads_per_group(); ++h) {
          for (auto it = begin; it != segment; ++it) {
            SegmentBackward<T>& segment_work = work.segments.emplace_back();
            segment_work.segment = *it;
            segment_work.head = group * heads_per_group() + h;
            size += Layout(segment_work, nullptr);
          }
        }
        if (!batch.empty() && (elements + size) * int64_t{sizeof(T)} > max_bytes) {
          RunBatch(batch, elements);
          elements = 0;
        }
        elements += size;
        batch.push_back(std::move(work));
      }
    }
    if (!batch.empty()) RunBatch(batch, elements);
  }

 private:
  int64_t heads_per_group() const { return call_.H / call_.G; }
  int64_t state_size() const { return TileSize<T>(call_.K, call_.V); }

  int64_t Layout(SegmentBackward<T>& work, T* memory) const {
    TileArena<T> arena(memory);
    work.LayoutBase(call_, arena);
    call_.ForEachIncoming(work.segment, [&](int slot) {
      work.d_incoming.slots[slot].state = arena.Take(true, state_size());
    });
    return arena.used();
  }

  void RunBatch(std::vector<GroupWork<T>>& batch, int64_t elements) {
    const auto memory = hwy::AllocateAligned<T>(std::max<int64_t>(elements, 1));
    T* at = memory.get();
    std::vector<SegmentBackward<T>*> segments;
    std::vector<SegmentBackward<T>*> lines;  // first segment of each head
    std::vector<std::pair<GroupWork<T>*, int64_t>> group_segments;
    for (GroupWork<T>& group : batch) {
      for (SegmentBackward<T>& work : group.segments) {
        at += Layout(work, at);
        segments.push_back(&work);
        if (work.segment.first) lines.push_back(&work);
      }
      for (int64_t i = 0; i < group.num_segments; ++i) group_segments.emplace_back(&group, i);
    }
    ParallelFor(static_cast<int64_t>(segments.size()), call_.num_threads, [&](int64_t i, int) {
      if (segments[i]->has_incoming || !segments[i]->segment.last) SumSegment(*segments[i]);
    });
    const int64_t blocks = (call_.V + kWalkColumns - 1) / kWalkColumns;
    ParallelFor(static_cast<int64_t>(lines.size()) * blocks, call_.num_threads,
                [&](int64_t task, int) {
                  const int64_t column = task % blocks * kWalkColumns;
                  Walk(lines[task / blocks], column, std::min(kWalkColumns, call_.V - column));
                });
    ParallelFor(static_cast<int64_t>(group_segments.size()), call_.num_threads,
                [&](int64_t i, int) {
                  RunGroupSegment(*group_segments[i].first, group_segments[i].second);
                });
    batch.clear();
  }

  // Phase 1.
  void SumSegment(SegmentBackward<T>& work) {
    Scratch scratch;
    const Sequence& sequence = work.sequence();
    const int64_t K = call_.K, V = call_.V;
    const DeltaRows rows(call_.inputs, sequence, work.head, call_.group(work.head));
    const TokenRows d_o_rows = TokenRows(d_o_, TensorView(), sequence, work.head);
    DeltaChunk<T> c(scratch, K, V, call_.L);
    const int64_t ld_k = c.ld_k, ld_v = c.ld_v;
    T* d_o = scratch.New<T>(kStateChunk * ld_v);
    T* weighted = scratch.New<T>(kStateChunk * ld_v);
    T* read = scratch.New<T>(kStateChunk * ld_k);
    T* state = scratch.New<T>(state_size());
    T* transition = work.transition;
    if (work.has_incoming && transition == nullptr) transition = scratch.New<T>(K * ld_k);

    // One running sum in place of the local nodes: the transition is linear.
    if (work.node != nullptr) std::fill_n(work.node, state_size(), T{0});
    if (work.segment.first) {
      call_.ForEachInitialLocal(work.segment, [&](int slot) {
        if (work.node == nullptr) return;
        LoadInitialNode(call_, work, slot, state);
        ScaleAdd(state_size(), T{1}, work.node, T{1}, state);
      });
      work.incoming.ForEachLive([&](int slot, const StateNode<T>& node) {
        LoadInitialNode(call_, work, slot, node.state);
      });
    }
    work.d_incoming.ForEachLive(
        [&](int, const StateNode<T>& node) { std::fill_n(node.state, state_size(), T{0}); });

    for (int64_t chunk = work.segment.begin; chunk < work.segment.end; ++chunk) {
      const bool first = chunk == work.segment.begin;
      if (d_final_.given() && chunk == sequence.final_base() / kStateChunk) {
        work.d_incoming.ForEachLive([&](int slot, const StateNode<T>& node) {
          adjoint_.LoadFinalNode(work, slot, state);
          if (first) {
            ScaleAdd(state_size(), T{1}, node.state, T{1}, state);
          } else {
            MatMul<Op::kTranspose>(K, V, K, transition, ld_k, state, ld_v, node.state, ld_v,
                                   Epilogue<T>{.beta = 1});
          }
        });
      }
      const ChunkSpan span(sequence, chunk);
      LoadKeys(rows, span, c);
      LoadValues(rows, span, c);
      ScoreKeys(c);
      PrepareKeys(c);
      if (work.has_incoming && span.has_queries()) {
        LoadQueries(rows, span, call_.inputs.scale, c);
        LoadLevels(rows, span, c.L, c.lambda);
        ScoreQueries(c);
        PrepareReads(c);
        LoadRows(d_o_rows, span.first, c.n, V, d_o, ld_v);
        const T* q_read = c.q_read;
        if (!first) {
          MatMul<Op::kNone>(c.n, K, K, c.q_read, ld_k, transition, ld_k, read, ld_k);
          q_read = read;
        }
        work.d_incoming.ForEachLive([&](int slot, const StateNode<T>& node) {
          ScaleRows(c.n, PaddedColumns<T>(V), c.level(ReadLevel(slot, call_.L)), d_o, ld_v,
                    weighted, ld_v);
          MatMul<Op::kTranspose>(K, V, c.n, q_read, ld_k, weighted, ld_v, node.state, ld_v,
                                 Epilogue<T>{.beta = 1});
        });
      }
      if (chunk + 1 == sequence.end_chunk()) break;
      if (work.has_incoming) {
        first ? WriteTransition(c, transition) : ApplyTransition(c, K, transition, ld_k);
      }
      if (work.node != nullptr) AdvanceState(c, work.node);
    }
  }

  // Phase 2 for the segments of one head, columns [column, column + columns) of V.
  void Walk(SegmentBackward<T>* line, int64_t column, int64_t columns) {
    const int64_t K = call_.K, ld_k = TileLd<T>(K), ld_v = TileLd<T>(call_.V);
    int64_t last = 0;
    for (; !line[last].segment.last; ++last) {
      WalkOn(call_, line[last], line[last + 1].incoming, column, columns);
    }
    for (int64_t i = last - 1; i >= 0; --i) {
      line[i].d_incoming.ForEachLive([&](int slot, const StateNode<T>& node) {
        MatMul<Op::kTranspose>(K, columns, K, line[i].transition, ld_k,
                               adjoint_.GradientAtEnd(line[i], line[i + 1], slot) + column, ld_v,
                               node.state + column, ld_v, Epilogue<T>{.beta = 1});
      });
    }
  }

  // Phase 3 for all heads of a group.
  void RunGroupSegment(const GroupWork<T>& group, int64_t index) {
    Scratch scratch;
    const Sequence& s = *group.sequence;
    const int64_t K = call_.K, ld_k = TileLd<T>(K);
    const Segment& segment = group.segments[index].segment;
    std::vector<GroupChunk<T>> chunks;
    for (int64_t chunk = segment.begin; chunk < segment.end; ++chunk) {
      chunks.push_back(adjoint_.LoadGroupChunk(s, group.group, chunk, scratch));
    }
    const int64_t first = segment.begin * kStateChunk;
    const int64_t tokens = std::min(segment.end * kStateChunk, s.end) - first;
    T* dq = scratch.New<T>(tokens * ld_k);
    T* dk = scratch.New<T>(tokens * ld_k);
    std::fill_n(dq, tokens * ld_k, T{0});
    std::fill_n(dk, tokens * ld_k, T{0});
    for (int64_t h = 0; h < heads_per_group(); ++h) {
      const SegmentBackward<T>* work = &group.segments[h * group.num_segments + index];
      adjoint_.Run(*work, work->segment.last ? nullptr : work + 1, chunks, dq, dk);
    }
    for (int64_t chunk = segment.begin; chunk < segment.end; ++chunk) {
      const int64_t i = chunk - segment.begin, offset = i * kStateChunk * ld_k;
      adjoint_.FinishGroupChunk(ChunkSpan(s, chunk), chunks[i], dq + offset, dk + offset);
    }
    adjoint_.AddFinalRing(d_final_.k, s, group.group, first, tokens, K, dk, ld_k);
    StoreRows(dq, ld_k, first, tokens, K, TokenRows(out_.q, TensorView(), s, group.group));
    StoreRows(dk, ld_k, first, tokens, K, TokenRows(out_.k, out_.initial_state.k, s, group.group));
  }

  // A sequence without tokens hands the gradients of its nodes through.
  void PassThrough(const Sequence& s) const {
    if (!d_final_.given() || !out_.initial_state.given()) return;
    const int64_t bytes = call_.K * call_.V * sizeof(T);
    for (int64_t head = 0; head < call_.H; ++head) {
      for (int64_t b = 0; b < d_final_.nodes.size(2); ++b) {
        if (!SlotIsLive(s.first_chunk(), static_cast<int>(b), call_.top)) continue;
        std::memcpy(NodeData(out_.initial_state.nodes, s.index, head, b),
                    NodeData(d_final_.nodes, s.index, head, b), bytes);
      }
    }
  }

  const DeltaCall& call_;
  const TensorView& d_o_;
  const StateGradView& d_final_;
  const Gradients& out_;
  const SegmentAdjoint<T> adjoint_;
};

void RunDeltaBackward(const DeltaCall& call, const TensorView& d_o, const StateGradView& d_final,
                      const Gradients& gradients) {
  if (d_o.dtype == DType::kFloat64) {
    DeltaBackwardPass<double>(call, d_o, d_final, gradients).Run();
  } else {
    DeltaBackwardPass<float>(call, d_o, d_final, gradients).Run();
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fenwick::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fenwick::cpu {

HWY_EXPORT(RunDeltaBackward);

void GatedDeltaBackward(const Inputs& inputs, const TensorView& d_o,
                        const StateGradView& d_final_state, const Gradients& gradients,
                        const Context& context) {
  const DeltaCall call(inputs, context);
  HWY_DYNAMIC_DISPATCH(RunDeltaBackward)(call, d_o, d_final_state, gradients);
}

}  // namespace fenwick::cpu
#endif
