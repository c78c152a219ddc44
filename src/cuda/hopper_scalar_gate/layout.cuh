// Where a chunk or a segment lies.
#pragma once

#include "cuda/hopper_scalar_gate/params.h"

namespace fenwick::cuda::hopper {

struct ChunkPlace {
  int batch;        // row of the batch axis
  int token;        // first token, in the token axis
  int valid;        // tokens of the sequence in this chunk, 1..128
  int index;        // chunk within its sequence: its set bits are the nodes it reads
  int num_chunks;   // of the sequence
  int first_chunk;  // of the sequence: the chunk's node at slot e is at first_chunk + e
};

struct SegmentPlace {
  int batch;
  int token;         // first token of the sequence, in the token axis
  int length;        // tokens of the sequence
  int index;         // segment within its sequence
  int num_chunks;    // of the sequence
  int num_segments;  // of the sequence
  int log_segment;   // of its segments' chunks

  // Chunks of this segment: the first, within the sequence, and how many.
  __device__ __forceinline__ int first() const { return index << log_segment; }
  __device__ __forceinline__ int count() const {
    return min(1 << log_segment, num_chunks - first());
  }
  int first_chunk;  // of the sequence
};

__device__ __forceinline__ int DivideUp(int a, int b) { return (a + b - 1) / b; }

__device__ __forceinline__ ChunkPlace PlaceOfChunk(const Layout& layout, int chunk) {
  ChunkPlace place;
  int length;
  if (layout.sequences == nullptr) {
    place.batch = chunk / layout.chunks_per_sequence;
    place.first_chunk = place.batch * layout.chunks_per_sequence;
    place.index = chunk - place.first_chunk;
    place.token = place.index * kChunk;
    length = layout.length;
  } else {
    const Sequence sequence = layout.sequences[layout.sequence_of_chunk[chunk]];
    place.batch = 0;
    place.first_chunk = sequence.first_chunk;
    place.index = chunk - sequence.first_chunk;
    place.token = sequence.token + place.index * kChunk;
    length = sequence.length;
  }
  place.num_chunks = DivideUp(length, kChunk);
  place.valid = min(kChunk, length - place.index * kChunk);
  return place;
}

__device__ __forceinline__ SegmentPlace PlaceOfSequence(const Layout& layout, int n) {
  SegmentPlace place;
  if (layout.sequences == nullptr) {
    place.batch = n;
    place.token = 0;
    place.length = layout.length;
    place.first_chunk = n * layout.chunks_per_sequence;
  } else {
    const Sequence sequence = layout.sequences[n];
    place.batch = 0;
    place.token = sequence.token;
    place.length = sequence.length;
    place.first_chunk = sequence.first_chunk;
  }
  place.index = 0;
  place.num_chunks = DivideUp(place.length, kChunk);
  place.log_segment = LogSegment(place.num_chunks, layout.segments_wanted);
  place.num_segments = (place.num_chunks + (1 << place.log_segment) - 1) >> place.log_segment;
  return place;
}

__device__ __forceinline__ int SequenceOfChunk(const Layout& layout, int chunk) {
  return layout.sequences == nullptr ? chunk / layout.chunks_per_sequence
                                     : layout.sequence_of_chunk[chunk];
}

__device__ __forceinline__ int FirstSegment(const Layout& layout, int n) {
  return layout.sequences == nullptr ? n * layout.segments_per_sequence
                                     : layout.sequences[n].first_segment;
}

__device__ __forceinline__ SegmentPlace PlaceOfSegment(const Layout& layout, int segment) {
  const int n = layout.sequences == nullptr ? segment / layout.segments_per_sequence
                                            : layout.sequence_of_segment[segment];
  SegmentPlace place = PlaceOfSequence(layout, n);
  place.index = segment - FirstSegment(layout, n);
  return place;
}

}  // namespace fenwick::cuda::hopper
