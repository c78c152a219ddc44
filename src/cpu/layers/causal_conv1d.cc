// Causal depthwise convolution with SiLU (fenwick/layers.h), vectorised over channels:
//   z[t] = bias + sum_w weight[w] * x[t - (W-1) + w],   y = silu(z)
//   dz = dy * silu'(z),   dx[t] = sum_w weight[w] * dz[t + (W-1) - w]
//   dweight[w] = sum_t dz[t] * x[t - (W-1) + w],   dbias = sum_t dz[t]
#include <cstring>
#include <memory>
#include <vector>

#include "core/thread_pool.h"
#include "cpu/highway_targets.h"
#include "cpu/layers/conv_blocks.h"
#include "cpu/layers/cpu_layers.h"
#include "cpu/scratch.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/layers/causal_conv1d.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "cpu/layers/silu-inl.h"
#include "cpu/rows-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace fenwick::cpu {
namespace HWY_NAMESPACE {

// Weight and bias as rows over channels: row w < W is weight[:, w], row W is the bias.
template <typename T>
std::vector<T> LoadTaps(const CausalConv& inputs) {
  const int64_t channels = inputs.weight.size(0), width = inputs.weight.size(1);
  const int64_t ld = PaddedColumns<T>(channels);
  std::vector<T> taps((width + 1) * ld);
  alignas(64) T row[PaddedColumns<T>(kMaxConvWidth)];
  for (int64_t c = 0; c < channels; ++c) {
    LoadRow(inputs.weight.dtype, At(inputs.weight, c * inputs.weight.stride(0)), width, row);
    for (int64_t w = 0; w < width; ++w) taps[w * ld + c] = row[w];
  }
  if (inputs.bias.given()) {
    LoadRow(inputs.bias.dtype, At(inputs.bias, 0), channels, taps.data() + width * ld);
  }
  return taps;
}

// One block of channels of one sequence.
template <typename T>
class ConvTile {
 public:
  ConvTile(const CausalConv& inputs, const std::vector<T>& taps, const ConvBlock& block,
           int64_t first_channel, int64_t channels)
      : inputs_(inputs),
        block_(block),
        first_channel_(first_channel),
        channels_(channels),
        width_(inputs.weight.size(1)),
        ld_(PaddedColumns<T>(channels)),
        taps_(taps.data() + first_channel),
        taps_ld_(PaddedColumns<T>(inputs.x.size(2))) {}

  int64_t ld() const { return ld_; }
  int64_t width() const { return width_; }
  const T* tap(int64_t w) const { return taps_ + w * taps_ld_; }

  std::byte* Row(const TensorView& view, int64_t position) const {
    return At(view, block_.batch * view.stride(0) + (block_.token + position) * view.stride(1) +
                        first_channel_);
  }

  // x of positions [begin, end) to rows of `out`; positions before 0 come from the initial state.
  void LoadTokens(int64_t begin, int64_t end, T* out) const {
    for (int64_t p = begin; p < end; ++p, out += ld_) {
      if (p >= 0) {
        LoadRow(inputs_.x.dtype, Row(inputs_.x, p), channels_, out);
      } else {
        LoadState(width_ - 1 + p, out);
      }
    }
  }

  // z of the last token of `x` [W rows], one vector at channel c.
  template <class D>
  HWY_INLINE hn::Vec<D> PreActivation(D d, const T* x, int64_t c) const {
    auto z = hn::LoadU(d, tap(width_) + c);
    for (int64_t w = 0; w < width_; ++w) {
      z = hn::MulAdd(hn::LoadU(d, tap(w) + c), hn::LoadU(d, x + w * ld_ + c), z);
    }
    return z;
  }

  // Column j of the gradient of the initial state.
  void StoreStateGradient(const TensorView& d_state, int64_t j, const T* in) const {
    alignas(64) T element[PaddedColumns<T>(1)] = {};
    for (int64_t c = 0; c < channels_; ++c) {
      element[0] = in[c];
      StoreRow(d_state.dtype, element, 1, StateElement(d_state, c, j));
    }
  }

