// Gated delta rule, forward: outputs, the final state's nodes, and the phases of a call (delta.cuh
// has the equations).
#include "cuda/general/delta.cuh"
#include "cuda/general/passes.h"
#include "cuda/launch.h"

namespace fenwick::cuda::general {
namespace {

template <typename T>
struct OutputMemory {
  TileMemory<T> tiles;
  TileMatrix<T> weights;  // [t][s]
  ChunkLevels<T> levels;
  T row_scale[kChunk];
};

// o; block = (chunk, head, 64 columns of V).
template <typename Math>
__global__ void __launch_bounds__(kThreads)
    Output(const __grid_constant__ Problem problem,
           const __grid_constant__ DeltaStates<typename Math::Scalar> buffers,
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
  const std::int64_t item = ItemOf(problem, index.rest, head);
  shared.levels.Load(problem, chunk, h);
  __syncthreads();
  typename Math::Tile tile;
  LoadEntries<Math>(tile, MatrixSource<T>{buffers.mix + item * kChunk * kChunk, kChunk, kChunk});
  ForEach<Math>(tile, [&](int t, int s, T mix) {
    shared.weights(t, s) = s <= t ? mix * shared.levels.At(t, s) : T(0);
  });
  const TokenSource<T> v{&problem.v, &span, chunk.first_row(), h, v0};
  Clear(tile);
  Product<Math>(tile, shared.tiles, kChunk, Left(SharedSource<T>{&shared.weights}), Right(v));
  ForEachDeltaRead(
      problem, span, chunk.absolute(), head,
      [&](int bit, std::int64_t, const NodeAt& node, int order) {
        __syncthreads();
        if (threadIdx.x < kChunk) {
          shared.row_scale[threadIdx.x] =
              LoadToken<T>(problem.level_scales, span, chunk.first_row() + threadIdx.x, h,
                           NodeLevel(problem, bit));
        }
        const MatrixSource<T> query{buffers.Query(problem, item, order), kChunk, problem.K};
        const MatrixSource<T> state{FindState(problem, node, static_cast<const T*>(buffers.states)),
                                    problem.K, problem.V, 0, v0};
        ScaledProduct<Math>(tile, shared.tiles, problem.K, shared.row_scale, Left(query),
                            Right(state));
      });
  ForEach<Math>(tile, [&](int t, int j, T value) {
    if (t < chunk.first_query() || t >= chunk.rows() || v0 + j >= problem.V) return;
    const std::int64_t token = span.first_token + chunk.first_row() + t - span.ring_tokens;
    StoreElement(o.data, o.dtype, o.Offset(span.batch, token, h) + v0 + j, value);
  });
}

// Nodes of the final state: sums of Z_order S; block = (sequence, head, slot, 64 rows of K, 64
// columns of V).
template <typename Math>
__global__ void __launch_bounds__(kThreads)
    FinalNodes(const __grid_constant__ Problem problem,
               const __grid_constant__ DeltaStates<typename Math::Scalar> buffers,
               const __grid_constant__ FinalChain<typename Math::Scalar> final_chain,
               typename Math::Scalar* nodes, int slots) {
  using T = typename Math::Scalar;
  auto& tiles = SharedAs<TileMemory<T>>();
  FlatIndex index{blockIdx.x};
  const int v0 = index.Take((problem.V + kTile - 1) / kTile) * kTile;
  const int k0 = index.Take((problem.K + kTile - 1) / kTile) * kTile;
  const int slot = index.Take(slots);
  const int head = index.Take(problem.heads);
  const Span span = problem.geometry.SpanOf(static_cast<int>(index.rest));
  typename Math::Tile tile, copy;
  Clear(tile);
  ForEachDeltaRead(problem, span, FinalChunk(span), head,
                   [&](int bit, std::int64_t, const NodeAt& node, int order) {
                     if ((bit < problem.top_slot ? bit : problem.top_slot) != slot) return;
                     const T* state =
                         FindState(problem, node, static_cast<const T*>(buffers.states));
                     if (order == 0) {
                       LoadTile<Math>(copy, state, k0, problem.K, v0, problem.V);
                       for (int i = 0; i < 32; ++i) tile.x[i] += copy.x[i];
                       return;
                     }
                     const MatrixSource<T> z{final_chain.Find(problem, span, head, order),
                                             problem.K, problem.K, k0};
                     const MatrixSource<T> s{state, problem.K, problem.V, 0, v0};
                     Product<Math>(tile, tiles, problem.K, Left(z), Right(s));
                   });
  T* to =
      nodes + ((index.rest * problem.H + problem.Head(head)) * slots + slot) * problem.state_size();
  StoreTile<Math>(tile, to, k0, problem.K, v0, problem.V);
}

template <typename T>
struct Buffers {
  DeltaStates<T> states;
  FinalChain<T> final_chain;
};

template <typename T>
auto TakeBuffers(bool final) {
  return [final](Arena& arena, const Plan& plan, std::int64_t heads) {
    Buffers<T> buffers;
    buffers.states = TakeDeltaStates<T>(arena, plan, heads);
    if (final) buffers.final_chain = TakeFinalChain<T>(arena, plan, heads);
    return buffers;
  };
}

bool WantsNodes(const StateView& final_state) {
  return final_state.given() && final_state.nodes.size(2) > 0;
}

}  // namespace

template <typename Math>
std::size_t DeltaForwardBytes(const Inputs& inputs, const StateView& final_state) {
  return CallBytes(inputs, TakeBuffers<typename Math::Scalar>(WantsNodes(final_state)));
}

template <typename Math>
void DeltaForward(const Inputs& inputs, const TensorView& o, const StateView& final_state,
                  const Context& context) {
  using T = typename Math::Scalar;
  const bool final = WantsNodes(final_state);
  Call call(inputs, context);
  const Plan& plan = call.plan;
  const Problem& problem = call.problem;
  call.ForEachPass(TakeBuffers<T>(final), [&](const Buffers<T>& buffers) {
    ComputeDeltaChunks<Math>(problem, plan, buffers.states, call.stream);
    ComputeDeltaTree<Math>(problem, plan, buffers.states, call.stream);
    Launch("output", Output<Math>, plan.total_chunks * problem.heads * Tiles(plan.V), kThreads,
           sizeof(OutputMemory<T>), call.stream, problem, buffers.states, MakeRows(o));
    if (!final) return;
    const int slots = static_cast<int>(final_state.nodes.size(2));
    ComputeFinalChain<Math>(problem, plan, buffers.states, buffers.final_chain, call.stream);
    Launch("final nodes", FinalNodes<Math>,
           plan.N * problem.heads * slots * Tiles(plan.K) * Tiles(plan.V), kThreads,
           sizeof(TileMemory<T>), call.stream, problem, buffers.states, buffers.final_chain,
           static_cast<T*>(final_state.nodes.data), slots);
  });
  if (final_state.given()) WriteFinalRing(problem, final_state, call.stream);
}

#define FENWICK_INSTANTIATE(Math)                                                      \
  template std::size_t DeltaForwardBytes<Math>(const Inputs&, const StateView&);       \
  template void DeltaForward<Math>(const Inputs&, const TensorView&, const StateView&, \
                                   const Context&);
FENWICK_INSTANTIATE(FmaMath<float>)
FENWICK_INSTANTIATE(FmaMath<double>)
FENWICK_INSTANTIATE(TensorMath)
#undef FENWICK_INSTANTIATE

}  // namespace fenwick::cuda::general
