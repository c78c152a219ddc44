// The forward of the scalar gate on Hopper: plan, tables, tensor maps, the passes for one head
// group after another, and the final state.
#include <algorithm>

#include "cuda/hopper.h"
#include "cuda/hopper_scalar_gate/final_nodes.cuh"
#include "cuda/hopper_scalar_gate/kernels.h"
#include "cuda/hopper_scalar_gate/layout.cuh"
#include "cuda/hopper_scalar_gate/plan.h"
#include "cuda/hopper_scalar_gate/set_up.h"
#include "cuda/launch.h"
#include "cuda/tile/element.cuh"
#include "cuda/tile/tensor_map.h"
#include "cuda/upload.h"

namespace fenwick::cuda::hopper {
namespace {

// Which sequence each chunk and segment belongs to; a block writes those of one sequence.
__global__ void FillTables(const Sequence* sequences, int segments_wanted, int* sequence_of_chunk,
                           int* sequence_of_segment) {
  const int n = static_cast<int>(blockIdx.x);
  const Sequence sequence = sequences[n];
  const int chunks = DivideUp(sequence.length, kChunk);
  const int segments = DivideUp(chunks, 1 << LogSegment(chunks, segments_wanted));
  for (int i = threadIdx.x; i < chunks; i += blockDim.x) {
    sequence_of_chunk[sequence.first_chunk + i] = n;
  }
  for (int i = threadIdx.x; i < segments; i += blockDim.x) {
    sequence_of_segment[sequence.first_segment + i] = n;
  }
}

template <typename Element>
void LaunchForward(const ForwardParams& params, DType scales, const ForwardMaps& maps,
                   const FinalNodes& final_nodes, cudaStream_t stream) {
  LaunchStates<Element>(params, scales, maps, stream);
  switch (params.key_size) {
    case 64: LaunchOutput<Element, 64>(params, maps, stream); break;
    case 128: LaunchOutput<Element, 128>(params, maps, stream); break;
    case 256: LaunchOutput<Element, 256>(params, maps, stream); break;
  }
  if (final_nodes.slots > 0) LaunchFinalNodes<Element>(params, final_nodes, stream);
}

// The call as the general kernels see it, for what is shared of final states, but with chunks of
// this path.
general::Problem MakeGeneralProblem(const ForwardPlan& plan, const Inputs& inputs, char* workspace,
                                    cudaStream_t stream) {
  general::Plan view = general::MakePlan(inputs);
  view.chunks_per_sequence = plan.layout.chunks_per_sequence;
  general::Tables tables;
  if (plan.packed_states > 0) {
    for (std::int64_t n = 0; n < view.N; ++n) {
      const std::int64_t tokens = view.token_begin[n + 1] - view.token_begin[n];
      view.chunk_begin[n + 1] = view.chunk_begin[n] + (tokens + kChunk - 1) / kChunk;
    }
    tables.token_begin = reinterpret_cast<std::int64_t*>(workspace + plan.workspace.token_begin);
    tables.chunk_begin = reinterpret_cast<std::int64_t*>(workspace + plan.workspace.chunk_begin);
    general::UploadTables(view, tables, stream);
  }
  return general::MakeProblem(inputs, view, tables);
}

}  // namespace

ForwardParams SetUpForward(const ForwardPlan& plan, const ForwardWorkspace& w, const Inputs& inputs,
                           char* workspace, cudaStream_t stream) {
  ForwardParams p;
  p.layout = plan.layout;
  p.heads_per_group = static_cast<int>(inputs.v.size(2) / inputs.q.size(2));
  p.key_size = plan.key_size;
  p.value_size = static_cast<int>(inputs.v.size(3));
  p.value_tiles = plan.value_tiles;
  p.levels = static_cast<int>(inputs.level_scales.size(3));
  p.weight_rows = plan.weight_rows;
  p.heads_per_block = plan.heads_per_block;
  p.multiprocessors = plan.multiprocessors;
  p.scale = static_cast<float>(inputs.scale);
  p.g = static_cast<const float*>(inputs.g.data);
  p.g_batch_stride = inputs.g.stride(0);
  p.g_token_stride = inputs.g.stride(1);
  p.level_scales = inputs.level_scales.data;
  p.scales_batch_stride = inputs.level_scales.stride(0);
  p.scales_token_stride = inputs.level_scales.stride(1);
  p.scales_head_stride = inputs.level_scales.stride(2);
  p.items_taken = reinterpret_cast<int*>(workspace + w.items_taken);
  p.local_decay = reinterpret_cast<float*>(workspace + w.local_decay);
  p.decay_to_end = workspace + w.decay_to_end;
  p.weights = reinterpret_cast<__nv_bfloat16*>(workspace + w.weights);
  p.node_states = workspace + w.node_states;
  p.node_decay = reinterpret_cast<float*>(workspace + w.node_decay);
  p.segment_states = reinterpret_cast<float*>(workspace + w.segment_states);
  p.segment_decay = reinterpret_cast<float*>(workspace + w.segment_decay);
  if (!inputs.cu_seqlens.empty()) {
    const auto sequences = MakeSequences(inputs.cu_seqlens, plan.layout.segments_wanted);
    auto* table = reinterpret_cast<Sequence*>(workspace + w.sequences);
    auto* of_chunk = reinterpret_cast<int*>(workspace + w.sequence_of_chunk);
    auto* of_segment = reinterpret_cast<int*>(workspace + w.sequence_of_segment);
    Upload(sequences, table, stream);
    Launch("fill tables", FillTables, static_cast<std::int64_t>(sequences.size()), 128, 0, stream,
           table, plan.layout.segments_wanted, of_chunk, of_segment);
    p.layout.sequences = table;
    p.layout.sequence_of_chunk = of_chunk;
    p.layout.sequence_of_segment = of_segment;
  }
  return p;
}

bool ForwardFits(const Inputs& inputs, const StateView& final_state, const DeviceTraits& device) {
  return IsHopper(device) &&
         MakeForwardPlan(inputs, final_state, device.multiprocessors).has_value();
}

std::size_t ForwardWorkspaceBytes(const Inputs& inputs, const StateView& final_state,
                                  const DeviceTraits& device) {
  return MakeForwardPlan(inputs, final_state, device.multiprocessors).value().workspace.bytes;
}

void Forward(const Inputs& inputs, const TensorView& o, const StateView& final_state,
             const Context& context, const DeviceTraits& device) {
  const ForwardPlan plan = MakeForwardPlan(inputs, final_state, device.multiprocessors).value();
  const auto stream = static_cast<cudaStream_t>(context.stream);
  auto* workspace = static_cast<char*>(context.workspace);
  ForwardParams params = SetUpForward(plan, plan.workspace, inputs, workspace, stream);
  params.o = o.data;
  params.o_mapped = CanMapStores(o);
  params.o_batch_stride = o.stride(0);
  params.o_token_stride = o.stride(1);
  params.o_head_stride = o.stride(2);
  ForwardMaps maps{};
  maps.q = MapTensor(inputs.q, kChunk);
  maps.k = MapTensor(inputs.k, kChunk);
  maps.v = MapTensor(inputs.v, kChunk);
  if (params.o_mapped) maps.o = MapTensor(o, 16);
  if (plan.scales_tile_heads != 0) {
    params.scales_tile_heads = plan.scales_tile_heads;
    params.scales_tile_columns = TileColumns(plan.scales_tile_heads, params.levels);
    maps.scales = MapHeads(inputs.level_scales, kChunk, params.scales_tile_columns);
  }
  FinalNodes final_nodes;
  if (final_state.given()) {
    final_nodes.call = MakeGeneralProblem(plan, inputs, workspace, stream);
    final_nodes.nodes = static_cast<float*>(final_state.nodes.data);
    final_nodes.slots = static_cast<int>(final_state.nodes.size(2));
  }

  const int heads = static_cast<int>(inputs.v.size(2));
  for (int head = 0; head < heads; head += plan.heads_per_pass) {
    params.head_begin = head;
    params.num_heads = std::min(plan.heads_per_pass, heads - head);
    const DType scales = inputs.level_scales.dtype;
    if (inputs.q.dtype == DType::kBFloat16) {
      LaunchForward<BFloat16>(params, scales, maps, final_nodes, stream);
    } else {
      LaunchForward<Float16>(params, scales, maps, final_nodes, stream);
    }
  }
  if (final_state.given()) general::WriteFinalRing(final_nodes.call, final_state, stream);
}

}  // namespace fenwick::cuda::hopper