 private:
  std::byte* StateElement(const TensorView& state, int64_t c, int64_t j) const {
    return At(state,
              block_.sequence * state.stride(0) + (first_channel_ + c) * state.stride(1) + j);
  }

  void LoadState(int64_t j, T* out) const {
    std::memset(out, 0, ld_ * sizeof(T));
    if (!inputs_.initial_state.given()) return;
    alignas(64) T element[PaddedColumns<T>(1)];
    for (int64_t c = 0; c < channels_; ++c) {
      LoadRow(inputs_.x.dtype, StateElement(inputs_.initial_state, c, j), 1, element);
      out[c] = element[0];
    }
  }

  const CausalConv& inputs_;
  const ConvBlock& block_;
  int64_t first_channel_, channels_, width_, ld_;
  const T* taps_;
  int64_t taps_ld_;
};

template <typename T>
void ForwardBlock(const CausalConv& inputs, const std::vector<T>& taps, const ConvBlock& block,
                  int64_t first_channel, int64_t channels, const TensorView& y) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const ConvTile<T> tile(inputs, taps, block, first_channel, channels);
  const int64_t ld = tile.ld(), history = tile.width() - 1;
  Scratch scratch;
  T* x = scratch.New<T>((block.end - block.begin + history) * ld);
  T* out = scratch.New<T>(ld);
  tile.LoadTokens(block.begin - history, block.end, x);
  for (int64_t p = block.begin; p < block.end; ++p, x += ld) {
    for (int64_t c = 0; c < channels; c += lanes) {
      const auto z = tile.PreActivation(d, x, c);
      hn::StoreU(inputs.silu ? hn::Mul(z, Sigmoid(d, z)) : z, d, out + c);
    }
    StoreRow(y.dtype, out, channels, tile.Row(y, p));
  }
}

template <typename T>
void Forward(const CausalConv& inputs, const TensorView& y, int num_threads) {
  const std::vector<T> taps = LoadTaps<T>(inputs);
  const std::vector<ConvBlock> blocks = MakeConvBlocks(inputs, kConvTokens);
  const int64_t channels = inputs.x.size(2);
  const int64_t channel_blocks = (channels + kConvChannels - 1) / kConvChannels;
  ParallelFor(static_cast<int64_t>(blocks.size()) * channel_blocks, num_threads,
              [&](int64_t task, int) {
                const int64_t first = task % channel_blocks * kConvChannels;
                ForwardBlock(inputs, taps, blocks[task / channel_blocks], first,
                             std::min(kConvChannels, channels - first), y);
              });
}

void ConvForward(const CausalConv& inputs, const TensorView& y, int num_threads) {
  if (inputs.x.dtype == DType::kFloat64) {
    Forward<double>(inputs, y, num_threads);
  } else {
    Forward<float>(inputs, y, num_threads);
  }
}

