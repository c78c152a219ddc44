// A full ring: its oldest chunk is folded into the nodes. Every live node decays (and for the delta
// rule is edited) over the chunk's tokens; the node that the chunk completes also takes up the
// nodes below it, and the chunk's tokens. With a[i] the decay from token i to the end of its block
// of kTokenBlock tokens, A that over the whole block, and K, V the block's rows:
//   change = T (a V - A K S)   (scalar gate: a V)        S <- A S + K^T change
// where T is StepMemory::solve, and V is present for the completed node only.
//
// Some neighbouring threads share the columns of a node; each has kFoldRows rows of kFoldColumns of
// them in registers. Rows go by quads: part p of P has quads p, p + P, p + 2 P, ...
#pragma once

#include "cuda/general/step_block.cuh"

namespace fenwick::cuda::general {

inline constexpr int kFoldRows = 16, kFoldColumns = 2;

// Threads that share columns.
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

// Keys [tokens, kFoldRows * parts] of the ring's tokens from `begin` on into shared memory.
template <typename Access, typename T>
__device__ inline void LoadFoldKeys(const StepBlock<T>& block, int begin, int tokens, int parts,
                                    T* keys) {
  const int K = block.problem.K, row_quads = kFoldRows / 4 * parts;
  constexpr int kBatch = 4;
#pragma unroll 1
  for (int first = threadIdx.x; first < tokens * row_quads; first += kBatch * kStepThreads) {
    typename Access::Raw raw[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = first + i * kStepThreads, token = at / row_quads % tokens;
      raw[i] = Access::Load(block.shared.key[begin + token], block.dtype(),
                            Access::Column(at % row_quads * 4, K), K);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = first + i * kStepThreads;
      if (at >= tokens * row_quads) continue;
      Quad<T> key = Access::Expand(raw[i]);
      if (at % row_quads * 4 >= K) key = Quad<T>{};
      reinterpret_cast<Quad<T>*>(keys)[at] = key;
    }
  }
}

// What a thread has of a node.
template <typename T>
struct FoldPiece {
  int parts, part;
  int column[kFoldColumns];   // from the block's first on; one that may be read
  bool exists[kFoldColumns];  // whether it is the thread's to write
  Quad<T> x[kFoldColumns][kFoldRows / 4];

  __device__ int Row(int i) const { return 4 * (part + parts * (i / 4)) + i % 4; }

  // Adds a node that is given from the block's first column on.
  __device__ void Add(const StepProblem& problem, const T* node) {
#pragma unroll
    for (int c = 0; c < kFoldColumns; ++c) {
      T loaded[kFoldRows];
#pragma unroll
      for (int i = 0; i < kFoldRows; ++i) {
        const std::int64_t k = Row(i) < problem.K ? Row(i) : 0;
        loaded[i] = node[k * problem.V + column[c]];
      }
#pragma unroll
      for (int i = 0; i < kFoldRows; ++i) {
        if (Row(i) < problem.K) x[c][i / 4].x[i % 4] += loaded[i];
      }
    }
  }
  __device__ void Store(const StepProblem& problem, T* node) const {
#pragma unroll
    for (int c = 0; c < kFoldColumns; ++c) {
#pragma unroll
      for (int i = 0; i < kFoldRows; ++i) {
        if (exists[c] && Row(i) < problem.K) {
          node[static_cast<std::int64_t>(Row(i)) * problem.V + column[c]] = x[c][i / 4].x[i % 4];
        }
      }
    }
  }
  __device__ void Scale(T decay) {
#pragma unroll
    for (int c = 0; c < kFoldColumns; ++c) {
#pragma unroll
      for (int i = 0; i < kFoldRows; ++i) x[c][i / 4].x[i % 4] *= decay;
    }
  }

