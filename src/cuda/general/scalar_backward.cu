// Scalar gate, backward: the phases of a call. States are recomputed, then everything runs once for
// each pass of heads.
#include "cuda/general/passes.h"
#include "cuda/general/scalar_backward.cuh"
#include "cuda/launch.h"

namespace fenwick::cuda::general {
namespace {

template <typename T>
struct Buffers {
  ScalarStates<T> states;
  ScalarGradients<T> gradients;
};

template <typename T>
Buffers<T> TakeBuffers(Arena& arena, const Plan& plan, std::int64_t heads) {
  const std::int64_t items = plan.total_chunks * heads, size = plan.K * plan.V;
  const std::int64_t flows = plan.N * heads * plan.node_bits;
  Buffers<T> buffers{TakeScalarStates<T>(arena, plan, heads), {}};
  ScalarGradients<T>& gradients = buffers.gradients;
  gradients.node_bits = plan.node_bits;
  gradients.grads = arena.Take<T>(items * size);
  if (plan.node_bits > kRunShift + 1) {
    gradients.partial = arena.Take<T>(
        NumRuns(plan.total_chunks, static_cast<int>(plan.N), kRunShift) * heads * size);
  }
  gradients.read_flow = arena.Take<T>(items * plan.node_bits);
  gradients.final_flow = arena.Take<T>(flows);
  gradients.merge_flow = arena.Take<T>(items);
  gradients.initial_merge_flow = arena.Take<T>(flows);
  gradients.row_flow = arena.Take<T>(items * kChunk);
  gradients.write_flow = arena.Take<T>(items * kChunk);
  return buffers;
}

}  // namespace

template <typename Math>
std::size_t ScalarBackwardBytes(const Inputs& inputs) {
  return CallBytes(inputs, TakeBuffers<typename Math::Scalar>);
}

template <typename Math>
void ScalarBackward(const Inputs& inputs, const TensorView& d_o, const StateGradView& d_final_state,
                    const Gradients& gradients, const Context& context) {
  using T = typename Math::Scalar;
  Call call(inputs, context);
  const Plan& plan = call.plan;
  const Problem& problem = call.problem;
  const cudaStream_t stream = call.stream;

  const StateGradView& initial = gradients.initial_state;
  const ScalarOutputs out{.q = MakeGradients(gradients.q, {}, {}, stream),
                          .k = MakeGradients(gradients.k, initial.k, d_final_state.k, stream),
                          .v = MakeGradients(gradients.v, initial.v, d_final_state.v, stream),
                          .g = MakeGradients(gradients.g, initial.g, d_final_state.g, stream),
                          .level_scales = MakeRows(gradients.level_scales)};
  T* initial_nodes = nullptr;
  if (initial.nodes.given() && plan.initial_slots > 0) {
    initial_nodes = static_cast<T*>(initial.nodes.data);
    ZeroAsync(initial_nodes, initial.nodes.num_elements() * sizeof(T), stream);
  }
  TokenRows d_output;
  d_output.call = MakeRows(d_o);

  call.ForEachPass(TakeBuffers<T>, [&](Buffers<T> buffers) {
    buffers.gradients.initial = initial_nodes;
    ComputeScalarStates<Math>(problem, plan, buffers.states, stream);
    ComputeScalarStateGradients<Math>(problem, plan, buffers.states, buffers.gradients, d_output,
                                      d_final_state.nodes, stream);
    ComputeScalarChunkGradients<Math>(problem, plan, buffers.states, buffers.gradients, d_output,
                                      out, stream);
  });
}

#define FENWICK_INSTANTIATE(Math)                                                            \
  template std::size_t ScalarBackwardBytes<Math>(const Inputs&);                             \
  template void ScalarBackward<Math>(const Inputs&, const TensorView&, const StateGradView&, \
                                     const Gradients&, const Context&);
FENWICK_INSTANTIATE(FmaMath<float>)
FENWICK_INSTANTIATE(FmaMath<double>)
FENWICK_INSTANTIATE(TensorMath)
#undef FENWICK_INSTANTIATE

}  // namespace fenwick::cuda::general
