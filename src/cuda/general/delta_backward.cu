// Gated delta rule, backward: the phases of a call. Everything of the forward is recomputed; all
// runs once for each pass of heads.
#include "cuda/general/delta_backward.cuh"
#include "cuda/general/passes.h"
#include "cuda/launch.h"

namespace fenwick::cuda::general {
namespace {

template <typename T>
struct Buffers {
  DeltaStates<T> states;
  FinalChain<T> final_chain;
  DeltaGradients<T> gradients;
};

template <typename T>
auto TakeBuffers(bool final) {
  return [final](Arena& arena, const Plan& plan, std::int64_t heads) {
    const std::int64_t items = plan.total_chunks * heads, square = kChunk * kChunk;
    Buffers<T> buffers;
    buffers.states = TakeDeltaStates<T>(arena, plan, heads);
    DeltaGradients<T>& gradients = buffers.gradients;
    gradients.grads = arena.Take<T>(items * plan.K * plan.V);
    gradients.phi = TakePyramid<T>(arena, plan, heads);
    if (plan.node_bits > kDeltaRunShift + 1) {
      gradients.partial =
          arena.Take<T>(NumRuns(plan.total_chunks, static_cast<int>(plan.N), kDeltaRunShift) *
                        heads * plan.K * (plan.V + plan.K));
    }
    gradients.query = arena.Take<T>(items * 2 * kChunk * plan.K);
    if (final) {
      buffers.final_chain = TakeFinalChain<T>(arena, plan, heads);
      gradients.final_query = arena.Take<T>(plan.N * heads * 2 * plan.K * plan.K);
    }
    gradients.d_mix = arena.Take<T>(items * square);
    gradients.d_solve = arena.Take<T>(items * square);
    gradients.dw = arena.Take<T>(items * kChunk * plan.K);
    gradients.du = arena.Take<T>(items * kChunk * plan.V);
    gradients.row_flow = arena.Take<T>(items * kChunk);
    gradients.d_beta = arena.Take<T>(items * kChunk);
    gradients.start_flow = arena.Take<T>(items * Tiles(plan.K) * kChunk);
    gradients.end_flow = arena.Take<T>(items * Tiles(plan.K) * kChunk);
    return buffers;
  };
}

bool WantsNodes(const StateGradView& d_final_state) {
  return d_final_state.given() && d_final_state.nodes.size(2) > 0;
}

}  // namespace

template <typename Math>
std::size_t DeltaBackwardBytes(const Inputs& inputs, const StateGradView& d_final_state) {
  return CallBytes(inputs, TakeBuffers<typename Math::Scalar>(WantsNodes(d_final_state)));
}

template <typename Math>
void DeltaBackward(const Inputs& inputs, const TensorView& d_o, const StateGradView& d_final_state,
                   const Gradients& gradients, const Context& context) {
  using T = typename Math::Scalar;
  const bool final = WantsNodes(d_final_state);
  Call call(inputs, context);
  const Plan& plan = call.plan;
  const Problem& problem = call.problem;
  const cudaStream_t stream = call.stream;

  const StateGradView& initial = gradients.initial_state;
  const DeltaOutputs out{
      .q = MakeGradients(gradients.q, {}, {}, stream),
      .k = MakeGradients(gradients.k, initial.k, d_final_state.k, stream),
      .v = MakeGradients(gradients.v, initial.v, d_final_state.v, stream),
      .g = MakeGradients(gradients.g, initial.g, d_final_state.g, stream),
      .beta = MakeGradients(gradients.beta, initial.beta, d_final_state.beta, stream),
      .level_scales = MakeRows(gradients.level_scales)};
  T* initial_nodes = nullptr;
  if (initial.nodes.given() && plan.initial_slots > 0) {
    initial_nodes = static_cast<T*>(initial.nodes.data);
    ZeroAsync(initial_nodes, initial.nodes.num_elements() * sizeof(T), stream);
  }
  TokenRows d_output;
  d_output.call = MakeRows(d_o);

  call.ForEachPass(TakeBuffers<T>(final), [&](Buffers<T> buffers) {
    buffers.gradients.initial = initial_nodes;
    ComputeDeltaChunks<Math>(problem, plan, buffers.states, stream);
    ComputeDeltaTree<Math>(problem, plan, buffers.states, stream);
    if (final) {
      ComputeFinalChain<Math>(problem, plan, buffers.states, buffers.final_chain, stream);
    }
    ComputeDeltaTreeGradients<Math>(problem, plan, buffers.states, buffers.final_chain,
                                    buffers.gradients, d_output, d_final_state.nodes, stream);
    ComputeDeltaChunkGradients<Math>(problem, plan, buffers.states, buffers.gradients, d_output,
                                     out, stream);
  });
}

#define FENWICK_INSTANTIATE(Math)                                                           \
  template std::size_t DeltaBackwardBytes<Math>(const Inputs&, const StateGradView&);       \
  template void DeltaBackward<Math>(const Inputs&, const TensorView&, const StateGradView&, \
                                    const Gradients&, const Context&);
FENWICK_INSTANTIATE(FmaMath<float>)
FENWICK_INSTANTIATE(FmaMath<double>)
FENWICK_INSTANTIATE(TensorMath)
#undef FENWICK_INSTANTIATE

}  // namespace fenwick::cuda::general
