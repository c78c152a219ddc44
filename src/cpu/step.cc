// The recurrent step over a state that keeps the newest tokens as they
// came (state.h). For a query at t, u walks back from t through the tokens of the ring:
//   u = q[t];  for s = t .. base:   o += lambda[t, level(t, s)] (u.w[s]) v[s];   u = M[s]^T u
// with M[s] = exp(g[s]), w = k for the scalar gate and M[s] = exp(g[s]) (I - beta k k^T), w = beta
// k for the delta rule; then o += lambda[t, level] S^T u for every live node S. A token costs one
// read of each node and of the ring. Once every kStateChunk tokens the oldest chunk is folded into
// the nodes; the sum of the nodes that this will merge is made one chunk earlier (state.h, "The
// merged past"), so that just after a power of two a token reads one node and not one a level.
#include "cpu/step.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "core/thread_pool.h"
#include "cpu/highway_targets.h"
#include "cpu/segments.h"
#include "cpu/sequence.h"
#include "cpu/walk.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/step.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "cpu/gated_delta/chunk-inl.h"
#include "cpu/scalar_gate/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fenwick::cpu {
namespace HWY_NAMESPACE {

// Tokens that one step looks at: a full ring and the new ones.
inline constexpr int64_t kWindow = kStateRing + kStateChunk;

// Marks that the merged past is kept (state.h). No token's log decay is positive.
inline constexpr float kMergedPastMark = std::numeric_limits<float>::max();

// out[i] = a . b[i], rows of b `stride` elements apart; kRows rows share the loads of a.
template <int kRows, typename T>
HWY_INLINE void DotRows(int64_t count, const T* HWY_RESTRICT a, const T* HWY_RESTRICT b,
                        int64_t stride, T* HWY_RESTRICT out) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  constexpr int kChains = kRows == 1 ? 4 : 1;  // sums that hide the latency of an addition
  hn::Vec<decltype(d)> sum[kRows * kChains];
  HWY_UNROLL(4)
  for (int r = 0; r < kRows * kChains; ++r) sum[r] = hn::Zero(d);
  int64_t i = 0;
  for (; i + kChains * lanes <= count; i += kChains * lanes) {
    HWY_UNROLL(4)
    for (int c = 0; c < kChains; ++c) {
      const auto x = hn::LoadU(d, a + i + c * lanes);
      HWY_UNROLL(4)
      for (int r = 0; r < kRows; ++r) {
        sum[r * kChains + c] =
            hn::MulAdd(x, hn::LoadU(d, b + r * stride + i + c * lanes), sum[r * kChains + c]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    auto row = sum[r * kChains];
    for (int c = 1; c < kChains; ++c) row = hn::Add(row, sum[r * kChains + c]);
    out[r] = hn::GetLane(hn::SumOfLanes(d, row));
    for (int64_t j = i; j < count; ++j) out[r] += a[j] * b[r * stride + j];
  }
}

// out = alpha out + beta in.
template <typename T>
void CombineRow(int64_t count, T alpha, T* HWY_RESTRICT out, T beta, const T* HWY_RESTRICT in) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto va = hn::Set(d, alpha), vb = hn::Set(d, beta);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto x = hn::Mul(va, hn::LoadU(d, out + i));
    hn::StoreU(hn::MulAdd(vb, hn::LoadU(d, in + i), x), d, out + i);
  }
  for (; i < count; ++i) out[i] = alpha * out[i] + beta * in[i];
}

// out [columns] += u [rows] S [rows, columns]; kVectors vectors of columns stay in registers.
template <int kVectors, typename T>
HWY_INLINE void ReadColumns(int64_t rows, const T* HWY_RESTRICT u, const T* HWY_RESTRICT s,
                            int64_t ld, T* HWY_RESTRICT out) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  hn::Vec<decltype(d)> sum[kVectors];
  HWY_UNROLL(8)
  for (int j = 0; j < kVectors; ++j) sum[j] = hn::LoadU(d, out + j * lanes);
  for (int64_t i = 0; i < rows; ++i) {
    const auto x = hn::Set(d, u[i]);
    HWY_UNROLL(8)
    for (int j = 0; j < kVectors; ++j) {
      sum[j] = hn::MulAdd(x, hn::LoadU(d, s + i * ld + j * lanes), sum[j]);
    }
  }
  HWY_UNROLL(8)
  for (int j = 0; j < kVectors; ++j) hn::StoreU(sum[j], d, out + j * lanes);
}

