// `fenwick bench`: what the operators cost on this machine, beside the floor: the time that their
// arithmetic takes at the machine's measured matrix product rate or their memory traffic at its
// measured copy rate, whichever is longer.
#include <torch/torch.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>

#include "apps/fenwick/commands.h"
#include "apps/fenwick/report.h"
#include "apps/fenwick/tensors.h"
#include "fenwick/fenwick.h"
#include "tasks/device.h"

namespace fenwick::app {
namespace {

using nlohmann::json;
using torch::Tensor;
using Index = std::int64_t;
using Clock = std::chrono::steady_clock;

constexpr Index kDecodeTokens = kStateChunk;  // one fold of the ring among them
constexpr int kMaxRepeats = 1000;

class Timer {
 public:
  Timer(torch::Device device, double seconds) : device_(device), seconds_(seconds) {}

  // Median seconds of a call, after one call to warm up.
  double operator()(const std::function<void()>& call) const {
    Once(call);
    std::vector<double> times;
    double total = 0;
    while (times.empty() || (total < seconds_ && times.size() < kMaxRepeats)) {
      times.push_back(Once(call));
      total += times.back();
    }
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2];
  }

  double Once(const std::function<void()>& call) const {
    Synchronize();
    const Clock::time_point begin = Clock::now();
    call();
    Synchronize();
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }

 private:
  void Synchronize() const {
    if (device_.is_cuda()) torch::cuda::synchronize(device_.index());
  }

  torch::Device device_;
  double seconds_;
};

struct Machine {
  double flops_per_second;
  double bytes_per_second;  // read + written
};

Machine Measure(const Timer& timer, const torch::TensorOptions& options) {
  const Index n = options.device().is_cuda() ? 8192 : 1024;
  const Tensor a = torch::randn({n, n}, options), b = torch::randn({n, n}, options);
  Tensor c = torch::empty_like(a);
  const double product = timer([&] { torch::mm_out(c, a, b); });
  const Index bytes = Index{1} << (options.device().is_cuda() ? 30 : 27);
  const Tensor from = torch::zeros({bytes}, options.dtype(torch::kUInt8));
  Tensor to = torch::zeros_like(from);
  const double copy = timer([&] { to.copy_(from); });
  return {2.0 * static_cast<double>(n * n * n) / product, 2.0 * static_cast<double>(bytes) / copy};
}

// Multiply-adds of the chunk-wise algorithm, times two, for one sequence. Triangles count half.
double ForwardFlops(Transition transition, const BenchOptions& o, Index tokens) {
  const double C = kStateChunk, K = static_cast<double>(o.key_size);
  const double V = static_cast<double>(o.value_size), H = static_cast<double>(o.heads);
  const double G = static_cast<double>(o.groups), T = static_cast<double>(tokens);
  double live = 0;  // states read, summed over the chunks
  const Index chunks = (tokens + kStateChunk - 1) / kStateChunk;
  for (Index c = 0; c < chunks; ++c) live += std::popcount(static_cast<std::uint64_t>(c));
  const double reads = live * C * 2 * K * V * H;
  if (transition == Transition::kScalarGate) {
    // q k^T, (q k^T . weights) v, k^T v
    return T * (C * K * G + C * V * H + 2 * K * V * H) + reads;
  }
  // q k^T and k k^T; the triangular solves for W and U; P U and P W; K^T U; and for each live
  // state of each chunk W S and K^T (W S).
  return T * (2 * C * K * G + H * (C * (K + V) + C * (K + V) + 2 * K * V)) + reads +
         live * C * 4 * K * V * H;
}

struct Tensors {
  Tensor q, k, v, g, beta, level_scales;

