// Scalar gate, backward: gradients of all nodes (scalar_backward.cuh has the equations).
#include "cuda/general/scalar_backward.cuh"
#include "cuda/launch.h"

namespace fenwick::cuda::general {
namespace {

template <typename T>
struct ReaderMemory {
  TileMemory<T> tiles;
  double sums[kChunk];
  T row_scale[kChunk];
};

// R of the nodes of 2^bit chunks, or its part from one run of readers; block = (run, head, 64 rows
// of K, 64 columns of V).
template <typename Math>
__global__ void __launch_bounds__(kThreads)
    ReaderSums(const __grid_constant__ Problem problem,
               const __grid_constant__ ScalarStates<typename Math::Scalar> states,
               const __grid_constant__ ScalarGradients<typename Math::Scalar> gradients,
               const __grid_constant__ TokenRows d_o, int bit) {
  using T = typename Math::Scalar;
  auto& shared = SharedAs<ReaderMemory<T>>();
  FlatIndex index{blockIdx.x};
  const int v0 = index.Take((problem.V + kTile - 1) / kTile) * kTile;
  const int k0 = index.Take((problem.K + kTile - 1) / kTile) * kTile;
  const int head = index.Take(problem.heads);
  const int shift = bit < kRunShift ? bit : kRunShift;
  const RunAt run(problem.geometry, shift, index.rest);
  const Span& span = run.span;
  if ((run.begin >> bit) % 2 == 0) return;
  const std::int64_t first = run.begin > span.first_chunk() ? run.begin : span.first_chunk();
  const std::int64_t run_end = run.begin + (std::int64_t{1} << shift);
  const std::int64_t last = run_end - 1 < span.last_chunk() ? run_end - 1 : span.last_chunk();
  const NodeAt node(problem, span, head, bit, run.begin >> bit << bit);
  if (first > last || !node.exists()) return;

  const int h = problem.Head(head);
  typename Math::Tile r;
  Clear(r);
  for (std::int64_t c = first; c <= last; ++c) {
    const ChunkAt chunk(problem.geometry, span.chunk_begin + c - span.first_chunk());
    if (chunk.first_query() >= chunk.rows()) continue;
    double gap = 0;
    ForEachRead(problem, span, c, head, states.node_total, [&](int b, const NodeAt&, double g) {
      if (b == bit) gap = g;
    });
    LoadGates(shared.sums, problem.g, chunk, h);
    LoadReadScale(problem, chunk, h, bit, gap, shared.sums, shared.row_scale);
    const TokenSource<T> q{&problem.q,          &span, chunk.first_row(),
                           problem.Group(head), k0,    shared.row_scale};
    const TokenSource<T> d_output{&d_o, &span, chunk.first_row(), h, v0};
    Product<Math>(r, shared.tiles, kChunk, LeftT(q), Right(d_output));
  }
  T* to = nullptr;
  if (bit > kRunShift) {
    to = gradients.partial + ItemOf(problem, index.rest, head) * problem.state_size();
  } else if (node.item >= 0 || gradients.initial != nullptr) {
    to = node.Find(problem, gradients.grads, gradients.initial);
  }
  if (to == nullptr) return;
  ForEach<Math>(r, [&](int i, int j, T value) {
    if (k0 + i < problem.K && v0 + j < problem.V) {
      to[static_cast<std::int64_t>(k0 + i) * problem.V + v0 + j] = value;
    }
  });
}

// R from its parts; block = (node of 2^bit chunks, head).
template <typename T>
__global__ void __launch_bounds__(kThreads)
    SumParts(const __grid_constant__ Problem problem,
             const __grid_constant__ ScalarGradients<T> gradients, int bit) {
  FlatIndex index{blockIdx.x};
  const int head = index.Take(problem.heads);
  const RunAt readers(problem.geometry, bit, index.rest);
  const Span& span = readers.span;
  if ((readers.begin >> bit) % 2 == 0) return;
  const NodeAt node(problem, span, head, bit, readers.begin);
  if (!node.exists() || (node.item < 0 && gradients.initial == nullptr)) return;
  const std::int64_t end = readers.begin + (std::int64_t{1} << bit) - 1;
  const std::int64_t first =
      readers.begin > span.first_chunk() ? readers.begin : span.first_chunk();
  const std::int64_t last = end < span.last_chunk() ? end : span.last_chunk();
  if (first > last) return;
  const std::int64_t parts_begin = (span.chunk_begin >> kRunShift) +
                                   2 * static_cast<std::int64_t>(span.sequence) -
                                   (span.first_chunk() >> kRunShift);
  const std::int64_t size = problem.state_size();
  T* to = node.Find(problem, gradients.grads, gradients.initial);
  for (std::int64_t i = threadIdx.x; i < size; i += kThreads) {
    T sum = 0;
    for (std::int64_t part = first >> kRunShift; part <= last >> kRunShift; ++part) {
      sum += gradients.partial[ItemOf(problem, parts_begin + part, head) * size + i];
    }
    to[i] = sum;
  }
}

// Sum over the block, given to thread 0.
template <typename T>
__device__ T BlockSum(T value) {
  __shared__ T warps[kThreads / 32];
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffffu, value, mask);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  T sum = 0;
  for (int w = 0; w < kThreads / 32; ++w) sum += warps[w];
  return sum;
}

// to += decay from; returns decay sum(from * state) to thread 0. `to` may be null.
template <typename T>
__device__ T Carry(std::int64_t size, T decay, const T* from, const T* state, T* to) {
  T flow = 0;
  for (std::int64_t i = threadIdx.x; i < size; i += kThreads) {
    const T carried = decay * from[i];
    flow += carried * state[i];
    if (to != nullptr) to[i] += carried;
  }
  return BlockSum(flow);
}

template <typename T>
__device__ T* GradientOf(const Problem& problem, const NodeAt& node,
                         const ScalarGradients<T>& gradients) {
  if (node.item < 0 && gradients.initial == nullptr) return nullptr;
  return node.Find(problem, gradients.grads, gradients.initial);
}

// The final state as a reader; block = (sequence, head, bit).
template <typename T>
__global__ void __launch_bounds__(kThreads)
    FinalReader(const __grid_constant__ Problem problem,
                const __grid_constant__ ScalarStates<T> states,
                const __grid_constant__ ScalarGradients<T> gradients, const T* d_nodes, int slots) {
  FlatIndex index{blockIdx.x};
  const int bit = index.Take(gradients.node_bits);
  const int head = index.Take(problem.heads);
  const Span span = problem.geometry.SpanOf(static_cast<int>(index.rest));
  const std::int64_t base = NextBase(span.base, span.base + span.rows());
  const int slot = bit < problem.top_slot ? bit : problem.top_slot;
  if (slot >= slots) return;
  const T* d_node = d_nodes + ((index.rest * problem.H + problem.Head(head)) * slots + slot) *
                                  problem.state_size();
  ForEachRead(problem, span, base / kChunk, head, states.node_total,
              [&](int b, const NodeAt& node, double gap) {
                if (b != bit) return;
                const T flow = Carry(problem.state_size(), Exp<T>(gap), d_node,
                                     FindState(problem, node, static_cast<const T*>(states.states)),
                                     GradientOf(problem, node, gradients));
                if (threadIdx.x == 0) gradients.FinalFlow(problem, span, head, bit) = flow;
              });
}

// One level down the tree; block = (merge, head).
template <typename T>
__global__ void __launch_bounds__(kThreads)
    SplitGradients(const __grid_constant__ Problem problem,
                   const __grid_constant__ ScalarStates<T> states,
                   const __grid_constant__ ScalarGradients<T> gradients, int bit) {
  FlatIndex index{blockIdx.x};
  const int head = index.Take(problem.heads);
  const MergeAt merge(problem.geometry, bit, index.rest);
  const Span& span = merge.span;
  if (!merge.needed()) return;
  const NodeAt left(problem, span, head, bit, merge.end - (std::int64_t{1} << bit));
  if (!left.exists()) return;
  const NodeAt parent(problem, span, head, bit, merge.end);
  const T decay = Exp<T>(RightTotal(problem, span, head, bit, merge.end, states));
  const T flow =
      Carry(problem.state_size(), decay, gradients.grads + parent.item * problem.state_size(),
            FindState(problem, left, static_cast<const T*>(states.states)),
            GradientOf(problem, left, gradients));
  if (threadIdx.x == 0) gradients.MergeFlow(problem, span, head, bit, left) = flow;
}

}  // namespace

