// Gated RMSNorm and L2 norm (fenwick/layers.h), one group of threads a row:
//   u = x or x * silu(gate),   n = u * r,  r = 1 / sqrt(c * sum(u^2) + eps),
//   y = n * weight [* silu(gate)]
// with c = 1/D (RMSNorm) or 1 (L2). Backward:
//   dn = dy * weight [* silu(gate)],   du = r * (dn - n * c * sum(dn * n))
//   d_weight = sum over rows of dy * n [* silu(gate)], in two steps of fixed order
#include <algorithm>

#include "cuda/layers/cuda_layers.h"
#include "cuda/layers/layer_math.cuh"

namespace fenwick::cuda {
namespace {

// A row of up to this many columns is one warp's work, a longer one the whole block's.
constexpr std::int64_t kWarpColumns = 512;
// Blocks of the backward, each with its own sum of d_weight: the figure fixes the order of the
// sums, so it must not depend on the device. 512 fill any of today's.
constexpr std::int64_t kMaxParts = 512;

// A tensor [..., D] as a list of rows.
struct RowList {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int axes = 0;
  std::int64_t sizes[kMaxRank], strides[kMaxRank];

  __device__ std::int64_t Offset(std::int64_t row) const {
    std::int64_t offset = 0;
    for (int axis = axes - 1; axis >= 0; --axis) {
      offset += row % sizes[axis] * strides[axis];
      row /= sizes[axis];
    }
    return offset;
  }
};

RowList MakeRowList(const TensorView& view) {
  RowList rows;
  if (!view.given()) return rows;
  rows.data = view.data;
  rows.dtype = view.dtype;
  // Axes that lie behind each other in memory are one.
  for (int axis = 0; axis + 1 < view.rank; ++axis) {
    if (rows.axes > 0 && rows.strides[rows.axes - 1] == view.size(axis) * view.stride(axis)) {
      rows.sizes[rows.axes - 1] *= view.size(axis);
      rows.strides[rows.axes - 1] = view.stride(axis);
    } else {
      rows.sizes[rows.axes] = view.size(axis);
      rows.strides[rows.axes++] = view.stride(axis);
    }
  }
  return rows;
}

struct Norm {
  RowList x, gate;
  const void* weight = nullptr;  // [D] or null: ones
  DType weight_dtype = DType::kFloat32;
  std::int64_t rows = 0, columns = 0;
  double eps = 0, square_scale = 1;
  bool norm_before_gate = false;
  int group = 32;  // threads of a row: a warp or a block

  std::int64_t rows_per_block() const { return kLayerThreads / group; }
  std::int64_t parts() const {
    return std::min((rows + rows_per_block() - 1) / rows_per_block(), kMaxParts);
  }
};

template <typename T>
__device__ T GroupSum(T value, int group) {
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffffu, value, mask);
  if (group == 32) return value;
  __shared__ T warps[kLayerThreads / 32];
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  T sum = 0;
  for (int w = 0; w < kLayerThreads / 32; ++w) sum += warps[w];
  return sum;
}

// One row as its group of threads sees it.
template <typename T>
struct NormRow {
  const Norm& norm;
  std::int64_t x_offset, gate_offset;

