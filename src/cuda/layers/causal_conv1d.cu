// Causal depthwise convolution with SiLU (fenwick/layers.h); one thread a channel and tile of
// tokens, neighbouring threads neighbouring channels:
//   z[t] = bias + sum_w weight[w] x[t - (W-1) + w],   y = silu(z) or z
//   dz = dy silu'(z),   dx[s] = sum_j weight[W-1-j] dz[s + j],
//   d_weight[w] = sum_t dz[t] x[t - (W-1) + w],   d_bias = sum_t dz[t], in two steps of fixed order
// Taps are aligned to the newest token, so that a filter of fewer taps is a wider one whose oldest
// taps are zero: kernels exist for widths 4 and 32, with their windows in registers.
#include <algorithm>
#include <vector>

#include "cuda/layers/cuda_layers.h"
#include "cuda/layers/layer_math.cuh"

namespace fenwick::cuda {
namespace {

constexpr int kForwardTokens = 32;    // of a tile: enough threads at short T
constexpr int kBackwardTokens = 256;  // fewer partial sums of d_weight

// As many sequences as kernel parameters (4 KB everywhere) hold beside the rest.
constexpr int kMaxSequences = 200;
struct Sequences {
  std::int64_t first = 0;              // index of the first of them
  std::int64_t tokens = 0, tiles = 0;  // of each, where all are equal (count = 0)
  int count = 0;                       // packed sequences in the tables
  std::int64_t begin[kMaxSequences + 1];
  int tile_begin[kMaxSequences + 1];
};

struct Conv {
  const void *x, *weight, *bias, *initial;
  DType dtype, weight_dtype, bias_dtype;
  std::int64_t channels;
  int width;
  std::int64_t x_batch, x_token, weight_channel;  // strides
  std::int64_t initial_sequence, initial_channel;
  bool silu;
};

struct Output {
  void* data = nullptr;
  std::int64_t batch = 0, token = 0;  // strides
};

// Tile `id` of a list of sequences.
struct Tile {
  std::int64_t sequence, batch, first_token, tokens;  // of its sequence
  std::int64_t begin, end;                            // its own tokens

  __device__ Tile(const Sequences& sequences, std::int64_t id, int tile_tokens) {
    std::int64_t first_tile = id / (sequences.count == 0 ? sequences.tiles : 1) * sequences.tiles;
    if (sequences.count == 0) {
      Find(sequences, id / sequences.tiles);
    } else {
      int low = 0, high = sequences.count - 1;
      while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (sequences.tile_begin[middle] <= id) {
          low = middle;
        } else {
          high = middle - 1;
        }
      }
      first_tile = sequences.tile_begin[low];
      Find(sequences, low);
    }
    begin = (id - first_tile) * tile_tokens;
    end = begin + tile_tokens < tokens ? begin + tile_tokens : tokens;
  }
  // All of sequence `index` of the list.
  __device__ Tile(const Sequences& sequences, std::int64_t index) {
    Find(sequences, index);
    begin = 0;
    end = tokens;
  }

 private:
  __device__ void Find(const Sequences& sequences, std::int64_t index) {
    const bool packed = sequences.count > 0;
    sequence = sequences.first + index;
    batch = packed ? 0 : index;
    first_token = packed ? sequences.begin[index] : 0;
    tokens = packed ? sequences.begin[index + 1] - first_token : sequences.tokens;
  }
};

// One channel of one sequence.
template <typename T, int kWidth>
struct Channel {
  const Conv& conv;
  const Tile& tile;
  std::int64_t d;
  T weight[kWidth], bias;

  __device__ Channel(const Conv& conv, const Tile& tile, std::int64_t d)
      : conv(conv), tile(tile), d(d) {
#pragma unroll
    for (int w = 0; w < kWidth; ++w) {
      const int tap = w - (kWidth - conv.width);
      weight[w] =
          tap >= 0 ? LoadElement<T>(conv.weight, conv.weight_dtype, d * conv.weight_channel + tap)
                   : T(0);
    }
    bias = conv.bias ? LoadElement<T>(conv.bias, conv.bias_dtype, d) : T(0);
  }

