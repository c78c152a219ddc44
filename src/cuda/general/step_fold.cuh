// A full ring: its oldest chunk is folded into the nodes. Every live node decays (and for the delta
// rule is edited) over the chunk's tokens; the node that the chunk completes also takes up the
// nodes below it, and the chunk's tokens. With a[i] the decay from token i to the end of its block
// of kTokenBlock tokens, A that over the whole block, and K, V the block's rows:
//   change = T (a V - A K S)   (scalar gate: a V)        S <- A S + K^T change
// where T is StepMemory::solve, and V is present for the completed node only.
//
// Some neighbouring threads share a column of a node; each has kFoldRows rows of it in registers,
// in quads: part p of P has quads p, p + P, p + 2 P, ...
#pragma once

#include "cuda/general/step_block.cuh"

namespace fenwick::cuda::general {

inline constexpr int kFoldRows = 16;

// Threads of a column.
__host__ __device__ inline int FoldParts(int K) {
  int parts = 1;
  while (parts * kFoldRows < K) parts *= 2;
  return parts;
}
// Tokens whose keys are in shared memory at a time, rows padded with zeros to kFoldRows * parts.
__host__ __device__ inline int FoldTokens(int parts) {
  return parts <= 8 ? 4 * kTokenBlock : 32 / parts * kTokenBlock;
}
template <typename T>
std::size_t FoldBytes(int K) {
  const int parts = FoldParts(K);
  return sizeof(T) * FoldTokens(parts) * kFoldRows * parts;
}

template <typename T>
struct FoldColumn {
  int parts, part;
  int column;  // from the block's first on
  bool exists;
  Quad<T> x[kFoldRows / 4];

  // f(k, entry) for the rows that exist.
  template <typename F>
  __device__ void ForEach(int K, F&& f) {
    if (!exists) return;
#pragma unroll
    for (int r = 0; r < kFoldRows / 4; ++r) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int k = 4 * (part + parts * r) + j;
        if (k < K) f(k, x[r].x[j]);
      }
    }
  }

  // The tokens of ring block b, whose keys are `keys`.
  template <typename Transition>
  __device__ void Apply(const StepBlock<T>& block, int b, const T* keys, bool write) {
    const StepMemory<T>& shared = block.shared;
    const int begin = b * kTokenBlock, last = begin + kTokenBlock - 1;
    const T decay = block.DecayOver(begin, last);
    const auto key = [&](int i, int r) {
      return *reinterpret_cast<const Quad<T>*>(keys +
                                               (i * kFoldRows / 4 * parts + part + parts * r) * 4);
    };
    T change[kTokenBlock] = {};
    if (write && exists) {
#pragma unroll
      for (int i = 0; i < kTokenBlock; ++i) {
        change[i] = LoadElement<T>(shared.value[begin + i], block.dtype(), column) *
                    Exp<T>(shared.sums[last] - shared.sums[begin + i]);
      }
    }
    if constexpr (Transition::kErases) {
      T dots[kTokenBlock] = {};
#pragma unroll
      for (int r = 0; r < kFoldRows / 4; ++r) {
#pragma unroll
        for (int i = 0; i < kTokenBlock; ++i) dots[i] = Dot(key(i, r), x[r], dots[i]);
      }
#pragma unroll 1
      for (int mask = 1; mask < parts; mask *= 2) {
#pragma unroll
        for (int i = 0; i < kTokenBlock; ++i) {
          dots[i] += __shfl_xor_sync(0xffffffffu, dots[i], mask);
        }
      }
#pragma unroll
      for (int i = 0; i < kTokenBlock; ++i) change[i] -= decay * dots[i];
#pragma unroll
      for (int i = kTokenBlock - 1; i >= 0; --i) {
        change[i] *= shared.solve[b][i][i];
#pragma unroll
        for (int j = 0; j < i; ++j) change[i] += shared.solve[b][i][j] * change[j];
      }
      __syncwarp();  // the keys are read again, and not kept in registers meanwhile
    }
#pragma unroll
    for (int r = 0; r < kFoldRows / 4; ++r) {
#pragma unroll
      for (int j = 0; j < 4; ++j) x[r].x[j] *= decay;
#pragma unroll
      for (int i = 0; i < kTokenBlock; ++i) AddScaled(x[r], change[i], key(i, r));
    }
  }
};

// Folds the first chunk of the ring into the nodes [slots, K, V] of a block of `width` columns; the
// caller moves the base on.
template <typename Transition, typename Access, typename T>
__device__ inline void Fold(const StepBlock<T>& block, T* nodes, int width) {
  const StepProblem& problem = block.problem;
  const std::uint64_t live = LiveSlots(problem, block.base);
  const int carry = __ffsll(block.base / kChunk + 1) - 1;  // trailing ones of the chunk's index
  const int target = carry < problem.top_slot ? carry : problem.top_slot;
  const int parts = FoldParts(problem.K), tokens = FoldTokens(parts), pitch = kFoldRows * parts;
  FoldColumn<T> own{parts, static_cast<int>(threadIdx.x) % parts, 0, false, {}};
  T* keys = block.scratch;

  block.LoadRing(kChunk);
  Transition::template Prepare<Access>(block, 0, kChunk);
  __syncthreads();
#pragma unroll 1
  for (int first = 0; first < width; first += kStepThreads / parts) {
    own.column = first + threadIdx.x / parts;
    own.exists = own.column < width && block.v0 + own.column < problem.V;
#pragma unroll 1
    for (int slot = target; slot < problem.slots; ++slot) {
      const bool is_live = live >> slot & 1, completed = slot == target;
      if (!completed && !is_live) continue;
      T* node = nodes + slot * problem.state_size() + block.v0 + own.column;
#pragma unroll
      for (Quad<T>& x : own.x) x = {};
#pragma unroll 1
      for (int from = completed ? 0 : slot; from <= slot; ++from) {
        if ((live >> from & 1) == 0) continue;
        const T* merged = node - (slot - from) * problem.state_size();
        own.ForEach(problem.K,
                    [&](int k, T& x) { x += merged[static_cast<std::int64_t>(k) * problem.V]; });
      }
      if (Transition::kErases || completed) {
#pragma unroll 1
        for (int b = 0; b < kChunk / kTokenBlock; ++b) {
          const int at = b * kTokenBlock % tokens;
          if (at == 0) {
            __syncthreads();
#pragma unroll 4
            for (int i = threadIdx.x; i < tokens * pitch / 4; i += kStepThreads) {
              const int token = b * kTokenBlock + i / (pitch / 4), k = i % (pitch / 4) * 4;
              Quad<T> key{};
              if (k < problem.K) {
                key = Access::Expand(
                    Access::Load(block.shared.key[token], block.dtype(), k, problem.K));
              }
              reinterpret_cast<Quad<T>*>(keys)[i] = key;
            }
            __syncthreads();
          }
          own.template Apply<Transition>(block, b, keys + at * pitch, completed);
        }
      } else {
        const T decay = block.DecayOver(0, kChunk - 1);
        own.ForEach(problem.K, [&](int, T& x) { x *= decay; });
      }
      own.ForEach(problem.K,
                  [&](int k, T& x) { node[static_cast<std::int64_t>(k) * problem.V] = x; });
    }
  }
}

}  // namespace fenwick::cuda::general