// As ReadColumns for any number of columns; reads nothing beyond them.
template <typename T>
void ReadRows(int64_t rows, int64_t columns, const T* u, const T* s, int64_t ld, T* out) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t j = 0;
  for (; j + 8 * lanes <= columns; j += 8 * lanes) ReadColumns<8>(rows, u, s + j, ld, out + j);
  for (; j + lanes <= columns; j += lanes) ReadColumns<1>(rows, u, s + j, ld, out + j);
  for (; j < columns; ++j) {
    T sum = out[j];
    for (int64_t i = 0; i < rows; ++i) sum += u[i] * s[i * ld + j];
    out[j] = sum;
  }
}

template <typename T, Transition kTransition>
struct HeadStep {
  static constexpr bool kDelta = kTransition == Transition::kGatedDelta;

  HeadStep(const Inputs& in, const TensorView& o, const Sequence& s, int64_t h)
      : inputs(in),
        sequence(s),
        head(h),
        key_size(in.q.size(3)),
        value_size(in.v.size(3)),
        num_levels(static_cast<int>(in.level_scales.size(3))),
        top(WalkTop(in.level_policy == LevelPolicy::kSaturate, num_levels)),
        queries(in.q, TensorView(), s, Group()),
        keys(in.k, in.initial_state.k, s, Group()),
        values(in.v, in.initial_state.v, s, h),
        gates(in.g, in.initial_state.g, s, h),
        betas(in.beta, in.initial_state.beta, s, h),
        level_scales(in.level_scales, TensorView(), s, h),
        outputs(o, TensorView(), s, h) {}

  const Inputs& inputs;
  const Sequence& sequence;
  const int64_t head, key_size, value_size;
  const int num_levels, top;
  const TokenRows queries, keys, values, gates, betas, level_scales, outputs;

  int64_t Group() const { return head / (inputs.v.size(2) / inputs.q.size(2)); }
  T* Node(int slot) const {
    return reinterpret_cast<T*>(
        NodeData(inputs.initial_state.nodes, sequence.index, head, slot));  // [K, V]
  }

  void Run() {
    Scratch scratch;
    T* g = scratch.New<T>(kWindow);  // log decays from sequence.base on
    T* beta = scratch.New<T>(kWindow);
    const int64_t window = sequence.end - sequence.base;
    LoadScalars(gates, sequence.base, window, g);
    if constexpr (kDelta) LoadScalars(betas, sequence.base, window, beta);
    T* u = scratch.New<T>(PaddedColumns<T>(key_size));
    T* row = scratch.New<T>(PaddedColumns<T>(std::max(key_size, value_size)));
    T* out = scratch.New<T>(PaddedColumns<T>(value_size));
    T* lambda = scratch.New<T>(PaddedColumns<T>(num_levels));
    T* decays = scratch.New<T>(PaddedColumns<T>(kWindow + 1));
    T* weights = scratch.New<T>(kWindow);
    T* past_buffer = scratch.New<T>(key_size * value_size);
    const int levels = std::min(num_levels, NumLevels(sequence.end));
    int64_t base = sequence.base;
    T* past = nullptr;
    for (int64_t t = sequence.begin; t < sequence.end; ++t) {
      if (t - base == kStateRing) {
        Fold(base);
        base += kStateChunk;
        past = nullptr;
      }
      if (past == nullptr && t - base >= kStateChunk) past = MergedPast(base, past_buffer);
      LoadRow(level_scales.dtype(), level_scales.Row(t), levels, lambda);
      LoadRow(queries.dtype(), queries.Row(t), key_size, u);
      const T scale = static_cast<T>(inputs.scale);
      for (int64_t i = 0; i < key_size; ++i) u[i] *= scale;
      std::fill_n(out, value_size, T{0});
      const int64_t first = base - sequence.base;
      const int64_t count = t - base + 1;
      Decays(g, first, count, decays);
      if constexpr (kDelta) {
        WalkBack(base, count, beta + first, u, row, weights);
      } else {
        Weights(base, count, u, row, weights);
      }
      for (int64_t i = 0; i < count; ++i) {
        weights[i] *= decays[i + 1] * lambda[SaturatedLevel(t, base + i, num_levels)];
      }
      ReadValues(base, count, weights, row, out);
      ReadNodes(t, base, past, lambda, decays[0], u, row, out);
      StoreRow(outputs.dtype(), out, value_size, outputs.Row(t));
    }
  }

