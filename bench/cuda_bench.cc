// Times the operators on the current CUDA device with events: forward, backward and decoding, in
// bfloat16, on random data. Arguments: nothing, or a filter on the names.
//
//   cuda_bench [FILTER]
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda/select.h"
#include "fenwick/ops.h"

namespace fenwick {
namespace {

void Check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(status));
  std::exit(1);
}

// Device memory with random bfloat16 or float32 values in [low, high).
class Buffer {
 public:
  explicit Buffer(std::size_t bytes) { Check(cudaMalloc(&data_, std::max<std::size_t>(bytes, 1))); }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

class Tensors {
 public:
  TensorView Make(DType dtype, std::initializer_list<std::int64_t> sizes, float low, float high) {
    TensorView view(nullptr, dtype, sizes);
    const std::int64_t count = view.num_elements();
    buffers_.push_back(std::make_unique<Buffer>(count * ElementSize(dtype)));
    view.data = buffers_.back()->data();
    // A megabyte of random numbers, repeated.
    const std::int64_t block = std::min<std::int64_t>(count, 1 << 18);
    std::uniform_real_distribution<float> uniform(low, high);
    std::vector<float> values(block);
    for (float& value : values) value = uniform(random_);
    std::vector<std::uint16_t> narrow(block);
    for (std::int64_t i = 0; i < block; ++i) {
      std::uint32_t bits;
      std::memcpy(&bits, &values[i], sizeof(bits));
      narrow[i] = static_cast<std::uint16_t>(bits >> 16);
    }
    const void* from =
        dtype == DType::kBFloat16 ? static_cast<const void*>(narrow.data()) : values.data();
    for (std::int64_t i = 0; i < count; i += block) {
      const std::size_t bytes = std::min(block, count - i) * ElementSize(dtype);
      Check(cudaMemcpy(static_cast<char*>(view.data) + i * ElementSize(dtype), from, bytes,
                       cudaMemcpyHostToDevice));
    }
    return view;
  }
  TensorView Zeros(DType dtype, std::initializer_list<std::int64_t> sizes) {
    TensorView view(nullptr, dtype, sizes);
    const std::size_t bytes = view.num_elements() * ElementSize(dtype);
    buffers_.push_back(std::make_unique<Buffer>(bytes));
    view.data = buffers_.back()->data();
    Check(cudaMemset(view.data, 0, bytes));
    return view;
  }

