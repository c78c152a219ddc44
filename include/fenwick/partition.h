// The Fenwick partition (docs/mathematics.md; paper section 3.1), in closed form.
//
// A query at position t reads every source s <= t through level(t, s) = bit_width(t xor s). Level
// l >= 1 of query t is one aligned bucket of 2^(l-1) tokens and exists exactly when bit l-1 of t is
// set. Positions count from 0 in each sequence.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace fenwick {

// std::bit_width, countr_zero (of x > 0) and popcount. nvcc compiles those to nonsense in device
// code, without a word: the builtins under them are the host's.
namespace bits {
#if defined(__CUDA_ARCH__)
constexpr int Width(std::uint64_t x) { return 64 - __clzll(static_cast<long long>(x)); }
constexpr int CountZeros(std::uint64_t x) { return __ffsll(static_cast<long long>(x)) - 1; }
constexpr int CountOnes(std::uint64_t x) { return __popcll(x); }
#else
constexpr int Width(std::uint64_t x) { return std::bit_width(x); }
constexpr int CountZeros(std::uint64_t x) { return std::countr_zero(x); }
constexpr int CountOnes(std::uint64_t x) { return std::popcount(x); }
#endif
}  // namespace bits

// Level through which query t reads source s, 0 <= s <= t.
constexpr int Level(std::uint64_t t, std::uint64_t s) { return bits::Width(t ^ s); }

// Level under the `saturate` policy: everything older than `num_levels` covers is read through the
// last level.
constexpr int SaturatedLevel(std::uint64_t t, std::uint64_t s, int num_levels) {
  return std::min(Level(t, s), num_levels - 1);
}

// Levels that a sequence of `tokens` tokens needs: bit_width(tokens - 1) + 1, and 0 for none.
constexpr int NumLevels(std::int64_t tokens) {
  return tokens <= 0 ? 0 : bits::Width(static_cast<std::uint64_t>(tokens - 1)) + 1;
}

// Non-empty levels of query t, level 0 (the token itself) included.
constexpr int NumLiveLevels(std::uint64_t t) { return bits::CountOnes(t) + 1; }

// Level that receives the merge of levels 0..countr_zero(t) before token t > 0 is written.
constexpr int MergeLevel(std::uint64_t t) { return bits::CountZeros(t) + 1; }

// First position of the bucket that query t reads at `level` >= 1 (bit level-1 of t must be set);
// the bucket holds 2^(level-1) tokens.
constexpr std::uint64_t BucketBegin(std::uint64_t t, int level) { return (t >> level) << level; }

// Visits the left nodes that cover units [0, n), the newest first: f(bit, end) for the node of
// 2^bit units that ends before unit `end`. This is the read pattern of every kernel: with n a chunk
// index, the nodes are the states that chunk n reads, found at ends n, n & (n-1), ...
template <typename F>
constexpr void ForEachLeftNode(std::uint64_t n, F&& f) {
  for (; n != 0; n &= n - 1) f(bits::CountZeros(n), n);
}

}  // namespace fenwick
