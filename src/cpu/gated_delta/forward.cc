// Forward of the log-linear gated delta rule. The segments (segments.h) of all
// lines are worked off in waves that fit in kWaveBytesPerThread for each thread:
//   1. every segment by itself: outputs of its local nodes, Q~ P for every token, its own node, P;
//   2. the walk over segments: what is incoming at each start (columns of V never mix, so blocks of
//      columns run in parallel);
//   3. every segment: outputs of its incoming nodes.
// Which thread does what, and which wave a segment is in, changes no bit of the result.
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/thread_pool.h"
#include "cpu/gated_delta/gated_delta.h"
#include "cpu/gated_delta/segments.h"
#include "cpu/highway_targets.h"
#include "cpu/scratch.h"
#include "cpu/tile_layout.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/gated_delta/forward.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "cpu/gated_delta/chunk-inl.h"
#include "cpu/gated_delta/chunk_io-inl.h"
#include "cpu/gated_delta/segment-inl.h"
#include "hwy/aligned_allocator.h"
#include "hwy/highway.h"

#ifndef FENWICK_CPU_GATED_DELTA_FORWARD_ONCE_
#define FENWICK_CPU_GATED_DELTA_FORWARD_ONCE_
namespace fenwick::cpu {

// Memory between the phases of a wave: several segments for every thread (one of K = 128, V = 64
// takes 0.9 MB), small beside the inputs, and phase 3 still finds some of it in the cache.
inline constexpr std::int64_t kWaveBytesPerThread = std::int64_t{8} << 20;

}  // namespace fenwick::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace fenwick::cpu {
namespace HWY_NAMESPACE {

// One segment of a wave and what its phases hand on.
template <typename T>
struct SegmentForward : SegmentBase<T> {
  T* q_read = nullptr;      // [tokens, K] Q~ P, ld_k; if incoming
  T* o = nullptr;           // [tokens, V] outputs of the local nodes, ld_v; if incoming
  T* final_read = nullptr;  // [K, K] P where the final state is taken, ld_k; null also for P = I
};

template <typename T>
class DeltaForwardPass {
 public:
  DeltaForwardPass(const DeltaCall& call, const TensorView& o, const StateView& final_state)
      : call_(call), o_(o), final_state_(final_state) {}

  void Run() {
    std::vector<SegmentForward<T>> wave;
    int64_t elements = 0;
    const int64_t max_bytes = kWaveBytesPerThread * call_.num_threads;
    auto segment = call_.segments.begin();
    for (const Sequence& s : call_.sequences) {
      const auto begin = segment;
      while (segment != call_.segments.end() && segment->sequence == &s) ++segment;
      for (int64_t h = 0; h < call_.H; ++h) {
        if (begin == segment) CopyNodes(s, h);
        for (auto it = begin; it != segment; ++it) {
          SegmentForward<T> work;
          work.segment = *it;
          work.head = h;
          const int64_t size = Layout(work, nullptr);
          if (!wave.empty() && (elements + size) * int64_t{sizeof(T)} > max_bytes) {
            RunWave(wave, elements, &work);
            elements = 0;
          }
          elements += size;
          wave.push_back(work);
        }
      }
      if (final_state_.given()) WriteFinalRing(call_.inputs, s, final_state_);
    }
    if (!wave.empty()) RunWave(wave, elements, nullptr);
  }

 private:
  int64_t state_size() const { return TileSize<T>(call_.K, call_.V); }

  // Assigns the tiles of `work` in `memory` (null: only counts) and returns their elements.
  int64_t Layout(SegmentForward<T>& work, T* memory) const {
    TileArena<T> arena(memory);
    work.LayoutBase(call_, arena);
    const int64_t tokens = (work.segment.end - work.segment.begin) * kStateChunk;
    work.q_read = arena.Take(work.has_incoming, TileSize<T>(tokens, call_.K));
    work.o = arena.Take(work.has_incoming, TileSize<T>(tokens, call_.V));
    work.final_read =
        arena.Take(work.has_incoming && final_state_.given() && work.holds_final_base() &&
                       work.sequence().final_base() / kStateChunk > work.segment.begin,
                   TileSize<T>(call_.K, call_.K));
    return arena.used();
  }

