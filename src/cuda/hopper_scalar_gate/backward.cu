// The backward of the scalar gate on Hopper: recompute the forward's states, then passes 2 to 7 for
// one head group after another.
#include <algorithm>

#include "cuda/hopper.h"
#include "cuda/hopper_scalar_gate/chunk_grads.cuh"
#include "cuda/hopper_scalar_gate/finish.cuh"
#include "cuda/hopper_scalar_gate/head_runs.cuh"
#include "cuda/hopper_scalar_gate/kernels.h"
#include "cuda/hopper_scalar_gate/local_grads.cuh"
#include "cuda/hopper_scalar_gate/node_grads.cuh"
#include "cuda/hopper_scalar_gate/plan.h"
#include "cuda/hopper_scalar_gate/segment_walk.cuh"
#include "cuda/hopper_scalar_gate/set_up.h"
#include "cuda/launch.h"
#include "cuda/tile/tensor_map.h"

namespace fenwick::cuda::hopper {
namespace {

struct BackwardMaps {
  ForwardMaps forward;
  CUtensorMap d_o, dv;
};

KeyGradient MakeKeyGradient(const TensorView& out, float* partials) {
  KeyGradient d;
  d.partials = partials;
  d.out = out.data;
  d.batch_stride = out.stride(0);
  d.token_stride = out.stride(1);
  d.group_stride = out.stride(2);
  return d;
}

RunRange MakeRunRange(const RunRule& rule, const ForwardPlan& plan) {
  RunRange range;
  range.rule = rule;
  if (rule.Heads(plan.shortest) == rule.Heads(plan.longest)) {
    range.heads = rule.Heads(plan.longest);
    range.runs = rule.Runs(plan.longest);
  }
  return range;
}

BackwardParams MakeBackwardParams(const BackwardPlan& plan, const Inputs& inputs,
                                  const Gradients& gradients, char* workspace,
                                  cudaStream_t stream) {
  BackwardParams b;
  b.forward = SetUpForward(plan.forward, plan.workspace.forward, inputs, workspace, stream);
  b.tokens = static_cast<int>(inputs.q.size(1));
  b.node_runs = MakeRunRange(plan.node_runs, plan.forward);
  b.local_runs = MakeRunRange(plan.local_runs, plan.forward);
  const BackwardWorkspace& w = plan.workspace;
  const auto floats = [workspace](std::size_t offset) {
    return reinterpret_cast<float*>(workspace + offset);
  };
  b.segment_reads = floats(w.segment_reads);
  b.segment_grads = floats(w.segment_grads);
  b.segment_flow = floats(w.segment_flow);
  b.chunk_grads = workspace + w.chunk_grads;
  b.scale_grads = reinterpret_cast<__nv_bfloat16*>(workspace + w.scale_grads);
  b.node_reads = floats(w.node_reads);
  b.local_flow = floats(w.local_flow);
  b.flow_change = floats(w.flow_change);
  b.chunk_flow = reinterpret_cast<FlowStep*>(workspace + w.chunk_flow);
  b.node_dq = floats(w.node_dq);
  b.unfinished = floats(w.unfinished);
  b.value_shares = floats(w.value_shares);
  b.key_size = static_cast<int>(inputs.q.size(3));
  b.key_blocks = plan.forward.key_size / kKeyBlock;
  b.state_tiles = plan.forward.value_tiles * b.key_blocks;
  const bool reduces = plan.MostLocalRuns() > 1;
  b.dq = MakeKeyGradient(gradients.q, reduces ? floats(w.local_dq) : nullptr);
  b.dq.addends = b.node_dq;
  b.dk = MakeKeyGradient(gradients.k, reduces ? floats(w.local_dk) : nullptr);
  b.dv = gradients.v.data;
  b.dv_mapped = CanMapStores(gradients.v);
  b.dv_batch_stride = gradients.v.stride(0);
  b.dv_token_stride = gradients.v.stride(1);
  b.dv_head_stride = gradients.v.stride(2);
  b.dg = static_cast<float*>(gradients.g.data);
  b.dg_batch_stride = gradients.g.stride(0);
  b.dg_token_stride = gradients.g.stride(1);
  b.dscales = gradients.level_scales.data;
  b.dscales_batch_stride = gradients.level_scales.stride(0);
  b.dscales_token_stride = gradients.level_scales.stride(1);
  b.dscales_head_stride = gradients.level_scales.stride(2);
  return b;
}

template <typename Scale>
void LaunchScaleGrads(const BackwardParams& b, cudaStream_t stream) {
  const ForwardParams& p = b.forward;
  const std::int64_t blocks_per_chunk =
      (p.num_heads + WeightHeads<Scale>() - 1) / WeightHeads<Scale>();
  LaunchDependent("scale grads", ScaleGradsKernel<Scale>, p.layout.num_chunks * blocks_per_chunk,
                  kWeightThreads, kChunk * ScalesPitch(p.levels), stream, b);
}

template <typename Element>
void LaunchPass(const BackwardParams& b, DType scales, const BackwardMaps& maps,
                cudaStream_t stream) {
  const ForwardParams& p = b.forward;
  LaunchStates<Element>(p, scales, maps.forward, stream);
  const std::int64_t tiles = std::int64_t{p.num_heads} * b.state_tiles;
  const int heads_in_group = std::min(p.heads_per_group, p.num_heads);
  if (p.layout.num_segments > p.layout.num_sequences) {
    const std::int64_t pairs = (heads_in_group * p.value_tiles + 1) / 2;
    const int levels = p.layout.segment_levels;
    const int parts = (levels + SegmentReadsShape::kNodes - 1) / SegmentReadsShape::kNodes;
    LaunchDependent("segment reads", SegmentReadsKernel<Element>,
                    pairs * b.key_blocks * b.num_groups * p.layout.num_segments * parts,
                    SegmentReadsShape::kThreads, SegmentReadsShape::kSharedBytes, stream,
                    maps.forward.q, maps.d_o, b);
    LaunchDependent("segment walk",
                    levels <= kShortWalkLevels    ? SegmentWalkKernel<Element, kShortWalkLevels>
                    : levels <= kFewSegmentLevels ? SegmentWalkKernel<Element, kFewSegmentLevels>
                                                  : SegmentWalkKernel<Element, kMaxSegmentLevels>,
                    kStateElements / 4 / kWalkThreads * tiles * p.layout.num_sequences,
                    kWalkThreads, 0, stream, b);
  }
  LaunchDependent("chunk grads", ChunkGradsKernel<Element>, tiles * p.layout.num_segments,
                  ChunkGradsShape::kThreads, ChunkGradsShape::kSharedBytes, stream, maps.forward.q,
                  maps.d_o, b);
  const std::int64_t chunks = std::int64_t{b.num_groups} * p.layout.num_chunks;
  LaunchDependent("node grads", NodeGradsKernel<Element>, chunks * b.node_runs.count * b.key_blocks,
                  NodeGradsShape::kThreads, NodeGradsShape::kSharedBytes, stream, maps.forward.q,
                  maps.d_o, b);
  const auto local_grads = [&](auto kernel) {
    LaunchDependent("local grads", kernel, chunks * b.local_runs.count, LocalGradsShape::kThreads,
                    LocalGradsShape::kSharedBytes, stream, maps.forward.q, maps.forward.k,
                    maps.forward.v, maps.d_o, maps.dv, b);
  };
  if (b.key_blocks == 1) {
    local_grads(LocalGradsKernel<Element, KeyBlock::kOnly>);
  } else {
    local_grads(LocalGradsKernel<Element, KeyBlock::kSecond>);
    local_grads(LocalGradsKernel<Element, KeyBlock::kFirst>);
  }
  const bool ends_groups = (p.head_begin + p.num_heads) % p.heads_per_group == 0;
  if (ends_groups && b.dq.partials != nullptr) {
    LaunchDependent("reduce runs", ReduceRunsKernel<Element>,
                    kChunk / kReduceRows * 2 * chunks * b.key_blocks, kReduceThreads, 0, stream, b);
  }
  if (scales == DType::kFloat32) {
    LaunchScaleGrads<float>(b, stream);
  } else {
    LaunchScaleGrads<typename Element::Storage>(b, stream);
  }
  const std::int64_t octets = (p.num_heads + kFlowHeads - 1) / kFlowHeads;
  LaunchDependent("flow", FlowKernel<>, octets * p.layout.num_chunks, kFlowThreads, 0, stream, b);
}

// d_o where the copy engine can read it. Otherwise (an expanded tensor, say) a copy in dv's memory:
// dv of a chunk and head is written only by the block that has read d_o there, and by the last
// kernel that reads d_o.
TensorView MappableGradient(const TensorView& d_o, const TensorView& dv, cudaStream_t stream) {
  if (CanMapTensor(d_o)) return d_o;
  if (!CanMapTensor(dv)) {
    throw Error("d_o: expected a base and strides of multiples of 16 bytes, of it or of d_v");
  }
  CopyParams p;
  p.from = d_o.data;
  p.to = dv.data;
  for (int axis = 0; axis < 4; ++axis) {
    p.from_strides[axis] = d_o.stride(axis);
    p.to_strides[axis] = dv.stride(axis);
  }
  p.elements = d_o.num_elements();
  p.tokens = static_cast<int>(d_o.size(1));
  p.heads = static_cast<int>(d_o.size(2));
  p.width = static_cast<int>(d_o.size(3));
  Launch("copy of d_o", CopyKernel<>, (p.elements + kCopyThreads - 1) / kCopyThreads, kCopyThreads,
         0, stream, p);
  return dv;
}

}  // namespace

bool BackwardFits(const Inputs& inputs, const StateGradView& d_final_state,
                  const Gradients& gradients, const DeviceTraits& device) {
  return IsHopper(device) &&
         MakeBackwardPlan(inputs, d_final_state, gradients, device.multiprocessors).has_value();
}

std::size_t BackwardWorkspaceBytes(const Inputs& inputs, const StateGradView& d_final_state,
                                   const Gradients& gradients, const DeviceTraits& device) {
  return MakeBackwardPlan(inputs, d_final_state, gradients, device.multiprocessors)
      .value()
      .workspace.bytes;
}

void Backward(const Inputs& inputs, const TensorView& d_o, const StateGradView& d_final_state,
              const Gradients& gradients, const Context& context, const DeviceTraits& device) {
  const BackwardPlan plan =
      MakeBackwardPlan(inputs, d_final_state, gradients, device.multiprocessors).value();
  const auto stream = static_cast<cudaStream_t>(context.stream);
  BackwardParams b =
      MakeBackwardParams(plan, inputs, gradients, static_cast<char*>(context.workspace), stream);
  BackwardMaps maps{};
  maps.forward.q = MapTensor(inputs.q, kChunk);
  maps.forward.k = MapTensor(inputs.k, kChunk);
  maps.forward.v = MapTensor(inputs.v, kChunk);
  maps.d_o = MapTensor(MappableGradient(d_o, gradients.v, stream), kChunk);
  if (b.dv_mapped) maps.dv = MapTensor(gradients.v, 16);
  const int heads = static_cast<int>(inputs.v.size(2));
  const int heads_in_group = b.forward.heads_per_group;
  for (int head = 0; head < heads; head += plan.forward.heads_per_pass) {
    b.forward.head_begin = head;
    b.forward.num_heads = std::min(plan.forward.heads_per_pass, heads - head);
    b.group_begin = head / heads_in_group;
    b.num_groups = std::max(1, b.forward.num_heads / heads_in_group);
    b.first_in_group = head % heads_in_group;
    const int pass_end = b.first_in_group + std::min(heads_in_group, b.forward.num_heads);
    for (RunRange* runs : {&b.node_runs, &b.local_runs}) {
      const int shortest = runs->Heads(plan.forward.shortest);
      runs->begin = b.first_in_group / runs->Heads(plan.forward.longest);
      runs->count = (pass_end + shortest - 1) / shortest - runs->begin;
    }
    b.partial_stride =
        inputs.q.size(0) * inputs.q.size(1) * b.num_groups * std::int64_t{b.forward.key_size};
    const DType scales = inputs.level_scales.dtype;
    if (inputs.q.dtype == DType::kBFloat16) {
      LaunchPass<BFloat16>(b, scales, maps, stream);
    } else {
      LaunchPass<Float16>(b, scales, maps, stream);
    }
  }
}

}  // namespace fenwick::cuda::hopper
