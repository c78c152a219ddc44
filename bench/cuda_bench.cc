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
    auto* data = static_cast<char*>(view.data);
    std::size_t filled = block * ElementSize(dtype);
    const std::size_t bytes = count * ElementSize(dtype);
    Check(cudaMemcpy(data, from, filled, cudaMemcpyHostToDevice));
    for (; filled < bytes; filled *= 2) {
      Check(cudaMemcpy(data + filled, data, std::min(filled, bytes - filled),
                       cudaMemcpyDeviceToDevice));
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

// Sequences of a decoding batch: all alike, or each at a position of its own.
enum class Positions { kAlike, kOwn };

// One token a step for each of B sequences at about position T, against the time that reading what
// is live of the state (nodes; tokens in the ring) takes at 4.3 TB/s, a copy's rate on an H200.
class StepTimer {
 public:
  StepTimer(const Case& c, Positions positions) : case_(c), sequences_(c.B) {
    const DType type = DType::kBFloat16;
    const std::int64_t largest = c.T + 4096;
    inputs_ = MakeInputs(c, 1, NumLevels(largest), tensors_);
    StateView& state = inputs_.initial_state;
    state.k = tensors_.Make(type, {c.B, kStateRing, c.G, c.K}, -0.1f, 0.1f);
    state.v = tensors_.Make(type, {c.B, kStateRing, c.H, c.V}, -1, 1);
    state.g = tensors_.Make(DType::kFloat32, {c.B, kStateRing, c.H}, -0.1f, -0.001f);
    if (inputs_.beta.given()) {
      state.beta = tensors_.Make(type, {c.B, kStateRing, c.H}, 0.1f, 0.9f);
    }
    state.nodes = tensors_.Make(DType::kFloat32, {c.B, c.H, NumSlots(largest), c.K, c.V}, -1, 1);
    state.position = tensors_.Zeros(DType::kInt64, {c.B});
    state.base = tensors_.Zeros(DType::kInt64, {c.B});
    state.max_position = largest;
    o_ = tensors_.Zeros(type, {c.B, 1, c.H, c.V});
    for (std::int64_t b = 0; b < c.B; ++b) {
      Sequence& sequence = sequences_[b];
      sequence.base = c.T - (positions == Positions::kOwn ? b * 37 % 256 * kStateChunk : 0);
      sequence.position = sequence.base + (positions == Positions::kOwn ? 64 + b * 29 % 64 : 80);
    }
    Check(cudaStreamCreate(&stream_));
    Reset();
  }
  ~StepTimer() { cudaStreamDestroy(stream_); }
  StepTimer(const StepTimer&) = delete;

  // Median of single steps in which nothing is folded.
  float Single() {
    Reset();
    return Median(21, [&] { Step(); });
  }
  // Mean of 64 steps in a row, in which every sequence folds once.
  float Cycle() {
    Reset();
    return Time(kStateChunk, [&] { Step(); });
  }
  // The same with the steps replayed from a CUDA graph.
  float Graph() {
    Reset();
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < kStateChunk; ++i) Step();
    Check(cudaStreamEndCapture(stream_, &graph));
    Check(cudaGraphInstantiate(&executable, graph, 0));
    const auto replay = [&] { Check(cudaGraphLaunch(executable, stream_)); };
    replay();
    Reset();
    const float time = Time(1, replay) / kStateChunk;
    Check(cudaGraphExecDestroy(executable));
    Check(cudaGraphDestroy(graph));
    return time;
  }
  double node_bytes() const {
    double nodes = 0;
    for (const Sequence& s : sequences_) nodes += std::popcount(std::uint64_t(s.base) / 64);
    return 4.0 * nodes * case_.H * case_.K * case_.V;
  }
  // Of 96 tokens, what a ring holds on average.
  double ring_bytes() const {
    const double token = 2.0 * case_.G * case_.K + 2.0 * case_.H * case_.V +
                         case_.H * (inputs_.beta.given() ? 6.0 : 4.0);
    return 96.0 * case_.B * token;
  }

 private:
  struct Sequence {
    std::int64_t position, base;
  };

  void Step() { fenwick::Step(inputs_, o_, {.device = Device::kCUDA, .stream = stream_}); }

  void Reset() {
    std::vector<std::int64_t> position, base;
    for (const Sequence& s : sequences_) {
      position.push_back(s.position);
      base.push_back(s.base);
    }
    const StateView& state = inputs_.initial_state;
    const std::size_t bytes = sequences_.size() * sizeof(std::int64_t);
    Check(cudaStreamSynchronize(stream_));
    Check(cudaMemcpy(state.position.data, position.data(), bytes, cudaMemcpyHostToDevice));
    Check(cudaMemcpy(state.base.data, base.data(), bytes, cudaMemcpyHostToDevice));
  }

  float Time(int repeats, const std::function<void()>& run) {
    cudaEvent_t start, stop;
    Check(cudaEventCreate(&start));
    Check(cudaEventCreate(&stop));
    Check(cudaEventRecord(start, stream_));
    for (int i = 0; i < repeats; ++i) run();
    Check(cudaEventRecord(stop, stream_));
    Check(cudaEventSynchronize(stop));
    float time = 0;
    Check(cudaEventElapsedTime(&time, start, stop));
    Check(cudaEventDestroy(start));
    Check(cudaEventDestroy(stop));
    return time / repeats;
  }
  float Median(int repeats, const std::function<void()>& run) {
    for (int i = 0; i < 2; ++i) run();
    std::vector<float> times;
    for (int i = 0; i < repeats; ++i) times.push_back(Time(1, run));
    std::sort(times.begin(), times.end());
    return times[repeats / 2];
  }

  Case case_;
  std::vector<Sequence> sequences_;
  Tensors tensors_;
  Inputs inputs_;
  TensorView o_;
  cudaStream_t stream_ = nullptr;
};