template <typename Math>
void ComputeScalarStateGradients(const Problem& problem, const Plan& plan,
                                 const ScalarStates<typename Math::Scalar>& states,
                                 const ScalarGradients<typename Math::Scalar>& gradients,
                                 const TokenRows& d_o, const TensorView& d_final_nodes,
                                 cudaStream_t stream) {
  using T = typename Math::Scalar;
  const int N = static_cast<int>(plan.N);
  const std::int64_t items = plan.total_chunks * problem.heads;
  const std::int64_t flows = plan.N * problem.heads * plan.node_bits;
  const std::int64_t tiles = (plan.K + kTile - 1) / kTile * ((plan.V + kTile - 1) / kTile);
  ZeroAsync(gradients.grads, items * plan.K * plan.V * sizeof(T), stream);
  ZeroAsync(gradients.merge_flow, items * sizeof(T), stream);
  ZeroAsync(gradients.initial_merge_flow, flows * sizeof(T), stream);
  ZeroAsync(gradients.final_flow, flows * sizeof(T), stream);
  for (int bit = 0; bit < plan.node_bits; ++bit) {
    const int shift = bit < kRunShift ? bit : kRunShift;
    Launch("reader sums", ReaderSums<Math>,
           NumRuns(plan.total_chunks, N, shift) * problem.heads * tiles, kThreads,
           sizeof(ReaderMemory<T>), stream, problem, states, gradients, d_o, bit);
    if (bit > kRunShift) {
      Launch("sum parts", SumParts<T>, NumRuns(plan.total_chunks, N, bit) * problem.heads, kThreads,
             0, stream, problem, gradients, bit);
    }
  }
  if (d_final_nodes.given() && d_final_nodes.size(2) > 0) {
    Launch("final reader", FinalReader<T>, plan.N * problem.heads * plan.node_bits, kThreads, 0,
           stream, problem, states, gradients, static_cast<const T*>(d_final_nodes.data),
           static_cast<int>(d_final_nodes.size(2)));
  }
  for (int bit = plan.merge_levels() - 1; bit >= 0; --bit) {
    Launch("split gradients", SplitGradients<T>,
           NumMerges(plan.total_chunks, N, bit) * problem.heads, kThreads, 0, stream, problem,
           states, gradients, bit);
  }
}

#define FENWICK_INSTANTIATE(Math)                                     \
  template void ComputeScalarStateGradients<Math>(                    \
      const Problem&, const Plan&, const ScalarStates<Math::Scalar>&, \
      const ScalarGradients<Math::Scalar>&, const TokenRows&, const TensorView&, cudaStream_t);
FENWICK_INSTANTIATE(FmaMath<float>)
FENWICK_INSTANTIATE(FmaMath<double>)
FENWICK_INSTANTIATE(TensorMath)
#undef FENWICK_INSTANTIATE

}  // namespace fenwick::cuda::general