// Gradients of one block of channels over one segment; adds to sums [W + 1, ld]: rows of dweight,
// then dbias.
template <typename T>
void BackwardSegment(const CausalConv& inputs, const std::vector<T>& taps, const ConvBlock& segment,
                     int64_t first_channel, int64_t channels, const TensorView& d_y,
                     const CausalConvGradients& gradients, T* sums, int64_t sums_ld) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const ConvTile<T> tile(inputs, taps, segment, first_channel, channels);
  const int64_t ld = tile.ld(), width = tile.width(), history = width - 1;
  Scratch scratch;
  T* x = scratch.New<T>((kConvTokens + 2 * history) * ld);
  T* dz = scratch.New<T>((kConvTokens + history) * ld);
  T* dx = scratch.New<T>(ld);
  for (int64_t w = 0; w <= width; ++w) std::memset(sums + w * sums_ld, 0, ld * sizeof(T));

  for (int64_t begin = segment.begin; begin < segment.end; begin += kConvTokens) {
    const int64_t end = std::min(segment.end, begin + kConvTokens);
    // Tokens up to W-1 past the block feed on it; past the sequence there are none.
    const int64_t known = std::min(segment.length, end + history);
    tile.LoadTokens(begin - history, known, x);
    std::memset(dz + (known - begin) * ld, 0, (end + history - known) * ld * sizeof(T));
    for (int64_t p = begin; p < known; ++p) {
      T* row = dz + (p - begin) * ld;
      LoadRow(d_y.dtype, tile.Row(d_y, p), channels, row);
      if (!inputs.silu) continue;
      for (int64_t c = 0; c < channels; c += lanes) {
        const auto z = tile.PreActivation(d, x + (p - begin) * ld, c);
        const auto slope = SiluSlope(d, z, Sigmoid(d, z));
        hn::StoreU(hn::Mul(hn::LoadU(d, row + c), slope), d, row + c);
      }
    }

    for (int64_t p = begin; p < end; ++p) {
      for (int64_t c = 0; c < channels; c += lanes) {
        const auto g = hn::LoadU(d, dz + (p - begin) * ld + c);
        for (int64_t w = 0; w < width; ++w) {
          T* sum = sums + w * sums_ld + c;
          hn::StoreU(hn::MulAdd(g, hn::LoadU(d, x + (p - begin + w) * ld + c), hn::LoadU(d, sum)),
                     d, sum);
        }
        T* sum = sums + width * sums_ld + c;
        hn::StoreU(hn::Add(g, hn::LoadU(d, sum)), d, sum);
      }
    }

    const bool has_state = begin == 0 && gradients.initial_state.given();
    for (int64_t p = has_state ? -history : begin; p < end; ++p) {
      for (int64_t c = 0; c < channels; c += lanes) {
        auto sum = hn::Zero(d);
        for (int64_t w = 0; w < width; ++w) {
          const int64_t row = p + history - w - begin;
          if (row < 0) break;
          sum = hn::MulAdd(hn::LoadU(d, tile.tap(w) + c), hn::LoadU(d, dz + row * ld + c), sum);
        }
        hn::StoreU(sum, d, dx + c);
      }
      if (p < 0) {
        tile.StoreStateGradient(gradients.initial_state, history + p, dx);
      } else if (gradients.x.given()) {
        StoreRow(gradients.x.dtype, dx, channels, tile.Row(gradients.x, p));
      }
    }
  }
}

// d_weight and d_bias of channels [first, first + count) from the segments' sums.
template <typename T>
void StoreTapGradients(const T* sums, int64_t num_segments, int64_t width, int64_t ld,
                       int64_t first, int64_t count, const CausalConvGradients& gradients) {
  std::vector<double> total((width + 1) * count, 0.0);
  for (int64_t s = 0; s < num_segments; ++s) {
    for (int64_t w = 0; w <= width; ++w) {
      const T* row = sums + (s * (width + 1) + w) * ld + first;
      for (int64_t c = 0; c < count; ++c) total[w * count + c] += row[c];
    }
  }
  alignas(64) T out[PaddedColumns<T>(kMaxConvWidth)] = {};
  for (int64_t c = 0; c < count; ++c) {
    if (gradients.weight.given()) {
      for (int64_t w = 0; w < width; ++w) out[w] = static_cast<T>(total[w * count + c]);
      StoreRow(gradients.weight.dtype, out, width,
               At(gradients.weight, (first + c) * gradients.weight.stride(0)));
    }
    if (gradients.bias.given()) {
      out[0] = static_cast<T>(total[width * count + c]);
      StoreRow(gradients.bias.dtype, out, 1, At(gradients.bias, first + c));
    }
  }
}