  // x[t], from the initial state where t < 0.
  __device__ T X(std::int64_t t) const {
    if (t >= 0) {
      return LoadElement<T>(conv.x, conv.dtype,
                            tile.batch * conv.x_batch + (tile.first_token + t) * conv.x_token + d);
    }
    const std::int64_t slot = conv.width - 1 + t;
    if (slot < 0 || conv.initial == nullptr) return T(0);
    return LoadElement<T>(conv.initial, conv.dtype,
                          tile.sequence * conv.initial_sequence + d * conv.initial_channel + slot);
  }
  // window[w] = x[t - (kWidth - 1) + w] for the token before `t`.
  __device__ void Fill(std::int64_t t, T* window) const {
#pragma unroll
    for (int w = 0; w < kWidth; ++w) window[w] = X(t - kWidth + w);
  }
  __device__ T Z(const T* window) const {
    T z = bias;
#pragma unroll
    for (int w = 0; w < kWidth; ++w) z += weight[w] * window[w];
    return z;
  }
};

template <typename T, int kWidth>
__device__ inline void Push(T* window, T newest) {
#pragma unroll
  for (int w = 0; w + 1 < kWidth; ++w) window[w] = window[w + 1];
  window[kWidth - 1] = newest;
}

// Threads of channels beyond the last have nothing to do.
__device__ inline bool FindChannel(const Conv& conv, std::int64_t* tile, std::int64_t* channel) {
  const std::int64_t blocks = (conv.channels + kLayerThreads - 1) / kLayerThreads;
  *tile = blockIdx.x / blocks;
  *channel = blockIdx.x % blocks * kLayerThreads + threadIdx.x;
  return *channel < conv.channels;
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kLayerThreads)
    ConvForward(Conv conv, Sequences sequences, Output y) {
  std::int64_t id, d;
  if (!FindChannel(conv, &id, &d)) return;
  const Tile tile(sequences, id, kForwardTokens);
  const Channel<T, kWidth> channel(conv, tile, d);
  T window[kWidth];
  channel.Fill(tile.begin, window);
  for (std::int64_t t = tile.begin; t < tile.end; ++t) {
    Push<T, kWidth>(window, channel.X(t));
    const T z = channel.Z(window);
    StoreElement<T>(y.data, conv.dtype, tile.batch * y.batch + (tile.first_token + t) * y.token + d,
                    conv.silu ? Silu(z) : z);
  }
}

// The last W-1 tokens; one thread a sequence and channel, in an order that allows in-place updates.
template <typename T>
__global__ void __launch_bounds__(kLayerThreads)
    ConvState(Conv conv, Sequences sequences, void* state, std::int64_t state_sequence,
              std::int64_t state_channel) {
  std::int64_t index, d;
  if (!FindChannel(conv, &index, &d)) return;
  const Tile tile(sequences, index);
  for (int w = 0; w + 1 < conv.width; ++w) {
    const std::int64_t t = tile.tokens - (conv.width - 1) + w;
    T value = 0;
    if (t >= 0) {
      value = LoadElement<T>(conv.x, conv.dtype,
                             tile.batch * conv.x_batch + (tile.first_token + t) * conv.x_token + d);
    } else if (conv.initial != nullptr) {
      value = LoadElement<T>(
          conv.initial, conv.dtype,
          tile.sequence * conv.initial_sequence + d * conv.initial_channel + conv.width - 1 + t);
    }
    StoreElement<T>(state, conv.dtype, tile.sequence * state_sequence + d * state_channel + w,
                    value);
  }
}

// dx, and this tile's sums: partial[tile][w][d] of d_weight, w = kWidth of d_bias.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kLayerThreads)
    ConvBackward(Conv conv, Sequences sequences, Output d_y, Output d_x, T* partial) {
  std::int64_t id, d;
  if (!FindChannel(conv, &id, &d)) return;
  const Tile tile(sequences, id, kBackwardTokens);
  const Channel<T, kWidth> channel(conv, tile, d);
  T window[kWidth], dz[kWidth] = {}, sums[kWidth] = {}, bias_sum = 0;
  channel.Fill(tile.begin, window);
  for (std::int64_t t = tile.begin; t < tile.end + kWidth - 1; ++t) {
    T gradient = 0;
    if (t < tile.tokens) {
      Push<T, kWidth>(window, channel.X(t));
      gradient = LoadElement<T>(d_y.data, conv.dtype,
                                tile.batch * d_y.batch + (tile.first_token + t) * d_y.token + d);
      if (conv.silu) gradient *= SiluSlope(channel.Z(window));
    }
    if (t < tile.end) {
      bias_sum += gradient;
#pragma unroll
      for (int w = 0; w < kWidth; ++w) sums[w] += gradient * window[w];
    }
    Push<T, kWidth>(dz, gradient);
    const std::int64_t s = t - (kWidth - 1);
    if (s < tile.begin || d_x.data == nullptr) continue;
    T dx = 0;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) dx += channel.weight[kWidth - 1 - j] * dz[j];
    StoreElement<T>(d_x.data, conv.dtype,
                    tile.batch * d_x.batch + (tile.first_token + s) * d_x.token + d, dx);
  }
  if (partial == nullptr) return;
  T* to = partial + id * (kWidth + 1) * conv.channels + d;
#pragma unroll
  for (int w = 0; w < kWidth; ++w) to[w * conv.channels] = sums[w];
  to[kWidth * conv.channels] = bias_sum;
}