  static constexpr DType kNative = sizeof(T) == 4 ? DType::kFloat32 : DType::kFloat64;

  // f(first token, tokens, their rows, elements between rows) for runs of rows that lie in memory
  // as elements of T; tokens of other storage types come one by one, converted into `buffer`.
  template <class F>
  static void ForEachRun(const TokenRows& rows, int64_t begin, int64_t end, int64_t columns,
                         T* buffer, F&& f) {
    for (int64_t s = begin; s < end;) {
      if (rows.dtype() == kNative) {
        const int64_t run_end = rows.RunEnd(s, end);
        f(s, run_end - s, reinterpret_cast<const T*>(rows.Row(s)),
          rows.RunStride(s) / static_cast<int64_t>(sizeof(T)));
        s = run_end;
      } else {
        LoadRow(rows.dtype(), rows.Row(s), columns, buffer);
        f(s++, int64_t{1}, static_cast<const T*>(buffer), columns);
      }
    }
  }

  // weights[i] = q . k[base + i].
  void Weights(int64_t base, int64_t count, const T* q, T* buffer, T* weights) const {
    ForEachRun(keys, base, base + count, key_size, buffer,
               [&](int64_t s, int64_t rows, const T* k, int64_t stride) {
                 T* out = weights + s - base;
                 int64_t i = 0;
                 for (; i + 4 <= rows; i += 4) {
                   DotRows<4>(key_size, q, k + i * stride, stride, out + i);
                 }
                 for (; i < rows; ++i) DotRows<1>(key_size, q, k + i * stride, stride, out + i);
               });
  }

  // The same for the delta rule without its decays: weights[i] = beta u . k with u as the tokens
  // after base + i leave it. u becomes what a reader at base - 1 is asked.
  void WalkBack(int64_t base, int64_t count, const T* beta, T* u, T* buffer, T* weights) const {
    for (int64_t i = count - 1; i >= 0; --i) {
      const T* k = buffer;
      if (keys.dtype() == kNative) {
        k = reinterpret_cast<const T*>(keys.Row(base + i));
      } else {
        LoadRow(keys.dtype(), keys.Row(base + i), key_size, buffer);
      }
      DotRows<1>(key_size, u, k, 0, weights + i);
      weights[i] *= beta[i];
      CombineRow(key_size, T{1}, u, -weights[i], k);
    }
  }

  // out += weights[i] v[base + i].
  void ReadValues(int64_t base, int64_t count, const T* weights, T* buffer, T* out) const {
    ForEachRun(values, base, base + count, value_size, buffer,
               [&](int64_t s, int64_t rows, const T* v, int64_t stride) {
                 ReadRows(rows, value_size, weights + s - base, v, stride, out);
               });
  }

  // decays[i] = exp(g[first + i] + ... + g[first + count - 1]), i <= count: sums from the newest
  // token back, never a difference.
  static void Decays(const T* g, int64_t first, int64_t count, T* decays) {
    double sum = 0;
    decays[count] = 0;
    for (int64_t i = count - 1; i >= 0; --i) decays[i] = static_cast<T>(sum += g[first + i]);
    std::fill(decays + count + 1, decays + PaddedColumns<T>(count + 1), T{0});
    ExpVector(count + 1, decays);
  }

  // How many of the lowest slots are the merged past of a ring that begins with chunk `chunk`:
  // those that its fold merges into a dead slot. 0 where that is less than two nodes.
  int NumMerged(int64_t chunk) const {
    const int target = MergeSlot(chunk, top);
    return target >= 2 && !SlotIsLive(chunk, target, top) ? target : 0;
  }