  __device__ NormRow(const Norm& norm, std::int64_t row)
      : norm(norm), x_offset(norm.x.Offset(row)), gate_offset(norm.gate.Offset(row)) {}
  __device__ T X(std::int64_t j) const {
    return LoadElement<T>(norm.x.data, norm.x.dtype, x_offset + j);
  }
  __device__ T Gate(std::int64_t j) const {
    return LoadElement<T>(norm.gate.data, norm.gate.dtype, gate_offset + j);
  }
  __device__ T Weight(std::int64_t j) const {
    return norm.weight ? LoadElement<T>(norm.weight, norm.weight_dtype, j) : T(1);
  }
  __device__ bool gated() const { return norm.gate.data != nullptr; }
  __device__ T U(std::int64_t j) const {
    return gated() && !norm.norm_before_gate ? X(j) * Silu(Gate(j)) : X(j);
  }
  // silu(gate) where it multiplies after the norm.
  __device__ T After(std::int64_t j) const {
    return gated() && norm.norm_before_gate ? Silu(Gate(j)) : T(1);
  }
  __device__ T Root(int lane) const {
    T square = 0;
    for (std::int64_t j = lane; j < norm.columns; j += norm.group) square += U(j) * U(j);
    square = GroupSum(square, norm.group);
    return T(1) / sqrt(square * static_cast<T>(norm.square_scale) + static_cast<T>(norm.eps));
  }
};

template <typename T>
__global__ void __launch_bounds__(kLayerThreads) NormForward(Norm norm, RowList y) {
  const int lane = threadIdx.x % norm.group;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * (kLayerThreads / norm.group) +
                           threadIdx.x / norm.group;
  if (row >= norm.rows) return;
  const NormRow<T> in(norm, row);
  const T r = in.Root(lane);
  const std::int64_t to = y.Offset(row);
  for (std::int64_t j = lane; j < norm.columns; j += norm.group) {
    StoreElement<T>(y.data, y.dtype, to + j, in.U(j) * r * in.Weight(j) * in.After(j));
  }
}

// Block `part` takes every parts-th set of rows; partial [parts, D] or null receives its sums of
// d_weight, one after the other group of the block.
template <typename T>
__global__ void __launch_bounds__(kLayerThreads)
    NormBackward(Norm norm, RowList d_y, RowList d_x, RowList d_gate, T* partial) {
  const int lane = threadIdx.x % norm.group, group = threadIdx.x / norm.group;
  const std::int64_t rows_per_block = kLayerThreads / norm.group;
  T* sums =
      partial == nullptr ? nullptr : partial + (blockIdx.x * rows_per_block + group) * norm.columns;
  if (sums != nullptr) {
    for (std::int64_t j = lane; j < norm.columns; j += norm.group) sums[j] = 0;
  }
  for (std::int64_t first = blockIdx.x * rows_per_block; first < norm.rows;
       first += gridDim.x * rows_per_block) {
    const std::int64_t row = first + group;
    if (row >= norm.rows) break;  // whole groups; a group that is a block never splits
    const NormRow<T> in(norm, row);
    const std::int64_t dy_offset = d_y.Offset(row), dx_offset = d_x.Offset(row),
                       dg_offset = d_gate.Offset(row);
    const T r = in.Root(lane);
    T dot = 0;
    for (std::int64_t j = lane; j < norm.columns; j += norm.group) {
      const T gated = LoadElement<T>(d_y.data, d_y.dtype, dy_offset + j) * in.After(j);
      const T n = in.U(j) * r;
      dot += gated * in.Weight(j) * n;
      if (sums != nullptr) sums[j] += gated * n;
    }
    dot = GroupSum(dot, norm.group) * static_cast<T>(norm.square_scale);
    for (std::int64_t j = lane; j < norm.columns; j += norm.group) {
      const T dy = LoadElement<T>(d_y.data, d_y.dtype, dy_offset + j);
      const T n = in.U(j) * r, weight = in.Weight(j);
      const T du = r * (dy * weight * in.After(j) - n * dot);
      if (!in.gated()) {
        if (d_x.data != nullptr) StoreElement<T>(d_x.data, d_x.dtype, dx_offset + j, du);
        continue;
      }
      const T gate = in.Gate(j), x = in.X(j);
      const T d_silu = norm.norm_before_gate ? dy * n * weight : du * x;
      const T dx = norm.norm_before_gate ? du : du * Silu(gate);
      if (d_x.data != nullptr) StoreElement<T>(d_x.data, d_x.dtype, dx_offset + j, dx);
      if (d_gate.data != nullptr) {
        StoreElement<T>(d_gate.data, d_gate.dtype, dg_offset + j, d_silu * SiluSlope(gate));
      }
    }
  }
}

Norm MakeNorm(const TensorView& x, const TensorView& gate, const TensorView& weight, double eps,
              double square_scale, bool norm_before_gate) {
  Norm norm;
  norm.x = MakeRowList(x);
  norm.gate = MakeRowList(gate);
  if (weight.given()) {
    norm.weight = weight.data;
    norm.weight_dtype = weight.dtype;
  }
  norm.columns = x.size(x.rank - 1);
  norm.rows = norm.columns > 0 ? x.num_elements() / norm.columns : 0;
  norm.eps = eps;
  norm.square_scale = square_scale;
  norm.norm_before_gate = norm_before_gate;
  norm.group = norm.columns <= kWarpColumns ? 32 : kLayerThreads;
  return norm;
}

Norm MakeNorm(const GatedNorm& inputs) {
  return MakeNorm(inputs.x, inputs.gate, inputs.weight, inputs.eps,
                  1.0 / static_cast<double>(inputs.x.size(inputs.x.rank - 1)),
                  inputs.norm_before_gate);
}

void RunForward(const Norm& norm, const TensorView& y, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const std::int64_t blocks = (norm.rows + norm.rows_per_block() - 1) / norm.rows_per_block();
  const auto kernel = y.dtype == DType::kFloat64 ? NormForward<double> : NormForward<float>;
  Launch("norm", kernel, blocks, kLayerThreads, 0, stream, norm, MakeRowList(y));
}

template <typename T>
void RunBackward(const Norm& norm, const TensorView& d_y, const GatedNormGradients& gradients,
                 const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const bool weight = gradients.weight.given();
  T* partial = weight ? static_cast<T*>(context.workspace) : nullptr;
  Launch("norm backward", NormBackward<T>, norm.parts(), kLayerThreads, 0, stream, norm,
         MakeRowList(d_y), MakeRowList(gradients.x), MakeRowList(gradients.gate), partial);
  if (!weight) return;
  Launch("norm weight", SumParts<T>, (norm.columns + 31) / 32, kLayerThreads, 0, stream, partial,
         norm.parts() * norm.rows_per_block(), norm.columns, gradients.weight.data,
         gradients.weight.dtype, 1, norm.columns);
}

void RunBackward(const Norm& norm, const TensorView& d_y, const GatedNormGradients& gradients,
                 const Context& context) {
  if (d_y.dtype == DType::kFloat64) {
    RunBackward<double>(norm, d_y, gradients, context);
  } else {
    RunBackward<float>(norm, d_y, gradients, context);
  }
}

}  // namespace