// d_initial[slot] = sum_{t <= slot} weight[slot - t] dz[t]; one thread a sequence and channel.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kLayerThreads)
    ConvInitialGradient(Conv conv, Sequences sequences, Output d_y, void* d_initial,
                        std::int64_t sequence_stride, std::int64_t channel_stride) {
  std::int64_t index, d;
  if (!FindChannel(conv, &index, &d)) return;
  const Tile tile(sequences, index);
  const Channel<T, kWidth> channel(conv, tile, d);
  T window[kWidth], sums[kWidth] = {};
  channel.Fill(0, window);
#pragma unroll
  for (int t = 0; t < kWidth; ++t) {
    if (t >= tile.tokens || t + 1 >= conv.width) break;
    Push<T, kWidth>(window, channel.X(t));
    T dz = LoadElement<T>(d_y.data, conv.dtype,
                          tile.batch * d_y.batch + (tile.first_token + t) * d_y.token + d);
    if (conv.silu) dz *= SiluSlope(channel.Z(window));
#pragma unroll
    for (int slot = t; slot < kWidth; ++slot) {
      const int tap = slot - t;
      if (slot + 1 < conv.width) {
        sums[slot] +=
            dz * LoadElement<T>(conv.weight, conv.weight_dtype, d * conv.weight_channel + tap);
      }
    }
  }
#pragma unroll
  for (int slot = 0; slot < kWidth; ++slot) {
    if (slot + 1 < conv.width) {
      StoreElement<T>(d_initial, conv.dtype,
                      tile.sequence * sequence_stride + d * channel_stride + slot, sums[slot]);
    }
  }
}

Conv MakeConv(const CausalConv& inputs) {
  Conv conv{};
  conv.x = inputs.x.data;
  conv.dtype = inputs.x.dtype;
  conv.x_batch = inputs.x.stride(0);
  conv.x_token = inputs.x.stride(1);
  conv.channels = inputs.x.size(2);
  conv.weight = inputs.weight.data;
  conv.weight_dtype = inputs.weight.dtype;
  conv.weight_channel = inputs.weight.stride(0);
  conv.width = static_cast<int>(inputs.weight.size(1));
  if (inputs.bias.given()) {
    conv.bias = inputs.bias.data;
    conv.bias_dtype = inputs.bias.dtype;
  }
  if (inputs.initial_state.given()) {
    conv.initial = inputs.initial_state.data;
    conv.initial_sequence = inputs.initial_state.stride(0);
    conv.initial_channel = inputs.initial_state.stride(1);
  }
  conv.silu = inputs.silu;
  return conv;
}

Output MakeOutput(const TensorView& view) {
  if (!view.given()) return {};
  return {view.data, view.stride(0), view.stride(1)};
}

std::int64_t TilesOf(std::int64_t tokens, int tile_tokens) {
  return (tokens + tile_tokens - 1) / tile_tokens;
}

// f(sequences, tiles, first tile) for as many sequences at a time as a launch takes.
template <typename F>
void ForEachPiece(const CausalConv& inputs, int tile_tokens, F&& f) {
  Sequences sequences{};
  const std::int64_t N = inputs.num_sequences();
  if (inputs.cu_seqlens.empty()) {
    sequences.tokens = inputs.x.size(1);
    sequences.tiles = TilesOf(sequences.tokens, tile_tokens);
    f(sequences, N * sequences.tiles, std::int64_t{0}, N);
    return;
  }
  std::int64_t first_tile = 0;
  for (std::int64_t first = 0; first < N; first += kMaxSequences) {
    sequences.first = first;
    sequences.count = static_cast<int>(std::min<std::int64_t>(kMaxSequences, N - first));
    std::int64_t tiles = 0;
    for (int i = 0; i <= sequences.count; ++i) {
      sequences.begin[i] = inputs.cu_seqlens[first + i];
      sequences.tile_begin[i] = static_cast<int>(tiles);
      if (i < sequences.count) {
        tiles += TilesOf(inputs.cu_seqlens[first + i + 1] - sequences.begin[i], tile_tokens);
      }
    }
    f(sequences, tiles, first_tile, static_cast<std::int64_t>(sequences.count));
    first_tile += tiles;
  }
}

std::int64_t CountTiles(const CausalConv& inputs, int tile_tokens) {
  std::int64_t count = 0;
  ForEachPiece(
      inputs, tile_tokens,
      [&](const Sequences&, std::int64_t tiles, std::int64_t, std::int64_t) { count += tiles; });
  return count;
}