  // The sum [K, V] of the merged past, null where there is none, for a query that is not the ring's
  // last. It is kept in the slot of the next fold or, in a state that has no such slot yet, made in
  // `buffer`.
  T* MergedPast(int64_t base, T* buffer) const {
    const int merged = NumMerged(base / kStateChunk);
    if (merged == 0) return nullptr;
    const StateView& state = inputs.initial_state;
    const bool kept = merged < state.nodes.size(2);
    T* sum = kept ? Node(merged) : buffer;
    T* mark = static_cast<T*>(state.g.data) + sequence.index * state.g.stride(0) +
              (base + kStateRing - 1) % kStateRing * state.g.stride(1) + head;
    if (kept && *mark == kMergedPastMark) return sum;
    for (int64_t i = 0; i < key_size; ++i) {
      T* row = sum + i * value_size;
      std::copy_n(Node(0) + i * value_size, value_size, row);
      for (int b = 1; b < merged; ++b) {
        CombineRow(value_size, T{1}, row, T{1}, Node(b) + i * value_size);
      }
    }
    if (kept) *mark = kMergedPastMark;
    return sum;
  }

  // f(slot, node) for each live node; the merged past, where given, stands for its nodes as slot 0.
  template <class F>
  void ForEachNode(int64_t chunks, T* past, F&& f) const {
    if (past != nullptr) f(0, past);
    for (int b = past != nullptr ? NumMerged(chunks) : 0; b <= top && chunks >> b != 0; ++b) {
      if (SlotIsLive(chunks, b, top)) f(b, Node(b));
    }
  }

  // out += lambda decay S^T u for each live node; they end at `base` or before.
  void ReadNodes(int64_t t, int64_t base, T* past, const T* lambda, T decay, const T* u, T* scaled,
                 T* out) const {
    const int64_t chunks = base / kStateChunk;
    ForEachNode(chunks, past, [&](int slot, const T* node) {
      const int64_t newest = (chunks >> slot << slot) * kStateChunk - 1;  // token of the node
      const T factor = lambda[SaturatedLevel(t, newest, num_levels)] * decay;
      for (int64_t i = 0; i < key_size; ++i) scaled[i] = factor * u[i];
      ReadRows(key_size, value_size, scaled, node, value_size, out);
    });
  }

  // Folds the tokens [base, base + kStateChunk) into the nodes.
  void Fold(int64_t base) {
    Scratch scratch;
    const int64_t chunk = base / kStateChunk;
    const int64_t ld = TileLd<T>(value_size);
    T* merged = scratch.New<T>(TileSize<T>(key_size, value_size));
    const int target = MergeSlot(chunk, top);
    if constexpr (kDelta) {
      DeltaChunk<T> c(scratch, key_size, value_size, 1);
      c.n = kStateChunk;
      LoadRows(keys, base, c.n, key_size, c.k, c.ld_k);
      LoadRows(values, base, c.n, value_size, c.v(), c.ld_kv);
      LoadScalars(gates, base, c.n, c.g);
      LoadScalars(betas, base, c.n, c.beta);
      ScoreKeys(c);
      PrepareKeys(c);
      T* older = scratch.New<T>(TileSize<T>(key_size, value_size));
      bool merges = false;  // the nodes that do are added up: one transition for all
      ForEachNode(chunk, nullptr, [&](int slot, T* node) {
        if (slot > target) {
          LoadNode(reinterpret_cast<const std::byte*>(node), key_size, value_size, older);
          ApplyTransition(c, value_size, older, ld);
          StoreNode(older, T{1}, key_size, value_size, reinterpret_cast<std::byte*>(node));
        } else if (!merges) {
          LoadNode(reinterpret_cast<const std::byte*>(node), key_size, value_size, merged);
          merges = true;
        } else {
          for (int64_t i = 0; i < key_size; ++i) {
            CombineRow(value_size, T{1}, merged + i * ld, T{1}, node + i * value_size);
          }
        }
      });
      merges ? AdvanceState(c, merged) : AddNewState(c, /*accumulate=*/false, merged);
    } else {
      T* k = scratch.New<T>(TileSize<T>(kStateChunk, key_size));
      T* v = scratch.New<T>(kStateChunk * ld);
      T* scaled = scratch.New<T>(kStateChunk * ld);
      Gate<T> gate;
      gate.Load(gates, base, kStateChunk);
      LoadRows(keys, base, kStateChunk, key_size, k, TileLd<T>(key_size));
      LoadRows(values, base, kStateChunk, value_size, v, ld);
      ChunkNode(StateLayout::kKeyByValue, kStateChunk, key_size, value_size, gate, k, v, scaled,
                merged);
      const T decay = static_cast<T>(std::exp(gate.total));
      ForEachNode(chunk, nullptr, [&](int slot, T* node) {
        for (int64_t i = 0; i < key_size; ++i) {
          T* row = node + i * value_size;
          if (slot <= target) {
            CombineRow(value_size, T{1}, merged + i * ld, decay, row);
          } else {
            CombineRow(value_size, decay, row, T{0}, merged + i * ld);
          }
        }
      });
    }
    StoreNode(merged, T{1}, key_size, value_size, reinterpret_cast<std::byte*>(Node(target)));
  }
};

