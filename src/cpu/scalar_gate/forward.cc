// Forward of log-linear attention with a scalar gate, chunk-wise:
//   o[t] = sum_{s in chunk} P[t, s] v[s] + sum_{live slots b} lambda[t, 7 + b] decay S_b^T q[t]
// Passes 1 and 2 (segments-inl.h) give the nodes that are live where a segment begins; pass 3,
// here, walks every segment. All sums are made in the same order whatever the segments are, except
// under saturation, where the last slot's sum depends on them.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/highway_targets.h"
#include "cpu/scalar_gate/scalar_gate.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/scalar_gate/forward.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "cpu/scalar_gate/segments-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fenwick::cpu {
namespace HWY_NAMESPACE {

// Chunks whose q, k and q k^T are kept while the heads of a group take turns: with K = 128 they and
// one head's states fit a second-level cache of 512 KB.
inline constexpr int64_t kChunksAtOnce = 4;
// Tasks wanted for each thread, so that the last ones to finish do not matter.
inline constexpr int64_t kTasksPerThread = 4;
// Segments of a sequence where they decide rounding and so must not depend on the threads.
inline constexpr int64_t kSaturatedSegments = 16;
// A segment shorter than this many chunks (log2) spends more on its node than it gains.
inline constexpr int kMinSegmentLog2 = 2;

template <typename T>
struct ForwardPass {
  using Node = ScalarNode<T>;
  using Stack = NodeStack<Node>;

  const ScalarGateCall<T>& call;
  const TensorView& o;
  const StateView& final_state;

  // q (scaled), k, q k^T of a chunk.
  struct SharedTiles {
    T *q, *k, *qk;
  };

  void Run(int64_t segment_index, const HeadRange& range) const {
    const Segment& segment = call.segments[segment_index];
    const Sequence& sequence = *segment.sequence;
    const int64_t ld_k = TileLd<T>(call.key_size);
    Scratch scratch;
    SharedTiles shared[kChunksAtOnce];
    for (SharedTiles& tiles : shared) {
      tiles.q = scratch.New<T>(kStateChunk * ld_k);
      tiles.k = scratch.New<T>(kStateChunk * ld_k);
      tiles.qk = scratch.New<T>(TileSize<T>(kStateChunk, kStateChunk));
    }
    T* k_transposed = scratch.New<T>(TileSize<T>(call.key_size, kStateChunk));
    T* v = scratch.New<T>(TileSize<T>(kStateChunk, call.value_size));
    T* scaled = scratch.New<T>(TileSize<T>(kStateChunk, call.value_size));
    T* weights = scratch.New<T>(TileSize<T>(kStateChunk, kStateChunk));
    T* lambda = scratch.New<T>(TileSize<T>(kStateChunk, call.num_levels));
    TilePool<T> pool(scratch, call.tile_size);
    std::vector<Stack> stacks(call.starts.begin() + segment_index * call.heads + range.begin,
                              call.starts.begin() + segment_index * call.heads + range.end);
    const TokenRows keys = call.Keys(sequence, range.group);

    for (int64_t block = segment.begin; block < segment.end; block += kChunksAtOnce) {
      const int64_t block_end = std::min(segment.end, block + kChunksAtOnce);
      for (int64_t chunk = block; chunk < block_end; ++chunk) {
        const SharedTiles& tiles = shared[chunk - block];
        const int64_t first = chunk * kStateChunk;
        const int64_t n = std::min<int64_t>(kStateChunk, sequence.end - first);
        LoadRows(keys, first, n, call.key_size, tiles.k, ld_k);
        if (first + n <= sequence.begin) continue;
        call.LoadQueries(sequence, range.group, first, n, tiles.q);
        Transpose(n, call.key_size, tiles.k, ld_k, k_transposed, TileLd<T>(kStateChunk));
        MatMulToLower(n, call.key_size, tiles.q, ld_k, k_transposed, TileLd<T>(kStateChunk),
                      tiles.qk, TileLd<T>(kStateChunk));
      }
      for (int64_t h = range.begin; h < range.end; ++h) {
        Stack& stack = stacks[h - range.begin];
        for (int64_t chunk = block; chunk < block_end; ++chunk) {
          Chunk(segment, chunk, h, shared[chunk - block], v, scaled, weights, lambda, pool, stack);
        }
      }
    }
  }

