// Checks and times the scalar-gate kernels for Hopper without torch: random inputs with NaN around
// every tensor and in every level scale that must not be read, outputs and workspace poisoned, a
// float64 reference on the GPU, medians with the L2 cache flushed.
//
//   hopper_scalar_gate check [CASE [SEED [COUNT]]]   every feature at small sizes
//   hopper_scalar_gate time [CASE]                   the shapes of docs/performance-cuda.md
//   hopper_scalar_gate once [CASE]                   each of them once, for a profiler
//
// CASE is part of a name; COUNT seeds from SEED on (random: 0) are checked.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cuda/hopper.h"
#include "cuda/launch.h"
#include "fenwick/ops.h"

namespace {

using fenwick::DType;
using fenwick::TensorView;
using fenwick::cuda::Check;
using I64 = std::int64_t;

__host__ __device__ inline std::uint32_t Hash(std::uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  return static_cast<std::uint32_t>(x ^ (x >> 33));
}
__device__ float Uniform(I64 i, std::uint32_t seed) {
  return (Hash(static_cast<std::uint64_t>(i) * 2654435761ULL + (std::uint64_t{seed} << 40)) +
          0.5f) *
         (1.f / 4294967296.f);
}
__device__ float Normal(I64 i, std::uint32_t seed) {
  return sqrtf(-2.f * logf(Uniform(i, seed))) * cospif(2.f * Uniform(i, seed + 77));
}

// Elements of any storage type.
struct Array {
  void* data;
  DType dtype;
  __device__ double Load(I64 i) const {
    switch (dtype) {
      case DType::kBFloat16: return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
      case DType::kFloat16: return __half2float(static_cast<const __half*>(data)[i]);
      case DType::kFloat32: return static_cast<const float*>(data)[i];
      default: return static_cast<const double*>(data)[i];
    }
  }
  __device__ void Store(I64 i, float x) const {
    switch (dtype) {
      case DType::kBFloat16: static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16(x); break;
      case DType::kFloat16: static_cast<__half*>(data)[i] = __float2half(x); break;
      case DType::kFloat32: static_cast<float*>(data)[i] = x; break;
      default: static_cast<double*>(data)[i] = x;
    }
  }
};

enum class Gates { kMixed, kResets, kStrong, kNone };

struct Case {
  std::string name;
  int B = 2, T = 1024, G = 1, H = 8, K = 128, V = 64, L = 0;  // L = 0: as many as needed
  DType dtype = DType::kBFloat16;
  bool scales_f32 = false;
  bool saturate = false;
  Gates gates = Gates::kMixed;
  std::vector<I64> packed;  // sequence lengths; B = 1, T their sum
  float scale = 1.0f;
  int gap = 0;                // elements between the rows of q, k, v, o and their gradients
  bool expanded = false;      // d_o is one row of V, with stride 0 on every other axis
  std::size_t workspace = 0;  // that the backward aims at; 0: the default
};

// Geometry on the device.
struct Shape {
  int T, G, H, K, V, L;
  int key_row, value_row;  // elements from one row of K or V to the next
  bool saturate;
  float scale;
  const int* position;  // [T] position of a token in its sequence (the same for every batch row)
};

__device__ int LevelOf(const Shape& s, int t, int source) {
  const int level = 32 - __clz(t ^ source);
  return s.saturate ? min(level, s.L - 1) : level;
}

// n elements in rows of `width`, `row` elements apart.
__global__ void FillNormal(Array x, I64 n, int width, int row, std::uint32_t seed, float scale) {
  for (I64 i = blockIdx.x * I64{blockDim.x} + threadIdx.x; i < n;
       i += I64{gridDim.x} * blockDim.x) {
    x.Store(i / width * row + i % width, Normal(i, seed) * scale);
  }
}

// Copies row 0 over all rows.
__global__ void RepeatRow(Array x, I64 n, int width, int row) {
  for (I64 i = blockIdx.x * I64{blockDim.x} + threadIdx.x; i < n;
       i += I64{gridDim.x} * blockDim.x) {
    if (i >= width) x.Store(i / width * row + i % width, static_cast<float>(x.Load(i % width)));
  }
}

// Counts bytes that are not 0xff between rows of 16-bit elements.
__global__ void CountGapWrites(const unsigned char* x, I64 rows, int width, int row, int* count) {
  const int gap = 2 * (row - width);
  for (I64 i = blockIdx.x * I64{blockDim.x} + threadIdx.x; i < rows * gap;
       i += I64{gridDim.x} * blockDim.x) {
    if (x[i / gap * 2 * row + 2 * width + i % gap] != 0xff) atomicAdd(count, 1);
  }
}

// softplus(normal) where the level is live, NaN where it must not be read.
__global__ void FillScales(Array x, Shape s, I64 n, std::uint32_t seed) {
  for (I64 i = blockIdx.x * I64{blockDim.x} + threadIdx.x; i < n;
       i += I64{gridDim.x} * blockDim.x) {
    const int level = i % s.L, t = s.position[i / s.L / s.H % s.T];
    bool live = level == 0 || (level <= 30 && (t >> (level - 1) & 1));
    if (s.saturate && level == s.L - 1) live |= level == 0 || (t >> (level - 1)) != 0;
    x.Store(i, live ? log1pf(expf(Normal(i, seed))) : NAN);
  }
}

__global__ void FillGates(float* g, int H, I64 n, Gates kind, std::uint32_t seed) {
  for (I64 i = blockIdx.x * I64{blockDim.x} + threadIdx.x; i < n;
       i += I64{gridDim.x} * blockDim.x) {
    const int h = i % H;
    float x = -expf(-8.f + 7.f * (h / static_cast<float>(H))) * log1pf(expf(Normal(i, seed)));
    const float u = Uniform(i, seed + 5);
    if (kind == Gates::kResets) x = u < 0.01f ? -INFINITY : u < 0.02f ? -90.f : x;
    if (kind == Gates::kStrong) x = u < 0.9f ? -20.f * Uniform(i, seed + 6) : x;
    if (kind == Gates::kNone) x = 0;
    g[i] = x;
  }
}

// Inclusive sums of g within each sequence, float64; resets count as -1e5. Grid (H, B).
__global__ void SumGates(const float* g, Shape s, double* sums) {
  const int h = blockIdx.x, b = blockIdx.y;
  double sum = 0;
  for (int t = 0; t < s.T; ++t) {
    const I64 i = (I64{b} * s.T + t) * s.H + h;
    if (s.position[t] == 0) sum = 0;
    sum += fmax(static_cast<double>(g[i]), -1e5);
    sums[i] = sum;
  }
}

// o at tokens first + i * step: grid (samples, H, B), 128 threads.
__global__ void ReferenceOutput(Array q, Array k, Array v, Array scales, const double* sums,
                                Shape s, int first, int step, double* o) {
  const int t = first + blockIdx.x * step, h = blockIdx.y, b = blockIdx.z;
  const I64 row = I64{b} * s.T + t;
  const int group = h / (s.H / s.G), position = s.position[t];
  __shared__ double weight[128];
  double sum[4] = {};
  for (int s0 = 0; s0 <= position; s0 += 128) {
    const int source = s0 + threadIdx.x;
    double w = 0;
    if (source <= position) {
      const I64 other = row - position + source;
      for (int i = 0; i < s.K; ++i) {
        w += q.Load((row * s.G + group) * s.key_row + i) *
             k.Load((other * s.G + group) * s.key_row + i);
      }
      w *= s.scale * scales.Load((row * s.H + h) * s.L + LevelOf(s, position, source)) *
           exp(sums[row * s.H + h] - sums[other * s.H + h]);
    }
    __syncthreads();
    weight[threadIdx.x] = w;
    __syncthreads();
    for (int x = threadIdx.x, c = 0; x < s.V; x += 128, ++c) {
      for (int i = 0; i < 128 && s0 + i <= position; ++i) {
        sum[c] += weight[i] * v.Load(((row - position + s0 + i) * s.H + h) * s.value_row + x);
      }
    }
  }
  const I64 sample = (I64{b} * gridDim.x + blockIdx.x) * s.H + h;
  for (int x = threadIdx.x, c = 0; x < s.V; x += 128, ++c) o[sample * s.V + x] = sum[c];
}

// Backward reference, first part: grid (T, H, B), 128 threads; query t against all its sources.
// p [B, H, T, T] and e [B, G, T, T] are P and, summed over heads, dS; reads, writes [B, T, H] are
// the sums of P dP over sources and over queries, read_squares and write_squares those of its
// squares. All but p start at zero.
__global__ void ReferencePairs(Array q, Array k, Array v, Array d_o, Array scales,
                               const double* sums, Shape s, double* p, double* e, double* dscales,
                               double* reads, double* writes, double* read_squares,
                               double* write_squares) {
  const int t = blockIdx.x, h = blockIdx.y, b = blockIdx.z;
  const I64 row = I64{b} * s.T + t;
  const int group = h / (s.H / s.G), position = s.position[t];
  for (int source = threadIdx.x; source <= position; source += blockDim.x) {
    const I64 other = row - position + source;
    double x = 0, y = 0;
    for (int i = 0; i < s.K; ++i) {
      x += q.Load((row * s.G + group) * s.key_row + i) *
           k.Load((other * s.G + group) * s.key_row + i);
    }
    for (int i = 0; i < s.V; ++i) {
      y +=
          d_o.Load((row * s.H + h) * s.value_row + i) * v.Load((other * s.H + h) * s.value_row + i);
    }
    const int level = LevelOf(s, position, source);
    const double decay = s.scale * exp(sums[row * s.H + h] - sums[other * s.H + h]);
    const double w = decay * scales.Load((row * s.H + h) * s.L + level);
    const int column = t - position + source;
    p[((I64{b} * s.H + h) * s.T + t) * s.T + column] = w * x;
    atomicAdd(&e[((I64{b} * s.G + group) * s.T + t) * s.T + column], w * y);
    atomicAdd(&dscales[(row * s.H + h) * s.L + level], decay * x * y);
    atomicAdd(&reads[row * s.H + h], w * x * y);
    atomicAdd(&writes[other * s.H + h], w * x * y);
    atomicAdd(&read_squares[row * s.H + h], w * x * y * w * x * y);
    atomicAdd(&write_squares[other * s.H + h], w * x * y * w * x * y);
  }
}

// dq and dk from e. Grid (T, G, B), K threads.
__global__ void ReferenceKeys(Array q, Array k, const double* e, Shape s, double* dq, double* dk) {
  const int t = blockIdx.x, group = blockIdx.y, b = blockIdx.z, x = threadIdx.x;
  const I64 row = I64{b} * s.T + t;
  const double* matrix = e + (I64{b} * s.G + group) * s.T * s.T;
  double a = 0, c = 0;
  for (int i = t - s.position[t]; i <= t; ++i) {
    a += matrix[I64{t} * s.T + i] * k.Load(((I64{b} * s.T + i) * s.G + group) * s.key_row + x);
  }
  for (int i = t; i < s.T && i - t == s.position[i] - s.position[t]; ++i) {
    c += matrix[I64{i} * s.T + t] * q.Load(((I64{b} * s.T + i) * s.G + group) * s.key_row + x);
  }
  dq[(row * s.G + group) * s.K + x] = a;
  dk[(row * s.G + group) * s.K + x] = c;
}

// dv from p. Grid (T, H, B), V threads.
__global__ void ReferenceValues(Array d_o, const double* p, Shape s, double* dv) {
  const int t = blockIdx.x, h = blockIdx.y, b = blockIdx.z, x = threadIdx.x;
  double sum = 0;
  for (int i = t; i < s.T && i - t == s.position[i] - s.position[t]; ++i) {
    sum += p[((I64{b} * s.H + h) * s.T + i) * s.T + t] *
           d_o.Load(((I64{b} * s.T + i) * s.H + h) * s.value_row + x);
  }
  dv[((I64{b} * s.T + t) * s.H + h) * s.V + x] = sum;
}

// dg: the flow through each token. Grid (H, B).
__global__ void ReferenceGates(const double* reads, const double* writes, Shape s, double* dg) {
  const int h = blockIdx.x, b = blockIdx.y;
  double flow = 0;
  for (int t = 0; t < s.T; ++t) {
    const I64 i = (I64{b} * s.T + t) * s.H + h;
    if (s.position[t] == 0) flow = 0;
    dg[i] = flow;
    flow += writes[i] - reads[i];
  }
}

// Squared error and squared norm of each head; rows of `x`, `row` elements apart, at tokens first +
// i
// * step. Grid H.
__global__ void Compare(Array x, const double* reference, int H, int width, int row, int T, int B,
                        int first, int step, int samples, double* error, double* norm) {
  const int h = blockIdx.x;
  double e = 0, n = 0;
  for (I64 i = threadIdx.x; i < I64{B} * samples * width; i += blockDim.x) {
    const I64 sample = i / width, column = i % width;
    const I64 b = sample / samples, t = first + sample % samples * step;
    const double r = reference[(sample * H + h) * width + column];
    const double d = x.Load(((b * T + t) * H + h) * row + column) - r;
    e += d * d;
    n += r * r;
  }
  atomicAdd(error + h, e);
  atomicAdd(norm + h, n);
}

// Device memory with `kGuard` bytes of NaN on both sides.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes) : bytes_(bytes) {
    Check(cudaMalloc(&base_, bytes + 2 * kGuard), "cudaMalloc");
    Poison();
  }
  ~Buffer() { cudaFree(base_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void Poison() { Check(cudaMemset(base_, 0xff, bytes_ + 2 * kGuard), "cudaMemset"); }
  char* data() const { return base_ + kGuard; }

 private:
  static constexpr std::size_t kGuard = 1 << 20;
  std::size_t bytes_;
  char* base_ = nullptr;
};

const fenwick::cuda::DeviceTraits& Device() {
  static const fenwick::cuda::DeviceTraits traits = [] {
    cudaDeviceProp p;
    Check(cudaGetDeviceProperties(&p, 0), "cudaGetDeviceProperties");
    return fenwick::cuda::DeviceTraits{p.major, p.minor, p.multiProcessorCount,
                                       p.sharedMemPerBlockOptin,
                                       static_cast<std::size_t>(p.l2CacheSize)};
  }();
  return traits;
}

float MedianMilliseconds(const std::function<void()>& run, int repeats) {
  constexpr std::size_t kFlush = 256 << 20;
  static char* flush = [] {
    char* p;
    Check(cudaMalloc(&p, kFlush), "cudaMalloc");
    return p;
  }();
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin), "cudaEventCreate");
  Check(cudaEventCreate(&end), "cudaEventCreate");
  for (int i = 0; i < 3; ++i) run();
  std::vector<float> times;
  for (int i = 0; i < repeats; ++i) {
    Check(cudaMemsetAsync(flush, i, kFlush), "flush");
    Check(cudaEventRecord(begin), "cudaEventRecord");
    run();
    Check(cudaEventRecord(end), "cudaEventRecord");
    Check(cudaEventSynchronize(end), "cudaEventSynchronize");
    float ms;
    Check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// One call's tensors.
struct Problem {
  Case c;
  int L;
  std::vector<I64> cu_seqlens;
  Buffer q, k, v, g, scales, o, position;
  Shape shape;
  std::uint32_t seed;

  static int MaxLength(const Case& c) {
    return c.packed.empty() ? c.T : *std::max_element(c.packed.begin(), c.packed.end());
  }
  static Case Complete(Case c) {
    if (!c.packed.empty()) c.B = 1, c.T = std::accumulate(c.packed.begin(), c.packed.end(), I64{0});
    if (c.L == 0) c.L = fenwick::NumLevels(MaxLength(c));
    return c;
  }
  DType ScalesType() const { return c.scales_f32 ? DType::kFloat32 : c.dtype; }
  I64 tokens() const { return I64{c.B} * c.T; }
  int key_row() const { return c.K + c.gap; }
  int value_row() const { return c.V + c.gap; }
  I64 key_bytes() const { return 2 * tokens() * c.G * key_row(); }
  I64 value_bytes() const { return 2 * tokens() * c.H * value_row(); }
  // [B, T, heads, width] with rows `row` elements apart.
  TensorView View(const Buffer& x, int heads, int width, int row) const {
    TensorView view(x.data(), c.dtype, {c.B, c.T, heads, width});
    view.strides[0] = I64{c.T} * heads * row;
    view.strides[1] = I64{heads} * row;
    view.strides[2] = row;
    return view;
  }
  TensorView Keys(const Buffer& x) const { return View(x, c.G, c.K, key_row()); }
  TensorView Values(const Buffer& x) const { return View(x, c.H, c.V, value_row()); }
  // Bytes written between the rows of x.
  int GapWrites(const Buffer& x, int heads, int width) const {
    Buffer count(4);
    Check(cudaMemset(count.data(), 0, 4), "cudaMemset");
    CountGapWrites<<<1024, 256>>>(reinterpret_cast<const unsigned char*>(x.data()),
                                  tokens() * heads, width, width + c.gap,
                                  reinterpret_cast<int*>(count.data()));
    int host;
    Check(cudaMemcpy(&host, count.data(), 4, cudaMemcpyDeviceToHost), "gap writes");
    return host;
  }

  Problem(const Case& given, std::uint32_t seed)
      : c(Complete(given)),
        L(c.L),
        q(key_bytes()),
        k(key_bytes()),
        v(value_bytes()),
        g(4 * tokens() * c.H),
        scales((c.scales_f32 ? 4 : 2) * tokens() * c.H * c.L),
        o(value_bytes()),
        position(4 * c.T),
        seed(seed) {
    std::vector<int> positions(c.T);
    if (c.packed.empty()) {
      std::iota(positions.begin(), positions.end(), 0);
    } else {
      cu_seqlens.push_back(0);
      for (I64 length : c.packed) {
        std::iota(positions.begin() + cu_seqlens.back(),
                  positions.begin() + cu_seqlens.back() + length, 0);
        cu_seqlens.push_back(cu_seqlens.back() + length);
      }
    }
    Check(
        cudaMemcpy(position.data(), positions.data(), 4 * positions.size(), cudaMemcpyHostToDevice),
        "positions");
    shape = {c.T,
             c.G,
             c.H,
             c.K,
             c.V,
             c.L,
             key_row(),
             value_row(),
             c.saturate,
             c.scale,
             reinterpret_cast<const int*>(position.data())};
    FillNormal<<<1024, 256>>>({q.data(), c.dtype}, tokens() * c.G * c.K, c.K, key_row(), seed, .3f);
    FillNormal<<<1024, 256>>>({k.data(), c.dtype}, tokens() * c.G * c.K, c.K, key_row(), seed + 1,
                              .3f);
    FillNormal<<<1024, 256>>>({v.data(), c.dtype}, tokens() * c.H * c.V, c.V, value_row(), seed + 2,
                              1.f);
    FillScales<<<1024, 256>>>({scales.data(), ScalesType()}, shape, tokens() * c.H * c.L, seed + 3);
    FillGates<<<1024, 256>>>(reinterpret_cast<float*>(g.data()), c.H, tokens() * c.H, c.gates,
                             seed + 4);
    Check(cudaDeviceSynchronize(), "inputs");
  }

  fenwick::Inputs Inputs() const {
    fenwick::Inputs in;
    in.q = Keys(q);
    in.k = Keys(k);
    in.v = Values(v);
    in.g = TensorView(g.data(), DType::kFloat32, {c.B, c.T, c.H});
    in.level_scales = TensorView(scales.data(), ScalesType(), {c.B, c.T, c.H, c.L});
    in.cu_seqlens = cu_seqlens;
    in.scale = c.scale;
    if (c.saturate) in.level_policy = fenwick::LevelPolicy::kSaturate;
    return in;
  }
  TensorView Output() const { return Values(o); }
};

struct Errors {
  double all, worst_head;
};

// `x` [B, T, heads, width] against a reference of the same shape or of samples of its tokens.
// Relative to the norm of the reference, or to `scale` [heads], squares of what to take instead
// where it is larger.
Errors CompareWith(Array x, const double* reference, const Case& c, int heads, int width, int row,
                   int first, int step, int samples, const double* scale = nullptr) {
  Buffer totals(16 * heads);
  auto* total = reinterpret_cast<double*>(totals.data());
  Check(cudaMemset(total, 0, 16 * heads), "cudaMemset");
  Compare<<<heads, 256>>>(x, reference, heads, width, row, c.T, c.B, first, step, samples, total,
                          total + heads);
  std::vector<double> host(2 * heads);
  Check(cudaMemcpy(host.data(), total, 16 * heads, cudaMemcpyDeviceToHost), "reference");
  Errors errors{0, 0};
  double e = 0, n = 0;
  for (int h = 0; h < heads; ++h) {
    if (scale != nullptr) host[heads + h] = std::max(host[heads + h], scale[h]);
    e += host[h], n += host[heads + h];
    const double head = std::sqrt(host[h] / host[heads + h]);
    if (!(head <= errors.worst_head)) errors.worst_head = head;
  }
  errors.all = std::sqrt(e / n);
  return errors;
}

Errors CheckOutput(const Problem& p, int max_samples) {
  const Case& c = p.c;
  Buffer sums(8 * p.tokens() * c.H);
  SumGates<<<dim3(c.H, c.B), 1>>>(reinterpret_cast<const float*>(p.g.data()), p.shape,
                                  reinterpret_cast<double*>(sums.data()));
  const int step = std::max(1, c.T / max_samples) | 1;
  const int samples = (c.T + step - 1) / step, first = (c.T - 1) % step;
  Buffer reference(8 * I64{c.B} * samples * c.H * c.V);
  auto* r = reinterpret_cast<double*>(reference.data());
  ReferenceOutput<<<dim3(samples, c.H, c.B), 128>>>(
      {p.q.data(), c.dtype}, {p.k.data(), c.dtype}, {p.v.data(), c.dtype},
      {p.scales.data(), p.ScalesType()}, reinterpret_cast<const double*>(sums.data()), p.shape,
      first, step, r);
  return CompareWith({p.o.data(), c.dtype}, r, c, c.H, c.V, p.value_row(), first, step, samples);
}

// The gradients of one call.
struct Outputs {
  Buffer d_o, dq, dk, dv, dg, dscales;
  explicit Outputs(const Problem& p)
      : d_o(p.value_bytes()),
        dq(p.key_bytes()),
        dk(p.key_bytes()),
        dv(p.value_bytes()),
        dg(4 * p.tokens() * p.c.H),
        dscales((p.c.scales_f32 ? 4 : 2) * p.tokens() * p.c.H * p.L) {
    const I64 elements = p.tokens() * p.c.H * p.c.V;
    const Array x{d_o.data(), p.c.dtype};
    FillNormal<<<1024, 256>>>(x, elements, p.c.V, p.value_row(), p.seed + 9, 1.f);
    if (p.c.expanded) RepeatRow<<<1024, 256>>>(x, elements, p.c.V, p.value_row());
  }
  TensorView Gradient(const Problem& p) const {
    TensorView view = p.Values(d_o);
    if (p.c.expanded) view.strides[0] = view.strides[1] = view.strides[2] = 0;
    return view;
  }
  fenwick::Gradients Views(const Problem& p) const {
    const Case& c = p.c;
    fenwick::Gradients g;
    g.q = p.Keys(dq);
    g.k = p.Keys(dk);
    g.v = p.Values(dv);
    g.g = TensorView(dg.data(), DType::kFloat32, {c.B, c.T, c.H});
    g.level_scales = TensorView(dscales.data(), p.ScalesType(), {c.B, c.T, c.H, c.L});
    return g;
  }
};

// Prints the error of every gradient; false where one is too large.
bool CheckGradients(const Problem& p, const Outputs& out) {
  const Case& c = p.c;
  const I64 pairs = I64{c.T} * c.T, tokens = p.tokens();
  Buffer sums(8 * tokens * c.H), matrix(8 * pairs * c.B * c.H), scores(8 * pairs * c.B * c.G);
  Buffer dscales(8 * tokens * c.H * c.L), reads(8 * tokens * c.H), writes(8 * tokens * c.H);
  Buffer dq(8 * tokens * c.G * c.K), dk(8 * tokens * c.G * c.K), dv(8 * tokens * c.H * c.V);
  Buffer dg(8 * tokens * c.H), dg_squares(8 * tokens * c.H);
  Buffer read_squares(8 * tokens * c.H), write_squares(8 * tokens * c.H);
  const auto d = [](const Buffer& x) { return reinterpret_cast<double*>(x.data()); };
  Check(cudaMemset(d(scores), 0, 8 * pairs * c.B * c.G), "cudaMemset");
  Check(cudaMemset(d(dscales), 0, 8 * tokens * c.H * c.L), "cudaMemset");
  for (const Buffer* x : {&reads, &writes, &read_squares, &write_squares}) {
    Check(cudaMemset(d(*x), 0, 8 * tokens * c.H), "cudaMemset");
  }
  const Array q{p.q.data(), c.dtype}, k{p.k.data(), c.dtype}, v{p.v.data(), c.dtype};
  const Array d_o{out.d_o.data(), c.dtype}, scales{p.scales.data(), p.ScalesType()};
  SumGates<<<dim3(c.H, c.B), 1>>>(reinterpret_cast<const float*>(p.g.data()), p.shape, d(sums));
  ReferencePairs<<<dim3(c.T, c.H, c.B), 128>>>(q, k, v, d_o, scales, d(sums), p.shape, d(matrix),
                                               d(scores), d(dscales), d(reads), d(writes),
                                               d(read_squares), d(write_squares));
  ReferenceKeys<<<dim3(c.T, c.G, c.B), c.K>>>(q, k, d(scores), p.shape, d(dq), d(dk));
  ReferenceValues<<<dim3(c.T, c.H, c.B), c.V>>>(d_o, d(matrix), p.shape, d(dv));
  ReferenceGates<<<dim3(c.H, c.B), 1>>>(d(reads), d(writes), p.shape, d(dg));
  ReferenceGates<<<dim3(c.H, c.B), 1>>>(d(read_squares), d(write_squares), p.shape, d(dg_squares));
  Check(cudaDeviceSynchronize(), "backward reference");
  bool good = true;
  const auto check = [&](const char* name, Array x, const Buffer& r, int heads, int width, int row,
                         const double* scale = nullptr) {
    const Errors e = CompareWith(x, d(r), c, heads, width, row, 0, 1, c.T, scale);
    good &= e.all <= 1e-2;
    std::printf(" %s %.1e/%.1e", name, e.all, e.worst_head);
  };
  check("dq", {out.dq.data(), c.dtype}, dq, c.G, c.K, p.key_row());
  check("dk", {out.dk.data(), c.dtype}, dk, c.G, c.K, p.key_row());
  check("dv", {out.dv.data(), c.dtype}, dv, c.H, c.V, p.value_row());
  check("dlevels", {out.dscales.data(), p.ScalesType()}, dscales, c.H, c.L, c.L);
  // dg[t] is the sum of P dP over all pairs around t: up to millions of terms of random sign, and
  // with slow decay nearly the same sum for thousands of tokens, so that a head's whole dg is small
  // by chance in some draws. Rounding the terms to 16 bits errs in proportion to the root of their
  // sum of squares, which is what the error is held against where that is larger than dg.
  std::vector<double> squares(tokens * c.H), dg_scale(c.H);
  Check(cudaMemcpy(squares.data(), d(dg_squares), 8 * tokens * c.H, cudaMemcpyDeviceToHost),
        "squares");
  for (I64 i = 0; i < tokens * c.H; ++i) dg_scale[i % c.H] += std::max(0.0, squares[i]);
  // One token has no gate gradient to compare with.
  if (Problem::MaxLength(c) > 1) {
    check("dg", {out.dg.data(), DType::kFloat32}, dg, c.H, 1, 1, dg_scale.data());
  }
  if (c.gap > 0) {
    const int writes_between = p.GapWrites(out.dq, c.G, c.K) + p.GapWrites(out.dk, c.G, c.K) +
                               p.GapWrites(out.dv, c.H, c.V);
    good &= writes_between == 0;
    std::printf(" bytes written between rows %d", writes_between);
  }
  return good;
}

// Bytes of all gradients, to compare runs.
std::vector<char> Snapshot(const Problem& p, const Outputs& out) {
  std::vector<char> all;
  const auto add = [&](const Buffer& x, I64 bytes) {
    all.resize(all.size() + bytes);
    Check(cudaMemcpy(all.data() + all.size() - bytes, x.data(), bytes, cudaMemcpyDeviceToHost),
          "snapshot");
  };
  add(out.dq, p.key_bytes());
  add(out.dk, p.key_bytes());
  add(out.dv, p.value_bytes());
  add(out.dg, 4 * p.tokens() * p.c.H);
  add(out.dscales, (p.c.scales_f32 ? 4 : 2) * p.tokens() * p.c.H * p.L);
  return all;
}

bool RunBackward(const Problem& p, int repeats) {
  namespace hopper = fenwick::cuda::hopper;
  hopper::AimWorkspaceAt(p.c.workspace);
  const fenwick::Inputs in = p.Inputs();
  const Outputs out(p);
  const fenwick::Gradients gradients = out.Views(p);
  if (!hopper::BackwardFits(in, {}, gradients, Device())) {
    std::printf("%-28s backward refused by the plan\n", p.c.name.c_str());
    return true;
  }
  fenwick::Context context;
  context.device = fenwick::Device::kCUDA;
  context.workspace_bytes = hopper::BackwardWorkspaceBytes(in, {}, gradients, Device());
  Buffer workspace(context.workspace_bytes);
  context.workspace = workspace.data();
  const auto backward = [&] {
    hopper::Backward(in, out.Gradient(p), {}, gradients, context, Device());
  };
  backward();
  Check(cudaDeviceSynchronize(), "backward");
  std::printf("%-28s backward", p.c.name.c_str());
  bool good = true;
  if (repeats == 0) {
    good = CheckGradients(p, out);
    const std::vector<char> once = Snapshot(p, out);
    int different = 0;
    for (int i = 0; i < 3; ++i) {
      workspace.Poison();
      backward();
      different += Snapshot(p, out) != once;
    }
    good &= different == 0;
    std::printf(" runs that differ %d %s\n", different, good ? "ok" : "WRONG");
  } else {
    if (repeats > 1) std::printf(" %.4f ms,", MedianMilliseconds(backward, repeats));
    std::printf(" workspace %.3f GiB\n", static_cast<double>(context.workspace_bytes) / (1 << 30));
  }
  std::fflush(stdout);
  return good;
}

// Runs one case; times it where repeats > 0. Returns false where the error is too large.
bool RunCase(const Case& given, int repeats, std::uint32_t seed) {
  namespace hopper = fenwick::cuda::hopper;
  hopper::AimWorkspaceAt(0);
  Problem p(given, seed);
  const Case& c = p.c;
  const fenwick::Inputs in = p.Inputs();
  if (!hopper::ForwardFits(in, {}, Device())) {
    std::printf("%-28s refused by the plan\n", given.name.c_str());
    return false;
  }
  const std::size_t bytes = hopper::ForwardWorkspaceBytes(in, {}, Device());
  Buffer workspace(bytes);
  fenwick::Context context;
  context.device = fenwick::Device::kCUDA;
  context.workspace = workspace.data();
  context.workspace_bytes = bytes;
  const auto forward = [&] { hopper::Forward(in, p.Output(), {}, context, Device()); };
  forward();
  Check(cudaDeviceSynchronize(), "forward");
  if (repeats == 1) return RunBackward(p, repeats);
  const Errors errors = CheckOutput(p, repeats > 0 ? 48 : 1 << 30);
  const int writes_between = c.gap > 0 ? p.GapWrites(p.o, c.H, c.V) : 0;
  bool good = errors.all <= 5e-3 && errors.worst_head <= 8e-3 && writes_between == 0;
  std::printf("%-28s error %.2e worst head %.2e workspace %.3f GiB %s", given.name.c_str(),
              errors.all, errors.worst_head, static_cast<double>(bytes) / (1 << 30),
              good ? "ok" : "WRONG");
  if (writes_between > 0) std::printf("  bytes written between rows %d", writes_between);
  if (repeats > 0) std::printf("  forward %.4f ms", MedianMilliseconds(forward, repeats));
  std::printf("\n");
  std::fflush(stdout);
  good &= RunBackward(p, repeats > 0 ? std::max(5, repeats / 2) : 0);
  return good;
}

std::vector<Case> CheckCases() {
  std::vector<Case> cases;
  const auto add = [&](Case c) { cases.push_back(std::move(c)); };
  add({.name = "plain", .T = 1024});
  add({.name = "one token", .T = 1});
  add({.name = "one chunk", .T = 128});
  add({.name = "ragged 200", .T = 200});
  add({.name = "ragged 1000", .T = 1000, .H = 3});
  add({.name = "ragged 4001", .B = 1, .T = 4001, .H = 4});
  add({.name = "resets", .T = 700, .gates = Gates::kResets});
  add({.name = "strong decay", .T = 700, .gates = Gates::kStrong});
  add({.name = "no decay", .T = 1500, .gates = Gates::kNone});
  add({.name = "key 64", .T = 900, .K = 64});
  add({.name = "key 32 value 32", .T = 900, .K = 32, .V = 32});
  add({.name = "key 256", .T = 900, .K = 256});
  add({.name = "value 128", .T = 900, .V = 128});
  add({.name = "key 96 value 104", .T = 900, .K = 96, .V = 104});
  add({.name = "key 256 value 128", .T = 900, .K = 256, .V = 128});
  add({.name = "G = H = 4 odd levels", .T = 900, .G = 4, .H = 4, .L = 13});
  add({.name = "G 2 H 6 L 33", .T = 900, .G = 2, .H = 6, .L = 33});
  add({.name = "levels f32", .T = 900, .H = 5, .scales_f32 = true});
  add({.name = "saturate 3", .T = 900, .L = 3, .saturate = true});
  add({.name = "saturate 9", .T = 900, .L = 9, .saturate = true});
  add({.name = "float16", .T = 900, .dtype = DType::kFloat16});
  add({.name = "float16 levels f32", .T = 900, .dtype = DType::kFloat16, .scales_f32 = true});
  add({.name = "packed", .H = 4, .packed = {1, 0, 127, 128, 129, 0, 700, 64, 2000, 3}});
  add({.name = "packed key 64", .H = 4, .K = 64, .packed = {300, 77, 1100}});
  add({.name = "scale", .T = 300, .scale = 0.37f});
  add({.name = "rows 20 and 12 apart", .T = 300, .H = 2, .K = 20, .V = 12, .gap = 12});
  add({.name = "rows 72 apart", .T = 1000, .K = 64, .V = 64, .gap = 8});
  add({.name = "expanded d_o", .T = 900, .expanded = true});
  add({.name = "expanded d_o, V 40", .T = 900, .V = 40, .expanded = true});
  // Several passes: one head of a group at a time, parts of a group, whole groups.
  add({.name = "passes of a head", .B = 1, .T = 4096, .H = 6, .workspace = 1});
  add({.name = "passes in groups", .B = 1, .T = 4000, .H = 6, .workspace = std::size_t{13} << 20});
  add({.name = "passes of groups", .T = 2000, .G = 3, .H = 6, .workspace = std::size_t{15} << 20});
  add({.name = "passes, packed, expanded",
       .H = 4,
       .packed = {300, 1, 2077, 1100},
       .expanded = true,
       .workspace = 1});
  add({.name = "long 8192", .B = 1, .T = 8192, .H = 6});
  add({.name = "long strong 8192", .B = 1, .T = 8192, .H = 4, .gates = Gates::kStrong});
  add({.name = "long resets 8192", .B = 1, .T = 8192, .H = 4, .gates = Gates::kResets});
  return cases;
}

std::vector<Case> TimeCases() {
  std::vector<Case> cases;
  for (int t : {2048, 8191, 8192, 32768, 131072}) {
    cases.push_back({.name = "H 48 K 128 V 64 T " + std::to_string(t), .T = t, .H = 48, .L = 18});
  }
  for (int t : {8192, 32768}) {
    cases.push_back({.name = "H = G 16 K 128 V 128 T " + std::to_string(t),
                     .T = t,
                     .G = 16,
                     .H = 16,
                     .V = 128});
  }
  cases.push_back({.name = "H 48 K 128 V 64 T 1048576", .B = 1, .T = 1 << 20, .H = 48});
  cases.push_back({.name = "8 rows of 2048", .B = 8, .T = 2048, .H = 48});
  cases.push_back({.name = "float16 8192", .T = 8192, .H = 48, .dtype = DType::kFloat16});
  cases.push_back({.name = "K 256 V 64 T 8192", .T = 8192, .H = 48, .K = 256});
  cases.push_back(
      {.name = "packed 32768", .H = 48, .packed = {8192, 100, 4000, 1, 2000, 12000, 475, 6000}});
  return cases;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "check";
  const std::string only = argc > 2 ? argv[2] : "";
  std::uint32_t seed = argc > 3 ? std::strtoul(argv[3], nullptr, 10) : 0;
  if (seed == 0) seed = std::random_device{}() & 0xffffff;
  const int count = argc > 4 ? std::atoi(argv[4]) : 1;
  const bool check = mode == "check";
  bool good = true;
  for (int i = 0; i < count; ++i, ++seed) {
    std::printf("seed %u\n", seed);
    for (const Case& c : check ? CheckCases() : TimeCases()) {
      if (c.name.find(only) == std::string::npos) continue;
      try {
        good &= RunCase(c, check ? 0 : mode == "once" ? 1 : 21, seed);
      } catch (const std::exception& e) {
        std::printf("%-28s %s\n", c.name.c_str(), e.what());
        return 1;
      }
    }
  }
  return good ? 0 : 1;
}