void GatedRmsNorm(const GatedNorm& inputs, const TensorView& y, const Context& context) {
  RunForward(MakeNorm(inputs), y, context);
}

void GatedRmsNormBackward(const GatedNorm& inputs, const TensorView& d_y,
                          const GatedNormGradients& gradients, const Context& context) {
  RunBackward(MakeNorm(inputs), d_y, gradients, context);
}

std::size_t GatedRmsNormBackwardWorkspaceBytes(const GatedNorm& inputs,
                                               const GatedNormGradients& gradients) {
  if (!gradients.weight.given()) return 0;
  const Norm norm = MakeNorm(inputs);
  const std::size_t element = inputs.x.dtype == DType::kFloat64 ? 8 : 4;
  return norm.parts() * norm.rows_per_block() * norm.columns * element;
}

void L2Norm(const TensorView& x, double eps, const TensorView& y, const Context& context) {
  RunForward(MakeNorm(x, {}, {}, eps, 1.0, false), y, context);
}

void L2NormBackward(const TensorView& x, double eps, const TensorView& d_y, const TensorView& d_x,
                    const Context& context) {
  RunBackward(MakeNorm(x, {}, {}, eps, 1.0, false), d_y, GatedNormGradients{.x = d_x}, context);
}

}  // namespace fenwick::cuda
