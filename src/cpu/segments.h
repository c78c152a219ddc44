// Cuts the sequences of a call into segments (walk.h) and owns one state per segment and head.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/sequence.h"
#include "cpu/tile_layout.h"
#include "cpu/walk.h"
#include "hwy/aligned_allocator.h"

namespace fenwick::cpu {

// Chunks [begin, end) of a sequence; all but the last segment end at a multiple of 2^log2 chunks.
struct Segment {
  const Sequence* sequence = nullptr;
  std::int64_t index = 0;  // absolute: begin >> log2
  int log2 = 0;
  std::int64_t begin = 0, end = 0;
  bool first = false, last = false;  // of its sequence
};

// All segments, sequence by sequence, in order of time. log2(chunks) says how long they are.
// Sequences without a token have none.
template <class F>
std::vector<Segment> MakeSegments(const std::vector<Sequence>& sequences, F&& log2) {
  std::vector<Segment> segments;
  for (const Sequence& s : sequences) {
    const std::int64_t begin = s.first_chunk(), end = s.end_chunk();
    if (begin == end) continue;
    const int bits = log2(end - begin);
    for (std::int64_t j = begin >> bits; j << bits < end; ++j) {
      segments.push_back({.sequence = &s,
                          .index = j,
                          .log2 = bits,
                          .begin = std::max(begin, j << bits),
                          .end = std::min(end, (j + 1) << bits),
                          .first = j == begin >> bits,
                          .last = (j + 1) << bits >= end});
    }
  }
  return segments;
}

// True where slot `slot` holds a node before chunk `chunk`.
constexpr bool SlotIsLive(std::int64_t chunk, int slot, int top) {
  return slot < top ? (chunk >> slot & 1) != 0 : slot == top && chunk >> slot != 0;
}

}  // namespace fenwick::cpu
