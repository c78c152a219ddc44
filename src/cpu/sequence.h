// The sequences of a call and where their tokens lie: positions [base, begin) in the ring of the
// initial state, [begin, end) in the call's tensors.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fenwick/ops.h"

namespace fenwick::cpu {

struct Sequence {
  std::int64_t index = 0;        // n, in states
  std::int64_t batch = 0;        // row of B
  std::int64_t first_token = 0;  // index on T of the token at position `begin`
  std::int64_t base = 0;         // first position that is not in a node; a multiple of kStateChunk
  std::int64_t begin = 0;        // position of the first new token
  std::int64_t end = 0;          // position after the last one

  std::int64_t first_chunk() const { return base / kStateChunk; }
  std::int64_t end_chunk() const { return (end + kStateChunk - 1) / kStateChunk; }
  std::int64_t final_base() const { return NextBase(base, end); }
};

std::vector<Sequence> MakeSequences(const Inputs& inputs);

// Where the rows of one head (or group) of a sequence lie, by position: tokens before `begin` in
// the ring, later ones in the tensor. Either may be not given (gradients that nobody asked for).
class TokenRows {
 public:
  TokenRows() = default;
  // tensor [B, T, X, D] or [B, T, X]; ring [N, kStateRing, X, D] or [N, kStateRing, X].
  TokenRows(const TensorView& tensor, const TensorView& ring, const Sequence& sequence,
            std::int64_t head);

  bool given(std::int64_t position) const {
    return (position < begin_ ? ring_ : tensor_) != nullptr;
  }
  DType dtype() const { return dtype_; }
  std::byte* Row(std::int64_t position) const {
    return position < begin_ ? ring_ + position % kStateRing * ring_stride_
                             : tensor_ + (position - begin_) * tensor_stride_;
  }
  // Rows of positions [position, RunEnd) lie RunStride bytes apart.
  std::int64_t RunEnd(std::int64_t position, std::int64_t end) const {
    if (position >= begin_) return end;
    return std::min({end, begin_, (position / kStateRing + 1) * kStateRing});
  }
  std::int64_t RunStride(std::int64_t position) const {
    return position < begin_ ? ring_stride_ : tensor_stride_;
  }

 private:
  DType dtype_ = DType::kFloat32;
  std::int64_t begin_ = 0;
  std::byte* tensor_ = nullptr;                       // row of position begin_
  std::byte* ring_ = nullptr;                         // row of slot 0
  std::int64_t tensor_stride_ = 0, ring_stride_ = 0;  // bytes
};

// Writes the ring of `final_state` for one sequence: tokens from final_base on are copied from
// where they are, all other slots zeroed; also position and base. Nodes are the operator's.
void WriteFinalRing(const Inputs& inputs, const Sequence& sequence, const StateView& final_state);

// log2 of the chunks in a segment of a sequence of `chunks` chunks. A function of the shape alone,
// since it decides in which order gradients are summed.
int SegmentLog2(std::int64_t chunks, std::int64_t max_segments, int max_log2);

// Matrix of one head and slot in nodes [N, H, S, K, V].
inline std::byte* NodeData(const TensorView& nodes, std::int64_t sequence, std::int64_t head,
                           std::int64_t slot) {
  return static_cast<std::byte*>(nodes.data) +
         (sequence * nodes.stride(0) + head * nodes.stride(1) + slot * nodes.stride(2)) *
             ElementSize(nodes.dtype);
}

}  // namespace fenwick::cpu