  // One chunk of one head: its output rows, then its node. v and scaled [n, V], weights [n, n],
  // lambda [n, L] are scratch.
  void Chunk(const Segment& segment, int64_t chunk, int64_t head, const SharedTiles& tiles, T* v,
             T* scaled, T* weights, T* lambda, TilePool<T>& pool, Stack& stack) const {
    const Sequence& sequence = *segment.sequence;
    const int64_t first = chunk * kStateChunk;
    const int64_t n = std::min<int64_t>(kStateChunk, sequence.end - first);
    const int64_t first_query = std::max(first, sequence.begin);
    const int64_t ld_v = TileLd<T>(call.value_size);
    if (final_state.given() && first == sequence.final_base()) {
      WriteFinalNodes(sequence, head, stack);
    }
    Gate<T> gate;
    gate.Load(call.Gates(sequence, head), first, n);
    LoadRows(call.Values(sequence, head), first, n, call.value_size, v, ld_v);
    if (first_query < first + n) {
      const int levels = call.LevelsRead(sequence);
      const int64_t ld_lambda = TileLd<T>(levels);
      LoadRows(call.LevelScales(sequence, head), first, n, levels, lambda, ld_lambda);
      ChunkWeights(n, gate, tiles.qk, lambda, ld_lambda, levels - 1, weights);
      T* out = scaled;
      MatMulLower<T>(n, call.value_size, weights, TileLd<T>(kStateChunk), v, ld_v, out, ld_v, 0);
      double gap = 0;
      alignas(64) T row_scale[kStateChunk];
      stack.ForEachLive([&](int slot, const Node& node) {
        gate.FromBegin(gap, n, row_scale);
        const int level = ReadLevel(slot, call.num_levels);
        for (int64_t r = 0; r < n; ++r) row_scale[r] *= lambda[r * ld_lambda + level];
        MatMul<Op::kNone>(n, call.value_size, call.key_size, tiles.q, TileLd<T>(call.key_size),
                          node.state, ld_v, out, ld_v,
                          Epilogue<T>{.beta = 1, .row_scale = row_scale});
        gap += node.total;
      });
      StoreRows(out + (first_query - first) * ld_v, ld_v, first_query, first + n - first_query,
                call.value_size, TokenRows(o, TensorView(), sequence, head));
    }
    if (chunk + 1 < segment.end) call.PushChunk(chunk, gate, n, tiles.k, v, scaled, pool, stack);
  }

  // nodes[b] as a reader at final_base sees them; slots without a node are zeroed.
  void WriteFinalNodes(const Sequence& sequence, int64_t head, const Stack& stack) const {
    const TensorView& nodes = final_state.nodes;
    double gap = 0;
    for (int64_t b = 0; b < nodes.size(2); ++b) {
      std::byte* out = NodeData(nodes, sequence.index, head, b);
      if (b < kMaxSlots && stack.slots[b].live()) {
        StoreNode(stack.slots[b].state, static_cast<T>(std::exp(gap)), call.key_size,
                  call.value_size, out);
        gap += stack.slots[b].total;
      } else {
        std::memset(out, 0, call.key_size * call.value_size * sizeof(T));
      }
    }
  }
};

template <typename T>
void Forward(const Inputs& inputs, const TensorView& o, const StateView& final_state,
             int num_threads) {
  ScalarGateCall<T> call(inputs, StateLayout::kKeyByValue);
  const int64_t tasks_wanted = num_threads > 1 ? kTasksPerThread * num_threads : 1;
  const int64_t heads_in_all = std::max<int64_t>(1, call.heads * call.sequences.size());
  const int64_t max_segments =
      call.top != kNoTop ? kSaturatedSegments : (tasks_wanted + heads_in_all - 1) / heads_in_all;
  call.segments = MakeSegments(call.sequences, [&](int64_t chunks) {
    return std::max(kMinSegmentLog2, SegmentLog2(chunks, max_segments, kMaxSlots - 1));
  });
  int64_t range_size = call.heads / call.groups;
  while (range_size > 1 &&
         static_cast<int64_t>(call.segments.size()) * (call.heads / range_size) < tasks_wanted) {
    range_size = (range_size + 1) / 2;
  }
  const std::vector<HeadRange> ranges = MakeHeadRanges(call.groups, call.heads, range_size);
  call.LoadInitialNodes(num_threads);
  call.FindStarts(ranges, num_threads);

  const ForwardPass<T> pass{call, o, final_state};
  ParallelFor(call.segments.size() * ranges.size(), num_threads, [&](int64_t i, int) {
    pass.Run(i / static_cast<int64_t>(ranges.size()), ranges[i % ranges.size()]);
  });
  if (!final_state.given()) return;
  for (const Sequence& sequence : call.sequences) {
    WriteFinalRing(inputs, sequence, final_state);
    if (sequence.first_chunk() != sequence.end_chunk()) continue;
    for (int64_t h = 0; h < call.heads; ++h) {
      NodeStack<ScalarNode<T>> stack;
      call.AddInitialNodes(sequence, h, 0, kMaxSlots, stack);
      pass.WriteFinalNodes(sequence, h, stack);
    }
  }
}

void ForwardFloat(const Inputs& inputs, const TensorView& o, const StateView& final_state,
                  int num_threads) {
  Forward<float>(inputs, o, final_state, num_threads);
}

void ForwardDouble(const Inputs& inputs, const TensorView& o, const StateView& final_state,
                   int num_threads) {
  Forward<double>(inputs, o, final_state, num_threads);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fenwick::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fenwick::cpu {

HWY_EXPORT(ForwardFloat);
HWY_EXPORT(ForwardDouble);

void ScalarGateForward(const Inputs& inputs, const TensorView& o, const StateView& final_state,
                       const Context& context) {
  const int num_threads = context.num_threads > 0 ? context.num_threads : GetNumThreads();
  if (inputs.q.dtype == DType::kFloat64) {
    HWY_DYNAMIC_DISPATCH(ForwardDouble)(inputs, o, final_state, num_threads);
  } else {
    HWY_DYNAMIC_DISPATCH(ForwardFloat)(inputs, o, final_state, num_threads);
  }
}

}  // namespace fenwick::cpu
#endif  // HWY_ONCE
