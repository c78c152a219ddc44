// How the causal convolution is cut into tasks: blocks of tokens of one sequence times blocks of
// channels. Both are functions of the shape alone, so gradients are summed in the same order for
// any number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "fenwick/layers.h"

namespace fenwick::cpu {

// Channels of a task: with kConvTokens rows of float32 about 40 KB, which stay in the second-level
// cache.
inline constexpr std::int64_t kConvChannels = 256;
inline constexpr std::int64_t kConvTokens = 32;
// Tokens whose contributions to the gradients of weight and bias are summed before they are
// written: their partial sums take 1/128 of the memory of x at width 4.
inline constexpr std::int64_t kConvSegment = 512;

struct ConvBlock {
  std::int64_t sequence;    // n
  std::int64_t batch;       // row of B
  std::int64_t token;       // index on T of the sequence's first token
  std::int64_t length;      // tokens of the sequence
  std::int64_t begin, end;  // positions in the sequence
};

// All of sequence n as one block.
inline ConvBlock WholeSequence(const CausalConv& inputs, std::int64_t n) {
  const bool packed = !inputs.cu_seqlens.empty();
  const std::int64_t first = packed ? inputs.cu_seqlens[n] : 0;
  const std::int64_t length = packed ? inputs.cu_seqlens[n + 1] - first : inputs.x.size(1);
  return {.sequence = n,
          .batch = packed ? 0 : n,
          .token = first,
          .length = length,
          .begin = 0,
          .end = length};
}

// Blocks of up to `tokens` positions of all sequences; none for an empty sequence.
inline std::vector<ConvBlock> MakeConvBlocks(const CausalConv& inputs, std::int64_t tokens) {
  std::vector<ConvBlock> blocks;
  for (std::int64_t n = 0; n < inputs.num_sequences(); ++n) {
    ConvBlock block = WholeSequence(inputs, n);
    for (; block.begin < block.length; block.begin += tokens) {
      block.end = std::min(block.length, block.begin + tokens);
      blocks.push_back(block);
    }
  }
  return blocks;
}

}  // namespace fenwick::cpu