constexpr int KernelWidth(int width) { return width <= 4 ? 4 : kMaxConvWidth; }
static_assert(KernelWidth(kMaxConvWidth) == 32);

template <typename F>
void WithTypes(const CausalConv& inputs, F&& f) {
  const bool wide = KernelWidth(static_cast<int>(inputs.weight.size(1))) == kMaxConvWidth;
  if (inputs.x.dtype == DType::kFloat64) {
    wide ? f.template operator()<double, kMaxConvWidth>() : f.template operator()<double, 4>();
  } else {
    wide ? f.template operator()<float, kMaxConvWidth>() : f.template operator()<float, 4>();
  }
}

bool WantsSums(const CausalConvGradients& gradients) {
  return gradients.weight.given() || gradients.bias.given();
}

}  // namespace

void CausalConv1d(const CausalConv& inputs, const TensorView& y, const TensorView& final_state,
                  const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const Conv conv = MakeConv(inputs);
  const std::int64_t channel_blocks = (conv.channels + kLayerThreads - 1) / kLayerThreads;
  WithTypes(inputs, [&]<typename T, int kWidth>() {
    ForEachPiece(inputs, kForwardTokens,
                 [&](const Sequences& sequences, std::int64_t tiles, std::int64_t, std::int64_t) {
                   Launch("causal conv", ConvForward<T, kWidth>, tiles * channel_blocks,
                          kLayerThreads, 0, stream, conv, sequences, MakeOutput(y));
                 });
    if (!final_state.given() || conv.width == 1) return;
    ForEachPiece(inputs, kForwardTokens,
                 [&](const Sequences& sequences, std::int64_t, std::int64_t, std::int64_t count) {
                   Launch("causal conv state", ConvState<T>, count * channel_blocks, kLayerThreads,
                          0, stream, conv, sequences, final_state.data, final_state.stride(0),
                          final_state.stride(1));
                 });
  });
}

void CausalConv1dBackward(const CausalConv& inputs, const TensorView& d_y,
                          const CausalConvGradients& gradients, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const Conv conv = MakeConv(inputs);
  const std::int64_t channel_blocks = (conv.channels + kLayerThreads - 1) / kLayerThreads;
  WithTypes(inputs, [&]<typename T, int kWidth>() {
    T* partial = WantsSums(gradients) ? static_cast<T*>(context.workspace) : nullptr;
    std::int64_t parts = 0;
    ForEachPiece(
        inputs, kBackwardTokens,
        [&](const Sequences& sequences, std::int64_t tiles, std::int64_t first_tile, std::int64_t) {
          T* to = partial ? partial + first_tile * (kWidth + 1) * conv.channels : nullptr;
          Launch("causal conv backward", ConvBackward<T, kWidth>, tiles * channel_blocks,
                 kLayerThreads, 0, stream, conv, sequences, MakeOutput(d_y),
                 MakeOutput(gradients.x), to);
          parts += tiles;
        });
    const std::int64_t stride = (kWidth + 1) * conv.channels;
    const auto sum = [&](int row, void* out, DType dtype, std::int64_t out_stride) {
      Launch("causal conv weight", SumParts<T>, (conv.channels + 31) / 32, kLayerThreads, 0, stream,
             partial + row * conv.channels, parts, conv.channels, out, dtype, out_stride, stride);
    };
    if (gradients.weight.given()) {
      const TensorView& weight = gradients.weight;
      for (int w = 0; w < conv.width; ++w) {
        sum(kWidth - conv.width + w,
            static_cast<char*>(weight.data) + w * ElementSize(weight.dtype), weight.dtype,
            weight.stride(0));
      }
    }
    if (gradients.bias.given()) sum(kWidth, gradients.bias.data, gradients.bias.dtype, 1);
    if (!gradients.initial_state.given() || conv.width == 1) return;
    ForEachPiece(inputs, kBackwardTokens,
                 [&](const Sequences& sequences, std::int64_t, std::int64_t, std::int64_t count) {
                   Launch("causal conv initial", ConvInitialGradient<T, kWidth>,
                          count * channel_blocks, kLayerThreads, 0, stream, conv, sequences,
                          MakeOutput(d_y), gradients.initial_state.data,
                          gradients.initial_state.stride(0), gradients.initial_state.stride(1));
                 });
  });
}

std::size_t CausalConv1dBackwardWorkspaceBytes(const CausalConv& inputs,
                                               const CausalConvGradients& gradients) {
  if (!WantsSums(gradients)) return 0;
  const std::size_t element = inputs.x.dtype == DType::kFloat64 ? 8 : 4;
  return CountTiles(inputs, kBackwardTokens) *
         (KernelWidth(static_cast<int>(inputs.weight.size(1))) + 1) * inputs.x.size(2) * element;
}

}  // namespace fenwick::cuda
