// Gated delta rule, decoding. From the newest token of the ring back to the base, with r = scale q:
//   weight[s] = beta[s] (k[s] r)      then    r <- exp(g[s]) (r - beta[s] (k[s] r) k[s])
// and what is left of r reads the nodes. Token by token that is a chain of 64 to 128 sums over K.
// Here it is one of blocks of kTokenBlock tokens. Within a block, decays left aside,
//   beta^-1 weight[s] + sum over its newer tokens t of (k[s] k[t]) weight[t] = k[s] r
// so that the block's weights are T^T (K r), T its `solve`: triangular, small, and independent of q
// and of other blocks. Decays are applied from block to block.
#include "cuda/general/entries.h"
#include "cuda/general/launch_step.h"
#include "cuda/general/step.cuh"

namespace fenwick::cuda::general {
namespace {

struct GatedDeltaStep {
  static constexpr bool kErases = true;
  static constexpr bool kReadDecays = true;
  // Up to the end of the block.
  __device__ static int DecaysUpTo(int i, int count) {
    const int last = i | (kTokenBlock - 1);
    return last < count ? last : count - 1;
  }

  // Keys of ring block b at a quad of columns.
  template <typename Access, typename T>
  __device__ static void LoadKeys(const StepBlock<T>& block, int b, int column,
                                  typename Access::Raw (&keys)[kTokenBlock]) {
#pragma unroll
    for (int i = 0; i < kTokenBlock; ++i) {
      keys[i] = Access::Load(block.shared.key[b * kTokenBlock + i], block.dtype(), column,
                             block.problem.K);
    }
  }

  // A warp a block.
  template <typename Access, typename T>
  __device__ static void Prepare(const StepBlock<T>& block, int first, int count) {
    const int lane = threadIdx.x % 32;
    for (int b = first + threadIdx.x / 32; b * kTokenBlock < count; b += kStepWarps) {
      // Products of token i with the tokens before it, from entry i (i - 1) / 2 on.
      T products[32] = {};
      static_assert(kTokenBlock * (kTokenBlock - 1) / 2 <= 32);
      for (int k = 4 * lane; k < block.problem.K; k += 128) {
        typename Access::Raw keys[kTokenBlock];
        LoadKeys<Access>(block, b, k, keys);
#pragma unroll
        for (int i = 1; i < kTokenBlock; ++i) {
          const Quad<T> key = Access::Expand(keys[i]);
#pragma unroll
          for (int j = 0; j < i; ++j) {
            T& product = products[i * (i - 1) / 2 + j];
            product = Dot(key, Access::Expand(keys[j]), product);
          }
        }
      }
      SumOverLanes<32, 1>(products);
      // Column lane % kTokenBlock of the inverse, row after row.
      T inverse[kTokenBlock];
#pragma unroll
      for (int i = 0; i < kTokenBlock; ++i) {
        T rest = lane % kTokenBlock == i ? 1 : 0;
#pragma unroll
        for (int j = 0; j < i; ++j) {
          rest -= __shfl_sync(0xffffffffu, products[0], i * (i - 1) / 2 + j) * inverse[j];
        }
        inverse[i] = block.shared.beta[b * kTokenBlock + i] * rest;
        if (lane < kTokenBlock) block.shared.solve[b][i][lane] = inverse[i];
      }
    }
  }

  // One warp walks back, four columns a lane: the first 128 in registers, with the keys of the next
  // block on their way, the others in shared memory.
  template <typename Access, typename T>
  __device__ static void Read(const StepBlock<T>& block, int count, int prepared) {
    Prepare<Access>(block, prepared, count);
    __syncthreads();
    if (threadIdx.x >= 32) return;
    constexpr unsigned kAll = 0xffffffffu;
    constexpr int kSpread = 32 / kTokenBlock;  // lanes that hold the same token's sum
    const int K = block.problem.K;
    const int lane = threadIdx.x % 32, column = 4 * lane, mine = lane / kSpread;
    const int blocks = (count + kTokenBlock - 1) / kTokenBlock;
    T decay = 0;  // over ring block `lane`
    if (lane < blocks) {
      decay = block.DecayOver(lane * kTokenBlock, DecaysUpTo(lane * kTokenBlock, count));
    }
    const auto more = [&](int c) -> Quad<T>& {
      return *reinterpret_cast<Quad<T>*>(block.shared.read + c);
    };
    const auto query = [&](int c) {  // c < K
      Quad<T> q = Access::Expand(Access::Load(block.Query(count), block.dtype(), c, K));
#pragma unroll
      for (int j = 0; j < 4; ++j) q.x[j] *= static_cast<T>(block.problem.scale);
      return q;
    };
    Quad<T> read{};
    if (column < K) read = query(column);
#pragma unroll 1
    for (int c = column + 128; c < K; c += 128) more(c) = query(c);
    typename Access::Raw next[kTokenBlock] = {};
    if (column < K) LoadKeys<Access>(block, blocks - 1, column, next);
#pragma unroll 1
    for (int b = blocks - 1; b >= 0; --b) {
      typename Access::Raw keys[kTokenBlock];
      T dots[kTokenBlock];
#pragma unroll
      for (int i = 0; i < kTokenBlock; ++i) {
        keys[i] = next[i];
        dots[i] = Dot(Access::Expand(keys[i]), read, T(0));
      }
      if (column < K) LoadKeys<Access>(block, b > 0 ? b - 1 : 0, column, next);
#pragma unroll 1
      for (int c = column + 128; c < K; c += 128) {
        typename Access::Raw others[kTokenBlock];
        LoadKeys<Access>(block, b, c, others);
#pragma unroll
        for (int i = 0; i < kTokenBlock; ++i) {
          dots[i] = Dot(Access::Expand(others[i]), more(c), dots[i]);
        }
      }
      SumOverLanes<kTokenBlock, kSpread>(dots);
      T dot = dots[0];
#pragma unroll
      for (int mask = kSpread / 2; mask > 0; mask /= 2) dot += __shfl_xor_sync(kAll, dot, mask);
      T weight = 0;
#pragma unroll
      for (int i = 0; i < kTokenBlock; ++i) {
        weight += block.shared.solve[b][i][mine] * __shfl_sync(kAll, dot, i * kSpread);
      }
      if (lane % kSpread == 0) block.shared.weight[b * kTokenBlock + mine] = weight;
      const T block_decay = __shfl_sync(kAll, decay, b);
      T change[kTokenBlock];
#pragma unroll
      for (int i = 0; i < kTokenBlock; ++i) change[i] = -__shfl_sync(kAll, weight, i * kSpread);
      const auto update = [&](Quad<T>& x, const typename Access::Raw(&rows)[kTokenBlock]) {
#pragma unroll
        for (int i = 0; i < kTokenBlock; ++i) AddScaled(x, change[i], Access::Expand(rows[i]));
#pragma unroll
        for (int j = 0; j < 4; ++j) x.x[j] *= block_decay;
      };
      update(read, keys);
#pragma unroll 1
      for (int c = column + 128; c < K; c += 128) {
        typename Access::Raw others[kTokenBlock];
        LoadKeys<Access>(block, b, c, others);
        update(more(c), others);
      }
    }
    if (column < K) more(column) = read;
  }
};

}  // namespace

template <typename T>
void DeltaStep(const Inputs& inputs, const TensorView& o, const Context& context) {
  LaunchStep<GatedDeltaStep, T>(inputs, o, context);
}
template void DeltaStep<float>(const Inputs&, const TensorView&, const Context&);
template void DeltaStep<double>(const Inputs&, const TensorView&, const Context&);

}  // namespace fenwick::cuda::general