  // `next` is the segment after the wave; if it goes on a line, its incoming nodes are kept.
  void RunWave(std::vector<SegmentForward<T>>& wave, int64_t elements, SegmentForward<T>* next) {
    const int64_t count = static_cast<int64_t>(wave.size());
    const auto memory = hwy::AllocateAligned<T>(std::max<int64_t>(elements, 1));
    T* at = memory.get();
    for (SegmentForward<T>& work : wave) at += Layout(work, at);
    if (!wave[0].segment.first) {
      wave[0].incoming.ForEachLive([&](int slot, const StateNode<T>& node) {
        std::copy_n(carried_.get() + slot * state_size(), state_size(), node.state);
      });
    }
    ParallelFor(count, call_.num_threads, [&](int64_t i, int) { RunLocal(wave[i]); });

    hwy::AlignedFreeUniquePtr<T[]> carry;
    SegmentForward<T> after;
    if (next != nullptr && !next->segment.first) {
      after = *next;
      carry = hwy::AllocateAligned<T>((HighestSlot(after) + 1) * state_size());
      call_.ForEachIncoming(after.segment, [&](int slot) {
        after.incoming.slots[slot].state = carry.get() + slot * state_size();
      });
    }
    const int64_t blocks = (call_.V + kWalkColumns - 1) / kWalkColumns;
    std::vector<int64_t> lines;  // where in the wave each line begins
    for (int64_t i = 0; i < count; ++i) {
      if (i == 0 || wave[i].segment.first) lines.push_back(i);
    }
    ParallelFor(static_cast<int64_t>(lines.size()) * blocks, call_.num_threads,
                [&](int64_t task, int) {
                  const int64_t column = task % blocks * kWalkColumns;
                  const int64_t columns = std::min(kWalkColumns, call_.V - column);
                  int64_t i = lines[task / blocks];
                  for (; !wave[i].segment.last && i + 1 < count; ++i) {
                    WalkOn(call_, wave[i], wave[i + 1].incoming, column, columns);
                  }
                  if (!wave[i].segment.last)
                    WalkOn(call_, wave[i], after.incoming, column, columns);
                });
    carried_ = std::move(carry);
    ParallelFor(count, call_.num_threads, [&](int64_t i, int) {
      if (wave[i].has_incoming) ReadIncoming(wave[i]);
    });
    wave.clear();
  }

  int HighestSlot(const SegmentForward<T>& work) const {
    int highest = 0;
    call_.ForEachIncoming(work.segment, [&](int slot) { highest = slot; });
    return highest;
  }

