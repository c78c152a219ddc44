// After pass 2, where a final state is asked for: its nodes (state.h), decayed up to its base.
//
// Chunks of a state have 64 tokens, half of ours: its node of slot b > 0 is a left node that the
// chunk which holds the base reads, 2^(b - 1) chunks; slot 0 is the first half of that chunk,
// summed up here. The chunk exists and that half of it is full, since the newest 65 to 128 tokens
// (or all there are) stay in the ring.
#pragma once

#include <algorithm>

#include "cuda/general/call.h"
#include "cuda/hopper_scalar_gate/layout.cuh"
#include "cuda/hopper_scalar_gate/params.h"
#include "cuda/launch.h"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/swizzle.cuh"

namespace fenwick::cuda::hopper {

struct FinalNodes {
  // Sequences, empty ones included, with chunk_begin counting this path's chunks; tensors; sizes.
  general::Problem call;
  float* nodes = nullptr;  // [N, H, slots, K, V]
  int slots = 0;
};

inline constexpr int kFinalThreads = 256;
inline constexpr int kFinalWarpRows = kFinalRows * 32 / kFinalThreads;  // in a thread too

// Grid x: slots x blocks of K x value tiles x heads x sequences. A lane has columns lane and
// lane + 32 of its warp's rows.
template <typename Element>
__global__ void __launch_bounds__(kFinalThreads)
    FinalNodesKernel(const __grid_constant__ ForwardParams p,
                     const __grid_constant__ FinalNodes state) {
  ptx::WaitForPreviousKernel();
  ptx::AllowNextKernel();
  using Storage = typename Element::Storage;
  const general::Problem& call = state.call;
  general::FlatIndex index{blockIdx.x};
  const int slot = index.Take(state.slots);
  const int first_row = index.Take(DivideUp(call.K, kFinalRows)) * kFinalRows +
                        static_cast<int>(threadIdx.x) / 32 * kFinalWarpRows;
  const int value_tile = index.Take(p.value_tiles);
  const int local_head = index.Take(p.num_heads), head = p.head_begin + local_head;
  const general::Span span = call.geometry.SpanOf(static_cast<int>(index.rest));
  const int columns[2] = {static_cast<int>(threadIdx.x) % 32,
                          static_cast<int>(threadIdx.x) % 32 + 32};
  const auto column_exists = [&](int c) { return value_tile * kValueTile + columns[c] < call.V; };
  const std::size_t first_record =
      static_cast<std::size_t>(local_head) * p.layout.num_chunks + span.chunk_begin;

  float sum[kFinalWarpRows][2] = {};
  // The 64 tokens that begin chunk `record` of the heads' chunks, token `row` of the sequence.
  const auto add_tokens = [&](std::size_t record, std::int64_t row) {
    const float* local_decay = p.local_decay + record * 2 * kChunk;
    const auto rows = [&](const general::Rows& from, int of_head) {
      return static_cast<const Storage*>(from.data) +
             from.Offset(span.batch, span.first_token + row, of_head);
    };
    const Storage* k = rows(call.k.call, head / p.heads_per_group) + first_row;
    const Storage* v = rows(call.v.call, head) + value_tile * kValueTile;
    const float end = local_decay[kStateChunk - 1];
#pragma unroll 4
    for (int t = 0; t < kStateChunk; ++t) {
      const float factor = ptx::Exp2(end - local_decay[t]);
      float value[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) value[c] = column_exists(c) ? ToFloat(v[columns[c]]) : 0.0f;
#pragma unroll
      for (int i = 0; i < kFinalWarpRows; ++i) {
        const float key = first_row + i < call.K ? factor * ToFloat(k[i]) : 0.0f;
        sum[i][0] += key * value[0];
        sum[i][1] += key * value[1];
      }
      k += call.k.call.token_stride;
      v += call.v.call.token_stride;
    }
  };
  const auto add_node = [&](std::size_t record, float decay) {
    const auto* node = static_cast<const Storage*>(p.node_states) +
                       (record * p.value_tiles + value_tile) * p.key_size * kTileColumns;
#pragma unroll
    for (int i = 0; i < kFinalWarpRows; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int group = columns[c] / 8;
        sum[i][c] +=
            decay * ToFloat(node[SwizzledOffset(first_row + i, group) / 2 + columns[c] % 8]);
      }
    }
  };

  float gap = 0;  // log2 decay from the node's end to the base
  ForEachLeftNode(NextBase(0, span.tokens) / kStateChunk, [&](int bit, std::uint64_t end) {
    const std::size_t record = first_record + end / 2;
    const bool wanted = std::min(bit, call.top_slot) == slot;
    if (bit == 0) {
      if (wanted) add_tokens(record, end / 2 * kChunk);
      gap += p.local_decay[record * 2 * kChunk + kStateChunk - 1];
    } else {
      if (wanted) add_node(record, ptx::Exp2(gap));
      gap += p.node_decay[record];
    }
  });

  float* out = state.nodes +
               ((index.rest * call.H + head) * state.slots + slot) * call.state_size() +
               value_tile * kValueTile;
#pragma unroll
  for (int i = 0; i < kFinalWarpRows; ++i) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (first_row + i < call.K && column_exists(c)) {
        out[static_cast<std::int64_t>(first_row + i) * call.V + columns[c]] = sum[i][c];
      }
    }
  }
}

template <typename Element>
void LaunchFinalNodes(const ForwardParams& p, const FinalNodes& state, cudaStream_t stream) {
  const std::int64_t key_blocks = (state.call.K + kFinalRows - 1) / kFinalRows;
  LaunchDependent(
      "final nodes", FinalNodesKernel<Element>,
      key_blocks * p.value_tiles * p.num_heads * state.call.geometry.num_sequences * state.slots,
      kFinalThreads, 0, stream, p, state);
}

}  // namespace fenwick::cuda::hopper
