#include "cpu/sequence.h"

#include <bit>
#include <cstring>

namespace fenwick::cpu {
namespace {

std::int64_t StateInt(const TensorView& view, std::int64_t n) {
  return static_cast<const std::int64_t*>(view.data)[n];
}

}  // namespace

std::vector<Sequence> MakeSequences(const Inputs& inputs) {
  std::vector<Sequence> sequences(inputs.num_sequences());
  for (std::int64_t n = 0; n < static_cast<std::int64_t>(sequences.size()); ++n) {
    Sequence& s = sequences[n];
    s.index = n;
    std::int64_t tokens = inputs.q.size(1);
    if (inputs.cu_seqlens.empty()) {
      s.batch = n;
    } else {
      s.first_token = inputs.cu_seqlens[n];
      tokens = inputs.cu_seqlens[n + 1] - inputs.cu_seqlens[n];
    }
    if (inputs.initial_state.given()) {
      s.base = StateInt(inputs.initial_state.base, n);
      s.begin = StateInt(inputs.initial_state.position, n);
    }
    s.end = s.begin + tokens;
  }
  return sequences;
}

TokenRows::TokenRows(const TensorView& tensor, const TensorView& ring, const Sequence& sequence,
                     std::int64_t head)
    : begin_(sequence.begin) {
  if (tensor.given()) {
    dtype_ = tensor.dtype;
    const std::int64_t size = ElementSize(dtype_);
    tensor_ = static_cast<std::byte*>(tensor.data) +
              (sequence.batch * tensor.stride(0) + sequence.first_token * tensor.stride(1) +
               head * tensor.stride(2)) *
                  size;
    tensor_stride_ = tensor.stride(1) * size;
  }
  if (ring.given()) {
    dtype_ = ring.dtype;
    const std::int64_t size = ElementSize(dtype_);
    ring_ = static_cast<std::byte*>(ring.data) +
            (sequence.index * ring.stride(0) + head * ring.stride(2)) * size;
    ring_stride_ = ring.stride(1) * size;
  }
}

void WriteFinalRing(const Inputs& inputs, const Sequence& sequence, const StateView& final_state) {
  const auto write = [&](const TensorView& tensor, const TensorView& ring,
                         const TensorView& final_ring) {
    if (!final_ring.given()) return;
    const std::int64_t row_bytes =
        (final_ring.rank > 3 ? final_ring.size(3) : 1) * ElementSize(final_ring.dtype);
    for (std::int64_t x = 0; x < final_ring.size(2); ++x) {
      const TokenRows from(tensor, ring, sequence, x);
      const TokenRows to(TensorView(), final_ring,
                         Sequence{.index = sequence.index, .begin = sequence.end + kStateRing}, x);
      for (std::int64_t p = sequence.final_base(); p < sequence.final_base() + kStateRing; ++p) {
        std::byte* row = to.Row(p);
        if (p < sequence.end) {
          std::memcpy(row, from.Row(p), row_bytes);
        } else {
          std::memset(row, 0, row_bytes);
        }
      }
    }
  };
  const StateView& initial = inputs.initial_state;
  write(inputs.k, initial.k, final_state.k);
  write(inputs.v, initial.v, final_state.v);
  write(inputs.g, initial.g, final_state.g);
  write(inputs.beta, initial.beta, final_state.beta);
  static_cast<std::int64_t*>(final_state.position.data)[sequence.index] = sequence.end;
  static_cast<std::int64_t*>(final_state.base.data)[sequence.index] = sequence.final_base();
}

int SegmentLog2(std::int64_t chunks, std::int64_t max_segments, int max_log2) {
  int log2 = 0;
  while (log2 < max_log2 && (chunks >> log2) > max_segments) ++log2;
  return log2;
}

}  // namespace fenwick::cpu