void TimeSteps(const Case& c) {
  StepTimer alike(c, Positions::kAlike);
  const float single = alike.Single(), cycle = alike.Cycle(), graph = alike.Graph();
  const double nodes = alike.node_bytes(), ring = alike.ring_bytes();
  std::printf(
      "%-11s step     B%-4lld at %-7lld H%lld K%lld V%lld  single %8.4f ms  cycle %8.4f ms  "
      "graph %8.4f ms  nodes %.1f MB + ring %.1f MB: %.4f ms, single / that %.2f\n",
      Name(c), (long long)c.B, (long long)c.T, (long long)c.H, (long long)c.K, (long long)c.V,
      single, cycle, graph, nodes * 1e-6, ring * 1e-6, (nodes + ring) / 4.3e9,
      single / ((nodes + ring) / 4.3e9));
  std::fflush(stdout);
}

void TimeMixedSteps(const Case& c) {
  StepTimer own(c, Positions::kOwn);
  const float cycle = own.Cycle();
  const double bytes = own.node_bytes() + own.ring_bytes();
  std::printf(
      "%-11s step     B%-4lld about %-7lld own positions  cycle %8.4f ms  "
      "nodes + ring %.1f MB: %.4f ms, cycle / that %.2f\n",
      Name(c), (long long)c.B, (long long)c.T, cycle, bytes * 1e-6, bytes / 4.3e9,
      cycle / (bytes / 4.3e9));
  std::fflush(stdout);
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
  // 512 and 16,384 chunks, and 21 of them more: four live nodes each.
  const auto scalar = [](std::int64_t B, std::int64_t T) {
    return Case{kScalar, B, T + 64 * 21, 1, 48, 128, 64};
  };
  const auto delta = [](std::int64_t B, std::int64_t T) {
    return Case{kDelta, B, T + 64 * 21, 24, 24, 128, 128};
  };
  for (const auto& make : {+scalar, +delta}) {
    for (const std::int64_t B : {1, 8, 64, 512, 1024}) TimeSteps(make(B, 1 << 15));
    for (const std::int64_t B : {1, 64, 512}) TimeSteps(make(B, 1 << 20));
    for (const std::int64_t B : {64, 512}) TimeMixedSteps(make(B, 1 << 15));
  }
  return 0;
}

}  // namespace
}  // namespace fenwick

int main(int argc, char** argv) { return fenwick::Run(argc > 1 ? argv[1] : ""); }