 private:
  std::mt19937 random_{7};
  std::vector<std::unique_ptr<Buffer>> buffers_;
};

// Median of `repeats` runs after two warm-ups, in milliseconds.
float Median(int repeats, const std::function<void()>& run) {
  cudaEvent_t start, stop;
  Check(cudaEventCreate(&start));
  Check(cudaEventCreate(&stop));
  for (int i = 0; i < 2; ++i) run();
  std::vector<float> times(repeats);
  for (float& time : times) {
    Check(cudaEventRecord(start));
    run();
    Check(cudaEventRecord(stop));
    Check(cudaEventSynchronize(stop));
    Check(cudaEventElapsedTime(&time, start, stop));
  }
  Check(cudaGetLastError());
  std::sort(times.begin(), times.end());
  return times[repeats / 2];
}

struct Case {
  Transition transition;
  std::int64_t B, T, G, H, K, V;
};

Inputs MakeInputs(const Case& c, std::int64_t T, std::int64_t levels, Tensors& tensors) {
  const DType type = DType::kBFloat16;
  Inputs inputs;
  inputs.transition = c.transition;
  const float key = c.transition == Transition::kGatedDelta ? 1.7f / std::sqrt(float(c.K)) : 1.0f;
  inputs.q = tensors.Make(type, {c.B, T, c.G, c.K}, -key, key);
  inputs.k = tensors.Make(type, {c.B, T, c.G, c.K}, -key, key);
  inputs.v = tensors.Make(type, {c.B, T, c.H, c.V}, -1, 1);
  inputs.g = tensors.Make(DType::kFloat32, {c.B, T, c.H}, -0.1f, -0.001f);
  if (c.transition == Transition::kGatedDelta) {
    inputs.beta = tensors.Make(type, {c.B, T, c.H}, 0.1f, 0.9f);
  }
  inputs.level_scales = tensors.Make(type, {c.B, T, c.H, levels}, 0, 1);
  return inputs;
}

const char* Name(const Case& c) {
  return c.transition == Transition::kGatedDelta ? "gated_delta" : "scalar_gate";
}

void TimeCall(const Case& c, const char* kernels) {
  Tensors tensors;
  const std::int64_t levels = NumLevels(c.T);
  const Inputs inputs = MakeInputs(c, c.T, levels, tensors);
  const DType type = DType::kBFloat16;
  const TensorView o = tensors.Zeros(type, {c.B, c.T, c.H, c.V});
  const TensorView d_o = tensors.Make(type, {c.B, c.T, c.H, c.V}, -1, 1);
  Gradients gradients;
  gradients.q = tensors.Zeros(type, {c.B, c.T, c.G, c.K});
  gradients.k = tensors.Zeros(type, {c.B, c.T, c.G, c.K});
  gradients.v = tensors.Zeros(type, {c.B, c.T, c.H, c.V});
  gradients.g = tensors.Zeros(DType::kFloat32, {c.B, c.T, c.H});
  if (inputs.beta.given()) gradients.beta = tensors.Zeros(type, {c.B, c.T, c.H});
  gradients.level_scales = tensors.Zeros(type, {c.B, c.T, c.H, levels});
  const std::size_t forward_bytes = ForwardWorkspaceBytes(inputs, {}, Device::kCUDA);
  const std::size_t backward_bytes = BackwardWorkspaceBytes(inputs, {}, gradients, Device::kCUDA);
  const Buffer workspace(std::max(forward_bytes, backward_bytes));
  const Context context{.device = Device::kCUDA,
                        .workspace = workspace.data(),
                        .workspace_bytes = std::max(forward_bytes, backward_bytes)};
  const int repeats = c.T > 40000 ? 3 : 9;
  const float forward = Median(repeats, [&] { Forward(inputs, o, {}, context); });
  const float backward = Median(repeats, [&] { Backward(inputs, d_o, {}, gradients, context); });
  std::printf(
      "%-11s %-8s B%lld T%-6lld G%lld H%lld K%lld V%lld  forward %8.3f ms  backward %8.3f ms"
      "  workspace %.2f / %.2f GB\n",
      Name(c), kernels, (long long)c.B, (long long)c.T, (long long)c.G, (long long)c.H,
      (long long)c.K, (long long)c.V, forward, backward, forward_bytes * 1e-9,
      backward_bytes * 1e-9);
}

// One token for each of B sequences at position T, live states in memory: against the time that
// reading them once takes at 4.3 TB/s (a copy's rate on an H200).
void TimeStep(const Case& c) {
  Tensors tensors;
  const int slots = NumSlots(NextBase(0, c.T + 64));
  const std::int64_t levels = NumLevels(c.T + 1024);
  Inputs inputs = MakeInputs(c, 1, levels, tensors);
  const DType type = DType::kBFloat16;
  StateView& state = inputs.initial_state;
  state.k = tensors.Make(type, {c.B, kStateRing, c.G, c.K}, -0.1f, 0.1f);
  state.v = tensors.Make(type, {c.B, kStateRing, c.H, c.V}, -1, 1);
  state.g = tensors.Make(DType::kFloat32, {c.B, kStateRing, c.H}, -0.1f, -0.001f);
  if (inputs.beta.given()) state.beta = tensors.Make(type, {c.B, kStateRing, c.H}, 0.1f, 0.9f);
  state.nodes = tensors.Make(DType::kFloat32, {c.B, c.H, slots, c.K, c.V}, -1, 1);
  state.position = tensors.Zeros(DType::kInt64, {c.B});
  state.base = tensors.Zeros(DType::kInt64, {c.B});
  state.max_position = c.T + 512;
  const std::vector<std::int64_t> position(c.B, c.T), base(c.B, NextBase(0, c.T));
  Check(cudaMemcpy(state.position.data, position.data(), c.B * 8, cudaMemcpyHostToDevice));
  Check(cudaMemcpy(state.base.data, base.data(), c.B * 8, cudaMemcpyHostToDevice));
  const TensorView o = tensors.Zeros(type, {c.B, 1, c.H, c.V});
  const Context context{.device = Device::kCUDA};
  const float time = Median(25, [&] { Step(inputs, o, context); });
  const double bytes = 4.0 * c.B * c.H * c.K * c.V * std::popcount(std::uint64_t(base[0] / 64));
  std::printf("%-11s step     B%-4lld at %-7lld H%lld K%lld V%lld  %8.4f ms  live states %.4f ms\n",
              Name(c), (long long)c.B, (long long)c.T, (long long)c.H, (long long)c.K,
              (long long)c.V, time, bytes / 4.3e9);
}

int Run(const std::string& filter) {
  const auto wanted = [&](const char* name) {
    return std::string(name).find(filter) != std::string::npos;
  };
  constexpr auto kScalar = Transition::kScalarGate;
  constexpr auto kDelta = Transition::kGatedDelta;
  for (const std::int64_t T : {2048, 8192, 32768}) {
    const Case scalar{kScalar, 2, T, 1, 48, 128, 64};
    if (wanted("scalar_gate")) {
      cuda::ForceKernels(cuda::KernelChoice::kGeneral);
      TimeCall(scalar, "general");
      cuda::ForceKernels(cuda::KernelChoice::kAuto);
      TimeCall(scalar, "auto");
    }
    if (wanted("gated_delta")) TimeCall({kDelta, 1, T, 24, 24, 128, 128}, "general");
  }
  if (!wanted("step")) return 0;
  for (const std::int64_t T : {32768 + 64 * 21, (1 << 20) + 64 * 21}) {
    for (const std::int64_t B : {1, 64, 512}) {
      TimeStep({kScalar, B, T, 1, 48, 128, 64});
      if (B <= 64) TimeStep({kDelta, B, T, 24, 24, 128, 128});
    }
  }
  return 0;
}

}  // namespace
}  // namespace fenwick

int main(int argc, char** argv) { return fenwick::Run(argc > 1 ? argv[1] : ""); }