  // Phase 1.
  void RunLocal(SegmentForward<T>& work) {
    Scratch scratch;
    const Inputs& in = call_.inputs;
    const Sequence& sequence = work.sequence();
    const int64_t K = call_.K, V = call_.V;
    const DeltaRows rows(in, sequence, work.head, call_.group(work.head));
    DeltaChunk<T> c(scratch, K, V, call_.L);
    const int64_t ld_v = c.ld_v;
    T* o = scratch.New<T>(kStateChunk * ld_v);
    T* transition = work.transition;
    if (work.has_incoming && transition == nullptr) transition = scratch.New<T>(K * c.ld_k);
    TilePool<T> pool(scratch, state_size());
    NodeStack<StateNode<T>> local;
    call_.ForEachInitialLocal(work.segment, [&](int slot) {
      local.slots[slot].state = pool.Take();
      LoadInitialNode(call_, work, slot, local.slots[slot].state);
    });
    if (work.segment.first) {
      work.incoming.ForEachLive([&](int slot, const StateNode<T>& node) {
        LoadInitialNode(call_, work, slot, node.state);
      });
    }

    const int64_t final_chunk = sequence.final_base() / kStateChunk;
    for (int64_t chunk = work.segment.begin; chunk < work.segment.end; ++chunk) {
      const bool first = chunk == work.segment.begin;
      if (final_state_.given() && chunk == final_chunk) {
        WriteLocalNodes(work, local);
        if (work.final_read != nullptr) {
          std::copy_n(transition, K * c.ld_k, work.final_read);
        }
      }
      const ChunkSpan span(sequence, chunk);
      LoadKeys(rows, span, c);
      LoadValues(rows, span, c);
      ScoreKeys(c);
      PrepareKeys(c);
      if (span.has_queries()) {
        LoadQueries(rows, span, in.scale, c);
        LoadLevels(rows, span, c.L, c.lambda);
        ScoreQueries(c);
        PrepareQueries(c);
        const int64_t row = (chunk - work.segment.begin) * kStateChunk;
        T* out = work.has_incoming ? work.o + row * ld_v : o;
        MatMulLower(c.n, V, c.p, c.ld_c, c.v(), c.ld_kv, out, ld_v, T{0});
        local.ForEachLive([&](int slot, const StateNode<T>& node) {
          MatMul<Op::kNone>(c.n, V, K, c.q_read, c.ld_k, node.state, ld_v, out, ld_v,
                            Epilogue<T>{.beta = 1, .row_scale = c.level(ReadLevel(slot, call_.L))});
        });
        if (!work.has_incoming) {
          Store(sequence, work.head, span, out);
        } else if (T* read = work.q_read + row * c.ld_k; first) {
          std::copy_n(c.q_read, c.n * c.ld_k, read);
        } else {
          MatMul<Op::kNone>(c.n, K, K, c.q_read, c.ld_k, transition, c.ld_k, read, c.ld_k);
        }
      }
      if (chunk + 1 == sequence.end_chunk()) break;
      if (work.has_incoming) {
        first ? WriteTransition(c, transition) : ApplyTransition(c, K, transition, c.ld_k);
      }
      // What merges is added up first, and carried at once.
      const int target = local.Push(chunk, call_.top, StateNode<T>(),
                                    [&](StateNode<T>& newer, const StateNode<T>& older) {
                                      ScaleAdd(state_size(), T{1}, newer.state, T{1}, older.state);
                                      pool.Give(older.state);
                                    });
      local.ForEachLive([&](int slot, const StateNode<T>& node) {
        slot == target ? AdvanceState(c, node.state) : ApplyTransition(c, V, node.state, ld_v);
      });
      if (StateNode<T>& node = local.slots[target]; !node.live()) {
        node.state = pool.Take();
        AddNewState(c, /*accumulate=*/false, node.state);
      }
    }
    if (work.node != nullptr) {
      std::copy_n(local.slots[work.target(call_.top)].state, state_size(), work.node);
    }
  }

  // Phase 3.
  void ReadIncoming(const SegmentForward<T>& work) {
    Scratch scratch;
    const Sequence& sequence = work.sequence();
    const int64_t K = call_.K, V = call_.V, ld_k = TileLd<T>(K), ld_v = TileLd<T>(V);
    const DeltaRows rows(call_.inputs, sequence, work.head, call_.group(work.head));
    T* lambda = scratch.New<T>(call_.L * kStateChunk);
    for (int64_t chunk = work.segment.begin; chunk < work.segment.end; ++chunk) {
      const ChunkSpan span(sequence, chunk);
      if (!span.has_queries()) continue;
      LoadLevels(rows, span, call_.L, lambda);
      const int64_t row = (chunk - work.segment.begin) * kStateChunk;
      T* o = work.o + row * ld_v;
      work.incoming.ForEachLive([&](int slot, const StateNode<T>& node) {
        MatMul<Op::kNone>(
            span.count, V, K, work.q_read + row * ld_k, ld_k, node.state, ld_v, o, ld_v,
            Epilogue<T>{.beta = 1, .row_scale = lambda + ReadLevel(slot, call_.L) * kStateChunk});
      });
      Store(sequence, work.head, span, o);
    }
    if (final_state_.given() && work.holds_final_base()) {
      T* state = scratch.New<T>(state_size());
      work.incoming.ForEachLive([&](int slot, const StateNode<T>& node) {
        const T* carried = node.state;
        if (work.final_read != nullptr) {
          MatMul<Op::kNone>(K, V, K, work.final_read, ld_k, node.state, ld_v, state, ld_v);
          carried = state;
        }
        AddToFinalNode(work, slot, carried);
      });
    }
  }