  Inputs View(Transition transition) const {
    Inputs inputs;
    inputs.transition = transition;
    inputs.q = ViewOf(q);
    inputs.k = ViewOf(k);
    inputs.v = ViewOf(v);
    inputs.g = ViewOf(g);
    if (transition == Transition::kGatedDelta) inputs.beta = ViewOf(beta);
    inputs.level_scales = ViewOf(level_scales);
    return inputs;
  }
  double Bytes(Transition transition) const {
    double bytes = 0;
    for (const Tensor& tensor : {q, k, v, g, level_scales, v}) bytes += tensor.nbytes();  // and o
    return transition == Transition::kGatedDelta ? bytes + beta.nbytes() : bytes;
  }
};

Tensors MakeTensors(const BenchOptions& o, Index tokens, int levels,
                    const torch::TensorOptions& options) {
  const auto wide = options.dtype(o.dtype == "float64" ? torch::kFloat64 : torch::kFloat32);
  Tensors t;
  t.q = torch::randn({o.batch, tokens, o.groups, o.key_size}, options);
  t.k = torch::nn::functional::normalize(
      torch::randn({o.batch, tokens, o.groups, o.key_size}, options),
      torch::nn::functional::NormalizeFuncOptions().dim(-1));
  t.v = torch::randn({o.batch, tokens, o.heads, o.value_size}, options);
  t.g = -0.1 * torch::rand({o.batch, tokens, o.heads}, wide);
  t.beta = torch::rand({o.batch, tokens, o.heads}, wide);
  t.level_scales = torch::rand({o.batch, tokens, o.heads, levels}, options);
  return t;
}

Transition TransitionOf(const std::string& name) {
  return name == "scalar_gate" ? Transition::kScalarGate : Transition::kGatedDelta;
}

json TimeForward(const BenchOptions& o, const Machine& machine, const Timer& timer,
                 const torch::TensorOptions& options) {
  json rows = json::array();
  for (const std::string& name : o.operators) {
    const Transition transition = TransitionOf(name);
    for (const Index tokens : o.lengths) {
      const Tensors t = MakeTensors(o, tokens, NumLevels(tokens), options);
      const Inputs inputs = t.View(transition);
      Tensor out = torch::empty_like(t.v);
      const double batch = static_cast<double>(o.batch);
      const double flops = batch * ForwardFlops(transition, o, tokens);
      const auto add = [&](const char* pass, double seconds, double work, double bytes) {
        rows.push_back({{"operator", name},
                        {"pass", pass},
                        {"tokens", tokens},
                        {"seconds", seconds},
                        {"tokens_per_second", batch * static_cast<double>(tokens) / seconds},
                        {"floor_seconds", std::max(work / machine.flops_per_second,
                                                   bytes / machine.bytes_per_second)}});
      };
      const double forward = timer([&] { CallForward(inputs, out, {}); });
      add("forward", forward, flops, t.Bytes(transition));
      const Tensor d_o = torch::randn_like(t.v);
      Tensors d{torch::empty_like(t.q),    torch::empty_like(t.k),
                torch::empty_like(t.v),    torch::empty_like(t.g),
                torch::empty_like(t.beta), torch::empty_like(t.level_scales)};
      Gradients gradients;
      gradients.q = ViewOf(d.q);
      gradients.k = ViewOf(d.k);
      gradients.v = ViewOf(d.v);
      gradients.g = ViewOf(d.g);
      if (transition == Transition::kGatedDelta) gradients.beta = ViewOf(d.beta);
      gradients.level_scales = ViewOf(d.level_scales);
      const double backward = timer([&] { CallBackward(inputs, d_o, {}, gradients); });
      // Two products for each of the forward, and the states once more.
      add("backward", backward, 2 * flops, 2 * t.Bytes(transition));
    }
  }
  return rows;
}

// A state as a sequence of `context` tokens leaves it, holding random numbers: what a step costs
// does not depend on them. At a power of two all levels are live: the worst case.
TorchState MakeState(const BenchOptions& o, Transition transition, Index context,
                     const torch::TensorOptions& options) {
  const auto wide = options.dtype(o.dtype == "float64" ? torch::kFloat64 : torch::kFloat32);
  const auto integer = options.dtype(torch::kInt64);
  const Index base = NextBase(0, context);
  const Index slots = NumSlots(NextBase(base, context + kDecodeTokens));
  TorchState state;
  state.k = torch::randn({o.batch, kStateRing, o.groups, o.key_size}, options);
  state.v = torch::randn({o.batch, kStateRing, o.heads, o.value_size}, options);
  state.g = -0.1 * torch::rand({o.batch, kStateRing, o.heads}, wide);
  if (transition == Transition::kGatedDelta) {
    state.k = state.k / state.k.norm(2, -1, true);
    state.beta = torch::rand({o.batch, kStateRing, o.heads}, wide);
  }
  state.nodes = torch::randn({o.batch, o.heads, slots, o.key_size, o.value_size}, wide);
  state.position = torch::full({o.batch}, context, integer);
  state.base = torch::full({o.batch}, base, integer);
  state.max_position = context;
  return state;
}

double StateBytes(const TorchState& state) {
  double bytes = 0;
  for (const Tensor* t : {&state.k, &state.v, &state.g, &state.beta, &state.nodes}) {
    if (t->defined()) bytes += static_cast<double>(t->nbytes());
  }
  return bytes;
}

json TimeDecode(const BenchOptions& o, const Machine& machine, const Timer& timer,
                const torch::TensorOptions& options) {
  json rows = json::array();
  const auto add = [&](const std::string& name, Index context, double bytes, double seconds,
                       double traffic) {
    rows.push_back({{"operator", name},
                    {"context", context},
                    {"state_bytes", bytes},
                    {"seconds_per_token", seconds},
                    {"tokens_per_second", static_cast<double>(o.batch) / seconds},
                    {"floor_seconds", traffic / machine.bytes_per_second}});
  };
  for (const Index context : o.contexts) {
    for (const std::string& name : o.operators) {
      const Transition transition = TransitionOf(name);
      const Tensors t = MakeTensors(o, 1, NumLevels(context + kDecodeTokens), options);
      Tensor out = torch::empty_like(t.v);
      const auto round = [&](TorchState& state) {
        for (Index i = 0; i < kDecodeTokens; ++i) {
          Inputs inputs = t.View(transition);
          inputs.initial_state = state.View();
          CallStep(inputs, out);
          ++state.max_position;
        }
      };
      double best = 0;
      for (int repeat = 0; repeat < 5; ++repeat) {
        TorchState state = MakeState(o, transition, context, options);
        const double seconds = timer.Once([&] { round(state); }) / kDecodeTokens;
        best = repeat == 0 ? seconds : std::min(best, seconds);
      }
      // The nodes are read at every token, and read and written at the one that folds a chunk.
      const TorchState state = MakeState(o, transition, context, options);
      add(name, context, StateBytes(state), best,
          state.nodes.nbytes() * (1.0 + 2.0 / kDecodeTokens));
    }
    // Softmax attention over a cache with as many heads, of the value size.
    const Tensor q = torch::randn({o.batch, o.heads, 1, o.value_size}, options);
    const Tensor k = torch::randn({o.batch, o.heads, context, o.value_size}, options);
    const Tensor v = torch::randn({o.batch, o.heads, context, o.value_size}, options);
    const double seconds = timer([&] { at::scaled_dot_product_attention(q, k, v); });
    const double bytes = static_cast<double>(k.nbytes() + v.nbytes());
    add("kv_cache", context, bytes, seconds, bytes);
  }
  return rows;
}

std::string Milliseconds(const json& row, const char* key) {
  return Format("%.4g", row[key].get<double>() * 1e3);
}

std::string Ratio(const json& row, const char* seconds) {
  return Format("%.1f", row[seconds].get<double>() / row["floor_seconds"].get<double>());
}

}  // namespace