  // The tokens of ring block b, whose keys are `keys`.
  template <typename Transition, typename Access>
  __device__ void Apply(const StepBlock<T>& block, int b, const T* keys, bool write) {
    const StepMemory<T>& shared = block.shared;
    const int begin = b * kTokenBlock, last = begin + kTokenBlock - 1;
    const T decay = block.DecayOver(begin, last);
    const auto key = [&](int i, int r) {
      return reinterpret_cast<const Quad<T>*>(keys)[i * kFoldRows / 4 * parts + part + parts * r];
    };
    T change[kFoldColumns][kTokenBlock] = {};
    if (write) {
#pragma unroll
      for (int i = 0; i < kTokenBlock; ++i) {
#pragma unroll
        for (int c = 0; c < kFoldColumns; ++c) {
          change[c][i] = Access::LoadOne(shared.value[begin + i], block.dtype(), column[c]);
        }
      }
#pragma unroll
      for (int i = 0; i < kTokenBlock; ++i) {
        const T rest = Exp<T>(shared.sums[last] - shared.sums[begin + i]);
#pragma unroll
        for (int c = 0; c < kFoldColumns; ++c) change[c][i] *= rest;
      }
    }
    if constexpr (Transition::kErases) {
      T dots[kFoldColumns][kTokenBlock] = {};
#pragma unroll
      for (int r = 0; r < kFoldRows / 4; ++r) {
#pragma unroll
        for (int i = 0; i < kTokenBlock; ++i) {
          const Quad<T> k = key(i, r);
#pragma unroll
          for (int c = 0; c < kFoldColumns; ++c) dots[c][i] = Dot(k, x[c][r], dots[c][i]);
        }
      }
#pragma unroll 1
      for (int mask = 1; mask < parts; mask *= 2) {
#pragma unroll
        for (int c = 0; c < kFoldColumns; ++c) {
#pragma unroll
          for (int i = 0; i < kTokenBlock; ++i) {
            dots[c][i] += __shfl_xor_sync(0xffffffffu, dots[c][i], mask);
          }
        }
      }
#pragma unroll
      for (int i = kTokenBlock - 1; i >= 0; --i) {
#pragma unroll
        for (int c = 0; c < kFoldColumns; ++c) change[c][i] -= decay * dots[c][i];
      }
#pragma unroll
      for (int i = kTokenBlock - 1; i >= 0; --i) {
#pragma unroll
        for (int j = i; j >= 0; --j) {
          const T solve = shared.solve[b][i][j];
#pragma unroll
          for (int c = 0; c < kFoldColumns; ++c) {
            change[c][i] = j == i ? solve * change[c][i] : change[c][i] + solve * change[c][j];
          }
        }
      }
      __syncwarp();  // the keys are read again, and not kept in registers meanwhile
    }
    Scale(decay);
#pragma unroll
    for (int r = 0; r < kFoldRows / 4; ++r) {
#pragma unroll
      for (int i = 0; i < kTokenBlock; ++i) {
        const Quad<T> k = key(i, r);
#pragma unroll
        for (int c = 0; c < kFoldColumns; ++c) AddScaled(x[c][r], change[c][i], k);
      }
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
  const int parts = FoldParts(problem.K), tokens = FoldTokens(parts);
  const int side = kStepThreads / parts;  // threads side by side
  if (width > problem.V - block.v0) width = problem.V - block.v0;
  FoldPiece<T> piece;
  piece.parts = parts;
  piece.part = threadIdx.x % parts;
  T* keys = block.scratch;

  block.LoadRing(kChunk);
  Transition::template Prepare<Access>(block, 0, kChunk);
  __syncthreads();
#pragma unroll 1
  for (int first = 0; first < width; first += kFoldColumns * side) {
#pragma unroll
    for (int c = 0; c < kFoldColumns; ++c) {
      const int column = first + c * side + threadIdx.x / parts;
      piece.exists[c] = column < width;
      piece.column[c] = piece.exists[c] ? column : 0;
    }
#pragma unroll 1
    for (int slot = target; slot < problem.slots; ++slot) {
      const bool is_live = live >> slot & 1, completed = slot == target;
      if (!completed && !is_live) continue;
#pragma unroll
      for (int c = 0; c < kFoldColumns; ++c) {
#pragma unroll
        for (Quad<T>& x : piece.x[c]) x = {};
      }
#pragma unroll 1
      for (int from = completed ? 0 : slot; from <= slot; ++from) {
        if ((live >> from & 1) == 0) continue;
        piece.Add(problem, nodes + from * problem.state_size() + block.v0);
      }
      if (Transition::kErases || completed) {
#pragma unroll 1
        for (int b = 0; b < kChunk / kTokenBlock; ++b) {
          const int at = b * kTokenBlock % tokens;
          if (at == 0) {
            __syncthreads();
            LoadFoldKeys<Access>(block, b * kTokenBlock, tokens, parts, keys);
            __syncthreads();
          }
          piece.template Apply<Transition, Access>(block, b, keys + at * kFoldRows * parts,
                                                   completed);
        }
      } else {
        piece.Scale(block.DecayOver(0, kChunk - 1));
      }
      piece.Store(problem, nodes + slot * problem.state_size() + block.v0);
    }
  }
}

}  // namespace fenwick::cuda::general