  void Store(const Sequence& sequence, int64_t head, const ChunkSpan& span, const T* o) {
    const TokenRows rows(o_, TensorView(), sequence, head);
    StoreRows(o + span.queries * TileLd<T>(call_.V), TileLd<T>(call_.V), span.first + span.queries,
              span.count - span.queries, call_.V, rows);
  }

  T* FinalNode(const Sequence& sequence, int64_t head, int64_t slot) {
    return reinterpret_cast<T*>(NodeData(final_state_.nodes, sequence.index, head, slot));
  }

  void AddToFinalNode(const SegmentForward<T>& work, int slot, const T* state) {
    T* out = FinalNode(work.sequence(), work.head, slot);
    const int64_t ld_v = TileLd<T>(call_.V);
    for (int64_t i = 0; i < call_.K; ++i) {
      for (int64_t j = 0; j < call_.V; ++j) out[i * call_.V + j] += state[i * ld_v + j];
    }
  }

  // Local nodes at the final base; all other slots are zeroed, phase 3 adds the incoming ones.
  void WriteLocalNodes(const SegmentForward<T>& work, const NodeStack<StateNode<T>>& local) {
    for (int64_t b = 0; b < final_state_.nodes.size(2); ++b) {
      std::fill_n(FinalNode(work.sequence(), work.head, b), call_.K * call_.V, T{0});
    }
    local.ForEachLive(
        [&](int slot, const StateNode<T>& node) { AddToFinalNode(work, slot, node.state); });
  }

  // The final nodes of a sequence without tokens.
  void CopyNodes(const Sequence& sequence, int64_t head) {
    if (!final_state_.given()) return;
    const int64_t initial_slots =
        call_.inputs.initial_state.given() ? call_.inputs.initial_state.nodes.size(2) : 0;
    for (int64_t b = 0; b < final_state_.nodes.size(2); ++b) {
      T* out = FinalNode(sequence, head, b);
      if (b < initial_slots && SlotIsLive(sequence.first_chunk(), static_cast<int>(b), call_.top)) {
        std::copy_n(reinterpret_cast<const T*>(
                        NodeData(call_.inputs.initial_state.nodes, sequence.index, head, b)),
                    call_.K * call_.V, out);
      } else {
        std::fill_n(out, call_.K * call_.V, T{0});
      }
    }
  }

  const DeltaCall& call_;
  const TensorView& o_;
  const StateView& final_state_;
  hwy::AlignedFreeUniquePtr<T[]> carried_;  // incoming nodes of a line that goes on, by slot
};

void RunDeltaForward(const DeltaCall& call, const TensorView& o, const StateView& final_state) {
  if (o.dtype == DType::kFloat64) {
    DeltaForwardPass<double>(call, o, final_state).Run();
  } else {
    DeltaForwardPass<float>(call, o, final_state).Run();
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fenwick::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fenwick::cpu {

HWY_EXPORT(RunDeltaForward);

void GatedDeltaForward(const Inputs& inputs, const TensorView& o, const StateView& final_state,
                       const Context& context) {
  const DeltaCall call(inputs, context);
  HWY_DYNAMIC_DISPATCH(RunDeltaForward)(call, o, final_state);
}

}  // namespace fenwick::cpu
#endif