int RunBench(const BenchOptions& o) {
  torch::NoGradGuard no_grad;
  for (const Index n : o.lengths) {
    if (n < 1) throw Error("--lengths: expected at least 1, got " + std::to_string(n));
  }
  for (const Index n : o.contexts) {
    if (n < 0) throw Error("--contexts: expected at least 0, got " + std::to_string(n));
  }
  const torch::Device device = tasks::DeviceOf(o.device);
  const auto options = torch::TensorOptions(tasks::DTypeOf(o.dtype)).device(device);
  torch::manual_seed(static_cast<std::uint64_t>(o.seed));
  const Timer timer(device, o.seconds);
  const Machine machine = Measure(timer, options);
  json result{{"device", o.device},
              {"dtype", o.dtype},
              {"threads", GetNumThreads()},
              {"batch", o.batch},
              {"heads", o.heads},
              {"groups", o.groups},
              {"key_size", o.key_size},
              {"value_size", o.value_size},
              {"matrix_product_gflops", machine.flops_per_second / 1e9},
              {"copy_gbytes_per_second", machine.bytes_per_second / 1e9}};
  if (!o.json) {
    std::printf("%s, %s, %d threads; B %lld, H %lld, G %lld, K %lld, V %lld\n", o.device.c_str(),
                o.dtype.c_str(), GetNumThreads(), static_cast<long long>(o.batch),
                static_cast<long long>(o.heads), static_cast<long long>(o.groups),
                static_cast<long long>(o.key_size), static_cast<long long>(o.value_size));
    std::printf("measured here: matrix product %.1f GFLOP/s, copy %.1f GB/s\n\n",
                machine.flops_per_second / 1e9, machine.bytes_per_second / 1e9);
  }
  if (o.what != "decode") {
    result["forward"] = TimeForward(o, machine, timer, options);
    std::vector<std::vector<std::string>> rows{
        {"operator", "pass", "T", "ms", "tokens/s", "floor ms", "x floor"}};
    for (const json& row : result["forward"]) {
      rows.push_back({row["operator"], row["pass"], row["tokens"].dump(),
                      Milliseconds(row, "seconds"),
                      Format("%.0f", row["tokens_per_second"].get<double>()),
                      Milliseconds(row, "floor_seconds"), Ratio(row, "seconds")});
    }
    if (!o.json) PrintTable(rows);
  }
  if (o.what != "forward") {
    result["decode"] = TimeDecode(o, machine, timer, options);
    std::vector<std::vector<std::string>> rows{
        {"decode", "context", "state bytes", "ms/token", "tokens/s", "floor ms", "x floor"}};
    for (const json& row : result["decode"]) {
      rows.push_back({row["operator"], row["context"].dump(),
                      Format("%.0f", row["state_bytes"].get<double>()),
                      Milliseconds(row, "seconds_per_token"),
                      Format("%.0f", row["tokens_per_second"].get<double>()),
                      Milliseconds(row, "floor_seconds"), Ratio(row, "seconds_per_token")});
    }
    if (!o.json && o.what == "all") std::puts("");
    if (!o.json) PrintTable(rows);
  }
  if (o.json) std::printf("%s\n", result.dump(2).c_str());
  return 0;
}

}  // namespace fenwick::app