template <typename T>
void StepHeads(const Inputs& inputs, const TensorView& o, const std::vector<Sequence>& sequences,
               int num_threads) {
  const int64_t heads = inputs.v.size(2);
  ParallelFor(sequences.size() * heads, num_threads, [&](int64_t i, int) {
    const Sequence& sequence = sequences[i / heads];
    if (inputs.transition == Transition::kGatedDelta) {
      HeadStep<T, Transition::kGatedDelta>(inputs, o, sequence, i % heads).Run();
    } else {
      HeadStep<T, Transition::kScalarGate>(inputs, o, sequence, i % heads).Run();
    }
  });
}

void StepFloat(const Inputs& inputs, const TensorView& o, const std::vector<Sequence>& sequences,
               int num_threads) {
  StepHeads<float>(inputs, o, sequences, num_threads);
}

void StepDouble(const Inputs& inputs, const TensorView& o, const std::vector<Sequence>& sequences,
                int num_threads) {
  StepHeads<double>(inputs, o, sequences, num_threads);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fenwick::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fenwick::cpu {

HWY_EXPORT(StepFloat);
HWY_EXPORT(StepDouble);

namespace {

// Below this many elements read (about 100 us) waking other threads may cost more than it saves.
constexpr int64_t kWorthThreads = int64_t{1} << 20;

int ThreadsFor(const Inputs& inputs, const std::vector<Sequence>& sequences,
               const Context& context) {
  const int64_t key_size = inputs.q.size(3), value_size = inputs.v.size(3);
  int64_t elements = 0;
  for (const Sequence& s : sequences) {
    elements += std::popcount(static_cast<uint64_t>(s.base / kStateChunk)) * key_size * value_size +
                (s.end - s.base) * (key_size + value_size);
  }
  if (elements * inputs.v.size(2) * inputs.q.size(1) < kWorthThreads) return 1;
  return context.num_threads > 0 ? context.num_threads : GetNumThreads();
}

// The new tokens take their places in the ring; no kernel reads it any more.
void Append(const Inputs& inputs, const Sequence& sequence) {
  const auto append = [&](const TensorView& tensor, const TensorView& ring) {
    if (!ring.given()) return;
    const std::int64_t row_bytes = (ring.rank > 3 ? ring.size(3) : 1) * ElementSize(ring.dtype);
    if (row_bytes == 0) return;
    for (std::int64_t x = 0; x < ring.size(2); ++x) {
      const TokenRows from(tensor, TensorView(), sequence, x);
      const TokenRows to(TensorView(), ring,
                         Sequence{.index = sequence.index, .begin = sequence.end}, x);
      for (std::int64_t p = sequence.begin; p < sequence.end; ++p) {
        std::memcpy(to.Row(p), from.Row(p), row_bytes);
      }
    }
  };
  const StateView& state = inputs.initial_state;
  append(inputs.k, state.k);
  append(inputs.v, state.v);
  append(inputs.g, state.g);
  append(inputs.beta, state.beta);
  static_cast<std::int64_t*>(state.position.data)[sequence.index] = sequence.end;
  static_cast<std::int64_t*>(state.base.data)[sequence.index] =
      NextBase(sequence.base, sequence.end);
}

}  // namespace

void Step(const Inputs& inputs, const TensorView& o, const Context& context) {
  const std::vector<Sequence> sequences = MakeSequences(inputs);
  const int num_threads = ThreadsFor(inputs, sequences, context);
  if (inputs.q.dtype == DType::kFloat64) {
    HWY_DYNAMIC_DISPATCH(StepDouble)(inputs, o, sequences, num_threads);
  } else {
    HWY_DYNAMIC_DISPATCH(StepFloat)(inputs, o, sequences, num_threads);
  }
  for (const Sequence& sequence : sequences) Append(inputs, sequence);
}

}  // namespace fenwick::cpu
#endif  // HWY_ONCE