template <typename T>
void Backward(const CausalConv& inputs, const TensorView& d_y, const CausalConvGradients& gradients,
              int num_threads) {
  const std::vector<T> taps = LoadTaps<T>(inputs);
  const std::vector<ConvBlock> segments = MakeConvBlocks(inputs, kConvSegment);
  const int64_t num_segments = static_cast<int64_t>(segments.size());
  const int64_t channels = inputs.x.size(2), width = inputs.weight.size(1);
  const int64_t channel_blocks = (channels + kConvChannels - 1) / kConvChannels;
  const int64_t ld = PaddedColumns<T>(channels);
  const std::unique_ptr<T[]> sums(new T[num_segments * (width + 1) * ld]);
  ParallelFor(num_segments * channel_blocks, num_threads, [&](int64_t task, int) {
    const int64_t first = task % channel_blocks * kConvChannels, segment = task / channel_blocks;
    BackwardSegment(inputs, taps, segments[segment], first,
                    std::min(kConvChannels, channels - first), d_y, gradients,
                    sums.get() + segment * (width + 1) * ld + first, ld);
  });
  ParallelFor(channel_blocks, num_threads, [&](int64_t block, int) {
    const int64_t first = block * kConvChannels;
    StoreTapGradients(sums.get(), num_segments, width, ld, first,
                      std::min(kConvChannels, channels - first), gradients);
  });
}

void ConvBackward(const CausalConv& inputs, const TensorView& d_y,
                  const CausalConvGradients& gradients, int num_threads) {
  if (inputs.x.dtype == DType::kFloat64) {
    Backward<double>(inputs, d_y, gradients, num_threads);
  } else {
    Backward<float>(inputs, d_y, gradients, num_threads);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fenwick::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fenwick::cpu {
namespace {

HWY_EXPORT(ConvForward);
HWY_EXPORT(ConvBackward);

// The last W-1 tokens of sequence n. Where the state is updated in place, an element is read before
// it is overwritten: tokens move towards the front.
void WriteFinalState(const CausalConv& inputs, const TensorView& final_state, std::int64_t n) {
  const TensorView& x = inputs.x;
  const TensorView& before = inputs.initial_state;
  const ConvBlock sequence = WholeSequence(inputs, n);
  const std::int64_t history = inputs.weight.size(1) - 1;
  const std::size_t bytes = ElementSize(x.dtype);
  for (std::int64_t c = 0; c < x.size(2); ++c) {
    for (std::int64_t j = 0; j < history; ++j) {
      const std::int64_t position = sequence.length - history + j;
      std::byte* to = At(final_state, n * final_state.stride(0) + c * final_state.stride(1) + j);
      if (position >= 0) {
        const std::int64_t token = sequence.token + position;
        std::memcpy(to, At(x, sequence.batch * x.stride(0) + token * x.stride(1) + c), bytes);
      } else if (before.given()) {
        const std::int64_t column = sequence.length + j;
        std::memmove(to, At(before, n * before.stride(0) + c * before.stride(1) + column), bytes);
      } else {
        std::memset(to, 0, bytes);
      }
    }
  }
}

}  // namespace

void CausalConv1d(const CausalConv& inputs, const TensorView& y, const TensorView& final_state,
                  const Context& context) {
  const int num_threads = NumThreads(context);
  HWY_DYNAMIC_DISPATCH(ConvForward)(inputs, y, num_threads);
  if (!final_state.given()) return;
  ParallelFor(inputs.num_sequences(), num_threads,
              [&](std::int64_t n, int) { WriteFinalState(inputs, final_state, n); });
}

void CausalConv1dBackward(const CausalConv& inputs, const TensorView& d_y,
                          const CausalConvGradients& gradients, const Context& context) {
  HWY_DYNAMIC_DISPATCH(ConvBackward)(inputs, d_y, gradients, NumThreads(context));
  const TensorView& d_state = gradients.initial_state;
  if (!d_state.given()) return;
  // Sequences without a token have no block: their state reached nothing.
  for (std::int64_t n = 0; n < inputs.num_sequences(); ++n) {
    if (WholeSequence(inputs, n).length > 0) continue;
    for (std::int64_t c = 0; c < d_state.size(1); ++c) {
      std::memset(At(d_state, n * d_state.stride(0) + c * d_state.stride(1)), 0,
                  d_state.size(2) * ElementSize(d_state.dtype));
    }
  }
}

}  // namespace fenwick::cpu
#endif  // HWY_ONCE
