// The parts of a final state that no arithmetic touches: positions, and the newest tokens.
#include "cuda/general/call.h"
#include "cuda/launch.h"

namespace fenwick::cuda::general {
namespace {

// Positions; one thread a sequence.
__global__ void WritePositions(const __grid_constant__ Geometry geometry, std::int64_t* position,
                               std::int64_t* base) {
  const int n = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (n >= geometry.num_sequences) return;
  const Span span = geometry.SpanOf(n);
  position[n] = span.base + span.rows();
  base[n] = NextBase(span.base, position[n]);
}

template <typename T>
__device__ void CopyRow(const TokenRows& from, const Span& span, std::int64_t j, bool live,
                        const Rows& to, std::int64_t slot, int head) {
  for (int i = threadIdx.x; i < to.width; i += blockDim.x) {
    StoreElement<T>(to.data, to.dtype, to.Offset(span.sequence, slot, head) + i,
                    live ? LoadToken<T>(from, span, j, head, i) : T(0));
  }
}

// One tensor of the ring: slot p % kStateRing holds position p of [base, position), other slots
// zero; block = (sequence, slot, head).
__global__ void WriteRing(const __grid_constant__ Geometry geometry,
                          const __grid_constant__ TokenRows from, const __grid_constant__ Rows ring,
                          int heads) {
  FlatIndex index{blockIdx.x};
  const int head = index.Take(heads);
  const int slot = index.Take(kStateRing);
  const Span span = geometry.SpanOf(static_cast<int>(index.rest));
  const std::int64_t position = span.base + span.rows();
  const std::int64_t base = NextBase(span.base, position);
  const std::int64_t p = base + (slot - base % kStateRing + kStateRing) % kStateRing;
  if (ring.dtype == DType::kFloat64) {
    CopyRow<double>(from, span, p - span.base, p < position, ring, slot, head);
  } else {
    CopyRow<float>(from, span, p - span.base, p < position, ring, slot, head);
  }
}

}  // namespace

void WriteFinalRing(const Problem& problem, const StateView& final_state, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  const auto write = [&](const TokenRows& from, const TensorView& to) {
    if (!to.given() || to.num_elements() == 0) return;
    const int heads = static_cast<int>(to.size(2));
    Launch("write ring", WriteRing,
           static_cast<std::int64_t>(geometry.num_sequences) * kStateRing * heads, 64, 0, stream,
           geometry, from, MakeRows(to), heads);
  };
  write(problem.k, final_state.k);
  write(problem.v, final_state.v);
  write(problem.g, final_state.g);
  write(problem.beta, final_state.beta);
  Launch("write positions", WritePositions, (geometry.num_sequences + 127) / 128, 128, 0, stream,
         geometry, static_cast<std::int64_t*>(final_state.position.data),
         static_cast<std::int64_t*>(final_state.base.data));
}

}  // namespace fenwick::cuda::general
