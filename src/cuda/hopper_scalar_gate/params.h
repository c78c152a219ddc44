// What the forward kernels are told: where chunks lie, and the arrays between the passes.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "cuda/hopper_scalar_gate/config.h"

namespace fenwick::cuda::hopper {

// One sequence of a packed batch.
struct Sequence {
  int token;          // first token, in the packed axis
  int length;         // tokens
  int first_chunk;    // over all sequences
  int first_segment;  // over all sequences
};

// Sequences, cut in chunks of kChunk tokens and segments of 2^LogSegment chunks. `chunks` and
// `segments` count over all sequences. Without a table every sequence has `length` tokens and is
// its own batch row.
struct Layout {
  int num_sequences = 0;
  int length = 0;                            // tokens of every sequence; not packed only
  int chunks_per_sequence = 0;               // not packed only
  int segments_per_sequence = 0;             // not packed only
  int num_chunks = 0;                        // N
  int num_segments = 0;                      // S
  int segments_wanted = 1;                   // of every sequence (LogSegment)
  int segment_levels = 0;                    // levels of the highest tree over segments
  const Sequence* sequences = nullptr;       // [num_sequences]; null: not packed
  const int* sequence_of_chunk = nullptr;    // [N]
  const int* sequence_of_segment = nullptr;  // [S]
};

// Arrays of one head group: F heads starting at head_begin. E is the storage type.
struct ForwardParams {
  Layout layout;
  int head_begin = 0;
  int num_heads = 0;        // F
  int heads_per_group = 1;  // H / G
  int key_size = 0;         // K, padded to 64, 128 or 256
  int value_size = 0;       // V
  int value_tiles = 0;      // ceil(V / 64)
  int levels = 0;           // L
  int weight_rows = 0;      // W = kLocalLevels + nodes of the longest sequence
  int heads_per_block = 0;  // of one item of the output kernel
  int multiprocessors = 0;
  // Heads whose level scales the output kernel copies at a time; 0: it reads `weights`.
  int scales_tile_heads = 0;
  int scales_tile_columns = 0;
  float scale = 1.0f;

  const float* g = nullptr;  // [B, T, H]
  std::int64_t g_batch_stride = 0, g_token_stride = 0;
  const void* level_scales = nullptr;  // [B, T, H, L] E or float
  std::int64_t scales_batch_stride = 0, scales_token_stride = 0, scales_head_stride = 0;
  int* items_taken = nullptr;  // by the output kernel's blocks; zeroed by pass 0
  void* o = nullptr;           // [B, T, H, V] E
  bool o_mapped = true;        // the copy engine can write o
  std::int64_t o_batch_stride = 0, o_token_stride = 0, o_head_stride = 0;

  // log2 decay from the chunk's start through token t, then, for each t, the decay factor from t to
  // the end of its block of 16 tokens.
  float* local_decay = nullptr;  // [F, N, 2, 128]
  // Decay factor from t to the chunk's end, and the chunk's log2 decay as float in elements 128,
  // 129.
  void* decay_to_end = nullptr;  // [F, N, 136] E
  // Weights of the local levels, then of the nodes that the chunk reads, newest first
  // (weights.cuh).
  __nv_bfloat16* weights = nullptr;  // [F, N, W, 128]
  // The left node that ends at a chunk's start (slot 0 of a sequence is zero), each value tile in
  // the order of a swizzled [K][64] tile, and its log2 decay.
  void* node_states = nullptr;      // [F, N, V/64, K, 64] E
  float* node_decay = nullptr;      // [F, N]
  float* segment_states = nullptr;  // [F, S, V/64, K, 64], same order
  float* segment_decay = nullptr;   // [F, S]
};

inline constexpr int kDecayToEndBytes = 272;  // 128 elements, a float, padding to 16 bytes

}  // namespace fenwick::cuda::hopper
