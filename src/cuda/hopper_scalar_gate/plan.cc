#include "cuda/hopper_scalar_gate/plan.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <climits>

#include "cuda/hopper.h"
#include "cuda/tile/mappable.h"

namespace fenwick::cuda::hopper {
namespace {

constexpr std::int64_t DivideUp(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

std::int64_t SegmentsOf(std::int64_t chunks, int segments_wanted) {
  return DivideUp(chunks, std::int64_t{1} << LogSegment(static_cast<int>(chunks), segments_wanted));
}

// Chunks and segments of the sequences; false where they pass what kernels count, or float16 holds.
bool CutSequences(const Inputs& inputs, int segments_wanted, ForwardPlan& plan) {
  std::int64_t chunks = 0, segments = 0, shortest = INT_MAX, longest = 0, most_segments = 1;
  std::int64_t sequences = 0;
  const auto add = [&](std::int64_t tokens, std::int64_t times) {
    if (tokens == 0) return;
    const std::int64_t c = DivideUp(tokens, kChunk);
    const std::int64_t s = SegmentsOf(c, segments_wanted);
    chunks += times * c;
    segments += times * s;
    shortest = std::min(shortest, c);
    longest = std::max(longest, c);
    most_segments = std::max(most_segments, s);
    sequences += times;
  };
  const bool packed = !inputs.cu_seqlens.empty();
  if (packed) {
    for (std::size_t n = 0; n + 1 < inputs.cu_seqlens.size(); ++n) {
      add(inputs.cu_seqlens[n + 1] - inputs.cu_seqlens[n], 1);
    }
  } else {
    add(inputs.q.size(1), inputs.q.size(0));
  }
  if (sequences == 0 || longest > std::int64_t{1} << kMaxNodes || chunks > INT_MAX / 64) {
    return false;
  }
  if (inputs.q.dtype == DType::kFloat16 && longest > kMaxFloat16Chunks) return false;
  Layout& layout = plan.layout;
  layout = Layout{};
  layout.num_sequences = static_cast<int>(sequences);
  layout.num_chunks = static_cast<int>(chunks);
  layout.num_segments = static_cast<int>(segments);
  layout.segments_wanted = segments_wanted;
  layout.segment_levels = std::bit_width(static_cast<std::uint64_t>(most_segments - 1));
  plan.shortest = static_cast<int>(shortest);
  plan.longest = static_cast<int>(longest);
  plan.weight_rows = kLocalLevels + std::bit_width(static_cast<std::uint64_t>(longest - 1));
  if (!packed) {
    layout.length = static_cast<int>(inputs.q.size(1));
    layout.chunks_per_sequence = static_cast<int>(longest);
    layout.segments_per_sequence = static_cast<int>(segments / sequences);
  }
  return true;
}

// Heads of a tile of level scales, a power of 2: as many as two tiles fit of, if the copy engine
// can read them.
int ChooseScalesTileHeads(const TensorView& scales, DType dtype, int key_size) {
  if (dtype != DType::kBFloat16 || scales.dtype != dtype) return 0;
  TensorView rows = scales;
  rows.sizes[2] = 1;  // heads lie side by side
  const auto levels = static_cast<int>(scales.size(3));
  if ((scales.size(2) > 1 && scales.stride(2) != levels) || !CanMapTensor(rows)) return 0;
  for (int heads = 4; heads > 0; heads /= 2) {
    if (2 * TileColumns(heads, levels) * 2 * kChunk <= ScalesBytes(key_size)) return heads;
  }
  return 0;
}

// Heads of one item of the output kernel: what is left to do when the first block runs out of items
// against what every item costs, counted in products with a node.
int ChooseHeadsPerItem(const ForwardPlan& plan, int heads_in_group, int groups) {
  constexpr double kPerHead = 1.3;  // the chunk itself
  constexpr double kPerItem = 5;    // scores, exchange of q; as measured at T = 2K to 128K
  const int most_nodes = std::max(1, plan.weight_rows - kLocalLevels);
  const double mean_nodes = std::max(1.0, most_nodes / 2.0);
  int best = 1;
  double best_cost = 0;
  const int most = std::max(1, std::min(heads_in_group, kMaxTilesPerItem / plan.value_tiles));
  for (int heads = 1; heads <= most; ++heads) {
    const int tiles = heads * plan.value_tiles;
    const double items =
        static_cast<double>(DivideUp(heads_in_group, heads)) * groups * plan.layout.num_chunks;
    const double largest = tiles * (most_nodes + kPerHead) + kPerItem;
    const double share =
        items * (tiles * (mean_nodes + kPerHead) + kPerItem) / plan.multiprocessors;
    const double cost = std::max(largest, share + largest / 2);
    if (heads == 1 || cost <= best_cost) best = heads, best_cost = cost;
  }
  return best;
}

std::atomic<std::size_t> g_workspace_target{0};

}  // namespace

void AimWorkspaceAt(std::size_t bytes) { g_workspace_target.store(bytes); }

std::size_t WorkspaceTarget(std::size_t standard) {
  const std::size_t target = g_workspace_target.load();
  return target > 0 ? target : standard;
}

ForwardWorkspace PlaceForwardWorkspace(const ForwardPlan& plan, bool packed, int heads) {
  ForwardWorkspace w;
  const std::size_t chunks = static_cast<std::size_t>(plan.layout.num_chunks) * heads;
  const std::size_t segments = static_cast<std::size_t>(plan.layout.num_segments) * heads;
  const std::size_t state = static_cast<std::size_t>(plan.value_tiles) * plan.key_size * kValueTile;
  if (packed) {
    w.sequences = Place(w.bytes, sizeof(Sequence) * plan.layout.num_sequences);
    w.sequence_of_chunk = Place(w.bytes, sizeof(int) * plan.layout.num_chunks);
    w.sequence_of_segment = Place(w.bytes, sizeof(int) * plan.layout.num_segments);
  }
  w.items_taken = Place(w.bytes, sizeof(int));
  w.local_decay = Place(w.bytes, chunks * 2 * kChunk * 4);
  w.decay_to_end = Place(w.bytes, chunks * kDecayToEndBytes);
  if (plan.scales_tile_heads == 0) {
    w.weights = Place(w.bytes, chunks * plan.weight_rows * kChunk * 2);
  }
  w.node_states = Place(w.bytes, chunks * state * 2);
  w.node_decay = Place(w.bytes, chunks * 4);
  w.segment_states = Place(w.bytes, segments * state * 4);
  w.segment_decay = Place(w.bytes, segments * 4);
  if (plan.packed_states > 0) {
    w.token_begin = Place(w.bytes, (plan.packed_states + 1) * sizeof(std::int64_t));
    w.chunk_begin = Place(w.bytes, (plan.packed_states + 1) * sizeof(std::int64_t));
  }
  return w;
}

int ChooseHeadsPerPass(int heads_in_group, int groups, const std::function<bool(int)>& fits) {
  int best = 1;
  for (int count = 1; count <= heads_in_group; ++count) {
    if (heads_in_group % count == 0 && fits(count)) best = count;
  }
  if (best < heads_in_group) return best;
  for (int g = 2; g <= groups; ++g) {
    if (fits(g * heads_in_group)) best = g * heads_in_group;
  }
  return best;
}

std::optional<ForwardPlan> MakeForwardPlan(const Inputs& inputs, const StateView& final_state,
                                           int multiprocessors) {
  if (inputs.transition != Transition::kScalarGate || inputs.initial_state.given()) {
    return std::nullopt;
  }
  if (inputs.q.dtype != DType::kBFloat16 && inputs.q.dtype != DType::kFloat16) return std::nullopt;
  const std::int64_t key_size = inputs.q.size(3), value_size = inputs.v.size(3);
  if (key_size > 256 || inputs.level_scales.size(3) > kMaxLevels) return std::nullopt;
  for (const TensorView* view : {&inputs.q, &inputs.k, &inputs.v}) {
    if (!CanMapTensor(*view)) return std::nullopt;
  }

  ForwardPlan plan;
  plan.multiprocessors = multiprocessors;
  plan.key_size = key_size <= 64 ? 64 : key_size <= 128 ? 128 : 256;
  plan.value_tiles = static_cast<int>(DivideUp(value_size, kValueTile));
  const int heads = static_cast<int>(inputs.v.size(2));
  const int groups = static_cast<int>(inputs.q.size(2));
  const int heads_in_group = heads / groups;
  const bool packed = !inputs.cu_seqlens.empty();

  if (packed && final_state.given()) plan.packed_states = inputs.num_sequences();
  plan.scales_tile_heads =
      ChooseScalesTileHeads(inputs.level_scales, inputs.q.dtype, plan.key_size);

  // One sequence, be it alone, gives every multiprocessor a block.
  const std::int64_t blocks_per_segment =
      std::int64_t{heads} * plan.value_tiles * DivideUp(plan.key_size, 128);
  const auto segments_wanted = static_cast<int>(DivideUp(multiprocessors, blocks_per_segment));
  if (!CutSequences(inputs, segments_wanted, plan)) return std::nullopt;
  plan.heads_per_pass = ChooseHeadsPerPass(heads_in_group, groups, [&](int count) {
    return PlaceForwardWorkspace(plan, packed, count).bytes <=
           WorkspaceTarget(kForwardWorkspaceTarget);
  });
  plan.workspace = PlaceForwardWorkspace(plan, packed, plan.heads_per_pass);
  const int heads_together = std::min(heads_in_group, plan.heads_per_pass);
  plan.heads_per_block =
      ChooseHeadsPerItem(plan, heads_together, plan.heads_per_pass / heads_together);

  // Grids: everything runs along x.
  const std::int64_t tree_blocks = std::int64_t{plan.value_tiles} * plan.key_size * kValueTile /
                                   512 * plan.heads_per_pass * plan.layout.num_sequences;
  const std::int64_t node_blocks = final_state.given()
                                       ? DivideUp(key_size, kFinalRows) * plan.value_tiles *
                                             plan.heads_per_pass * inputs.num_sequences() *
                                             final_state.nodes.size(2)
                                       : 0;
  if (plan.layout.num_segments * blocks_per_segment > INT_MAX || tree_blocks > INT_MAX ||
      node_blocks > INT_MAX || std::int64_t{plan.layout.num_chunks} * heads > INT_MAX) {
    return std::nullopt;
  }
  return plan;
}

std::vector<Sequence> MakeSequences(std::span<const std::int64_t> cu_seqlens, int segments_wanted) {
  std::vector<Sequence> sequences;
  int chunks = 0, segments = 0;
  for (std::size_t n = 0; n + 1 < cu_seqlens.size(); ++n) {
    const auto length = static_cast<int>(cu_seqlens[n + 1] - cu_seqlens[n]);
    if (length == 0) continue;
    sequences.push_back({static_cast<int>(cu_seqlens[n]), length, chunks, segments});
    const auto count = static_cast<int>(DivideUp(length, kChunk));
    chunks += count;
    segments += static_cast<int>(SegmentsOf(count, segments_wanted));
  }
  return sequences;
}

}  // namespace fenwick::cuda::hopper
