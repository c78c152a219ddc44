// Sizes that the scalar-gate kernels for Hopper are built from, and why.
#pragma once

namespace fenwick::cuda::hopper {

// Tokens in a chunk. Two 64-row wgmma tiles: one for each consumer warpgroup. 64 would double the
// states, which set the memory traffic; 256 would double the work below the diagonal.
inline constexpr int kChunk = 128;
inline constexpr int kLogChunk = 7;

// Levels whose sources lie inside a chunk: 0 .. kLogChunk.
inline constexpr int kLocalLevels = kLogChunk + 1;

inline constexpr int kWeightPitch = 2 * kChunk;     // bytes of a row of weights
inline constexpr int kDecayBytes = 2 * kChunk * 4;  // of local_decay of a head and chunk

// Columns of V handled at once; wider values are independent value tiles, narrower ones are padded
// with zeros by the copy engine.
inline constexpr int kValueTile = 64;

// Left nodes that a chunk can read: sequences up to 2^16 chunks (8M tokens).
inline constexpr int kMaxNodes = 16;

// Levels that level_scales may have: a tile of 128 tokens of them passes through shared memory.
inline constexpr int kMaxLevels = 96;

// Columns of a tile of level scales of `heads` heads of one chunk: it starts at a multiple of 16
// bytes at or before the first head's.
constexpr int TileColumns(int heads, int levels) {
  const int columns = heads * levels;
  return columns % 8 == 0 ? columns : (columns + 7 + 7) / 8 * 8;
}

// Shared memory of the output kernel for level scales: two such tiles of 4 heads and 18 levels (2
// and 16 where keys are wide), or up to eight smaller ones.
constexpr int ScalesBytes(int key_size) { return 2 * (key_size == 256 ? 40 : 72) * 2 * kChunk; }
inline constexpr int kMaxScalesStages = 8;

// Chunks in a segment, at most 2^kMaxLogSegment: one block merges a segment's tree in registers, a
// pending fp32 tile (32 registers) for each of its levels.
inline constexpr int kMinLogSegment = 2;
inline constexpr int kMaxLogSegment = 4;

// log2 of the chunks in a segment of a sequence of `chunks`: as long as still makes `wanted`
// segments. It depends on the sequence alone, as every order of summation must: gradients of a
// sequence are bitwise the same whatever else a call holds.
constexpr int LogSegment(int chunks, int wanted) {
  int log_segment = kMaxLogSegment;
  while (log_segment > kMinLogSegment && ((chunks - 1) >> log_segment) + 1 < wanted) --log_segment;
  return log_segment;
}

// Levels of the tree over segments. The plan shortens segments only while there are few of them.
inline constexpr int kMaxSegmentLevels = kMaxNodes - kMaxLogSegment;
// Kernels that keep all of them in registers exist for few levels (T up to 128K) as well.
inline constexpr int kFewSegmentLevels = 6;

// Rows of K in a block of the final nodes' kernel.
inline constexpr int kFinalRows = 64;

// Heads x value tiles of one item of the output kernel at most.
inline constexpr int kMaxTilesPerItem = 24;
// In the backward each run of heads also writes a partial sum of dq and dk: fewer, longer runs. The
// node kernel's blocks differ in their work, those of the local kernel do not.
inline constexpr int kMaxNodeTilesPerBlock = 24;
inline constexpr int kMaxLocalTilesPerBlock = 64;
inline constexpr int kMaxHeadsPerBlock = kMaxNodeTilesPerBlock;
// More runs than this only where these limits ask for them: packed calls hold partial sums for as
// many runs as their shortest sequence has.
inline constexpr int kMaxRuns = 4;

// A log2 decay below this is a reset: 2^-200 times anything representable is flushed to zero, and
// sums of 128 such values keep steps of 2^-9 (g = -inf included).
inline constexpr float kMinLog2Decay = -200.0f;

// Workspace the forward aims at before it runs the heads in groups.
inline constexpr unsigned long long kForwardWorkspaceTarget = 3ull << 30;

// Threads of a warpgroup.
inline constexpr int kWarpgroup = 128;

// Longest float16 sequence: states are stored in float16, whose range a sum over very many tokens
// without decay could leave. Longer ones run on the general kernels. Their gradients D are stored
// so too, as are dk and dv, which are products with them.
inline constexpr int kMaxFloat16Chunks = 16384 / kChunk;

}  // namespace fenwick::cuda::hopper
