// Scalar gate, forward, chunk by chunk in parallel. With a = gates.cuh's sums,
// for the queries t of a chunk:
//
//   o[t] = sum_{s <= t in the chunk} level_scales[t, level(t, s)] exp(a[t] - a[s]) (q[t] k[s]) v[s]
//        + sum_{nodes e read} level_scales[t, level of e] exp(a[t] + gap_e) S_e^T q[t]
#include "cuda/general/entries.h"
#include "cuda/general/passes.h"
#include "cuda/general/scalar.cuh"
#include "cuda/launch.h"

namespace fenwick::cuda::general {
namespace {

template <typename T>
struct OutputMemory {
  TileMemory<T> tiles;
  TileMatrix<T> weights;  // [t][s]
  double sums[kChunk];
  ChunkLevels<T> levels;
  T row_scale[kChunk];
};

// o; block = (chunk, head, 64 columns of V).
template <typename Math>
__global__ void __launch_bounds__(kThreads)
    Output(const __grid_constant__ Problem problem,
           const __grid_constant__ ScalarStates<typename Math::Scalar> buffers,
           const __grid_constant__ Rows o) {
  using T = typename Math::Scalar;
  auto& shared = SharedAs<OutputMemory<T>>();
  FlatIndex index{blockIdx.x};
  const int v0 = index.Take((problem.V + kTile - 1) / kTile) * kTile;
  const int head = index.Take(problem.heads);
  const ChunkAt chunk(problem.geometry, index.rest);
  if (chunk.first_query() >= chunk.rows()) return;
  const Span& span = chunk.span;
  const int h = problem.Head(head);
  const T scale = static_cast<T>(problem.scale);

  shared.levels.Load(problem, chunk, h);
  LoadGates(shared.sums, problem.g, chunk, h);

  TokenSource<T> q{&problem.q, &span, chunk.first_row(), problem.Group(head)};
  const TokenSource<T> k{&problem.k, &span, chunk.first_row(), problem.Group(head)};
  const TokenSource<T> v{&problem.v, &span, chunk.first_row(), h, v0};
  typename Math::Tile tile;
  Clear(tile);
  Product<Math>(tile, shared.tiles, problem.K, Left(q), RightT(k));
  ForEach<Math>(tile, [&](int t, int s, T dot) {
    shared.weights(t, s) =
        s <= t ? dot * scale * shared.levels.At(t, s) * Decay<T>(shared.sums, t, s) : T(0);
  });
  Clear(tile);
  Product<Math>(tile, shared.tiles, kChunk, Left(SharedSource<T>{&shared.weights}), Right(v));

  q.scale = shared.row_scale;
  ForEachRead(problem, span, chunk.absolute(), head, buffers.node_total,
              [&](int bit, const NodeAt& node, double gap) {
                LoadReadScale(problem, chunk, h, bit, gap, shared.sums, shared.row_scale);
                const MatrixSource<T> state{
                    FindState(problem, node, static_cast<const T*>(buffers.states)), problem.K,
                    problem.V, 0, v0};
                Product<Math>(tile, shared.tiles, problem.K, Left(q), Right(state));
              });

  ForEach<Math>(tile, [&](int t, int j, T value) {
    if (t < chunk.first_query() || t >= chunk.rows() || v0 + j >= problem.V) return;
    const std::int64_t token = span.first_token + chunk.first_row() + t - span.ring_tokens;
    StoreElement(o.data, o.dtype, o.Offset(span.batch, token, h) + v0 + j, value);
  });
}

// Nodes of the final state: what a chunk at its base would read; block = (sequence, head, slot).
template <typename T>
__global__ void __launch_bounds__(kThreads)
    FinalNodes(const __grid_constant__ Problem problem,
               const __grid_constant__ ScalarStates<T> buffers, T* nodes, int slots) {
  FlatIndex index{blockIdx.x};
  const int slot = index.Take(slots);
  const int head = index.Take(problem.heads);
  const Span span = problem.geometry.SpanOf(static_cast<int>(index.rest));
  const std::int64_t base = NextBase(span.base, span.base + span.rows());
  T* to =
      nodes + ((index.rest * problem.H + problem.Head(head)) * slots + slot) * problem.state_size();
  bool first = true;
  ForEachRead(problem, span, base / kChunk, head, buffers.node_total,
              [&](int bit, const NodeAt& node, double gap) {
                if ((bit < problem.top_slot ? bit : problem.top_slot) != slot) return;
                const T* from = FindState(problem, node, static_cast<const T*>(buffers.states));
                const T decay = Exp<T>(gap);
                for (std::int64_t i = threadIdx.x; i < problem.state_size(); i += kThreads) {
                  to[i] = first ? decay * from[i] : to[i] + decay * from[i];
                }
                first = false;
              });
  if (!first) return;
  for (std::int64_t i = threadIdx.x; i < problem.state_size(); i += kThreads) to[i] = 0;
}

}  // namespace

template <typename Math>
std::size_t ScalarForwardBytes(const Inputs& inputs) {
  return CallBytes(inputs, TakeScalarStates<typename Math::Scalar>);
}

template <typename Math>
void ScalarForward(const Inputs& inputs, const TensorView& o, const StateView& final_state,
                   const Context& context) {
  using T = typename Math::Scalar;
  Call call(inputs, context);
  const Plan& plan = call.plan;
  const Problem& problem = call.problem;
  const std::int64_t v_tiles = (plan.V + kTile - 1) / kTile;
  call.ForEachPass(TakeScalarStates<T>, [&](const ScalarStates<T>& buffers) {
    ComputeScalarStates<Math>(problem, plan, buffers, call.stream);
    Launch("output", Output<Math>, plan.total_chunks * problem.heads * v_tiles, kThreads,
           sizeof(OutputMemory<T>), call.stream, problem, buffers, MakeRows(o));
    if (final_state.given() && final_state.nodes.size(2) > 0) {
      const int slots = static_cast<int>(final_state.nodes.size(2));
      Launch("final nodes", FinalNodes<T>, plan.N * problem.heads * slots, kThreads, 0, call.stream,
             problem, buffers, static_cast<T*>(final_state.nodes.data), slots);
    }
  });
  if (final_state.given()) WriteFinalRing(problem, final_state, call.stream);
}

#define FENWICK_INSTANTIATE(Math)                                                       \
  template std::size_t ScalarForwardBytes<Math>(const Inputs&);                         \
  template void ScalarForward<Math>(const Inputs&, const TensorView&, const StateView&, \
                                    const Context&);
FENWICK_INSTANTIATE(FmaMath<float>)
FENWICK_INSTANTIATE(FmaMath<double>)
FENWICK_INSTANTIATE(TensorMath)
#undef FENWICK_INSTANTIATE

}  // namespace fenwick::cuda::general
