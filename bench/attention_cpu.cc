// Both operators on the CPU at B=1, H=8, G=1, K=128, V=64, float32: forward and backward over T,
// and the step over the position (see Step below). Each run of the first two times, back to back
// and several times, a large product on the same threads and the operator; reported are medians of
//   op_ms        time of a call
//   floor_ms     its own multiply-adds (Flops below) at the product's rate measured beside it
//   of_sgemm     floor / time, the median over pairs: robust against other load on the machine
//   of_sgemm_cpu the same from processor time, which time taken by other processes is no part of
//   us_per_token, cpu_us_per_token (all threads)
// Environment: FENWICK_BENCH_MAX_T (forward; default 2^20), FENWICK_BENCH_MAX_T_BACKWARD (2^18).
#include <benchmark/benchmark.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "fenwick/fenwick.h"
#include "sgemm.h"

namespace fenwick::bench {
namespace {

constexpr std::int64_t kHeads = 8, kGroups = 1, kKeys = 128, kValues = 64;
constexpr int kThreads = 2;

// Multiply-adds times two that the algorithm needs, for the scalar gate. Causal halves inside a
// chunk count as halves; work that is done twice (nodes of segments) counts once.
double ForwardFlops(std::int64_t tokens) {
  const double c = kStateChunk, half = (c + 1) / 2;
  double flops = 0;
  for (std::int64_t chunk = 0; chunk * kStateChunk < tokens; ++chunk) {
    const double nodes = std::popcount(static_cast<std::uint64_t>(chunk)) + 1;  // reads, own node
    flops += 2 * c * (kGroups * half * kKeys + kHeads * (half * kValues + nodes * kKeys * kValues));
  }
  return flops;
}

double BackwardFlops(std::int64_t tokens) {
  const double c = kStateChunk, half = (c + 1) / 2;
  double flops = 0;
  for (std::int64_t chunk = 0; chunk * kStateChunk < tokens; ++chunk) {
    // dq and the node's gradient for each read; the node again, dk and dv through it.
    const double products = 2 * std::popcount(static_cast<std::uint64_t>(chunk)) + 3;
    flops +=
        2 * c *
        (3 * kGroups * half * kKeys + kHeads * (2 * half * kValues + products * kKeys * kValues));
  }
  return flops;
}

struct Problem {
  std::vector<float> q, k, v, g, beta, lambda, o;
  Inputs inputs;

  Problem(std::int64_t batch, std::int64_t tokens, Transition transition, int levels) {
    std::mt19937 rng(1);
    std::uniform_real_distribution<float> uniform(-1, 1);
    // A table: random numbers one by one would take minutes for a million tokens.
    std::vector<float> table(1 << 16);
    for (float& x : table) x = uniform(rng);
    const auto make = [&](std::int64_t count, float scale, float shift) {
      std::vector<float> values(count);
      for (std::int64_t i = 0; i < count; ++i) {
        values[i] = scale * table[(i * 7 + (i >> 16)) & 0xffff] + shift;
      }
      return values;
    };
    const std::int64_t bt = batch * tokens;
    q = make(bt * kGroups * kKeys, 0.15f, 0);
    k = make(bt * kGroups * kKeys, 0.15f, 0);
    v = make(bt * kHeads * kValues, 1, 0);
    g = make(bt * kHeads, 0.05f, -0.05f);
    beta = make(bt * kHeads, 0.4f, 0.5f);
    lambda = make(bt * kHeads * levels, 0.5f, 0.6f);
    o.resize(bt * kHeads * kValues);
    inputs.transition = transition;
    inputs.q = TensorView(q.data(), DType::kFloat32, {batch, tokens, kGroups, kKeys});
    inputs.k = TensorView(k.data(), DType::kFloat32, {batch, tokens, kGroups, kKeys});
    inputs.v = TensorView(v.data(), DType::kFloat32, {batch, tokens, kHeads, kValues});
    inputs.g = TensorView(g.data(), DType::kFloat32, {batch, tokens, kHeads});
    if (transition == Transition::kGatedDelta) {
      inputs.beta = TensorView(beta.data(), DType::kFloat32, {batch, tokens, kHeads});
    }
    inputs.level_scales =
        TensorView(lambda.data(), DType::kFloat32, {batch, tokens, kHeads, levels});
  }
  TensorView Output() {
    return TensorView(o.data(), DType::kFloat32,
                      {inputs.q.size(0), inputs.q.size(1), kHeads, kValues});
  }
};

double Median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + x.size() / 2, x.end());
  return x[x.size() / 2];
}

double Seconds(const std::function<void()>& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Processor time of all threads.
double CpuSeconds() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Times `call` beside the product, `tokens` tokens a call.
void Measure(benchmark::State& state, std::int64_t tokens, double flops,
             const std::function<void()>& call) {
  std::vector<double> times, fractions, cpu_fractions, cpu_times, rates;
  call();
  for (auto _ : state) {
    double cpu = CpuSeconds();
    double rate = SgemmRate(kThreads);
    double sgemm_cpu = CpuSeconds() - cpu;
    cpu = CpuSeconds();
    const double seconds = Seconds(call);
    const double call_cpu = CpuSeconds() - cpu;
    cpu = CpuSeconds();
    rate = (rate + SgemmRate(kThreads)) / 2;
    sgemm_cpu = (sgemm_cpu + CpuSeconds() - cpu) / 2;
    state.SetIterationTime(seconds);
    times.push_back(seconds);
    rates.push_back(rate);
    fractions.push_back(flops / rate / seconds);
    cpu_times.push_back(call_cpu);
    cpu_fractions.push_back(flops / kSgemmFlops * sgemm_cpu / call_cpu);
  }
  const double seconds = Median(times);
  state.counters["op_ms"] = seconds * 1e3;
  state.counters["us_per_token"] = seconds * 1e6 / static_cast<double>(tokens);
  state.counters["cpu_us_per_token"] = Median(cpu_times) * 1e6 / static_cast<double>(tokens);
  state.counters["sgemm_gflops"] = Median(rates) * 1e-9;
  if (flops > 0) {
    state.counters["floor_ms"] = flops / Median(rates) * 1e3;
    state.counters["of_sgemm"] = Median(fractions);
    state.counters["of_sgemm_cpu"] = Median(cpu_fractions);
  }
}

void Forward(benchmark::State& state, Transition transition) {
  const std::int64_t tokens = state.range(0);
  Problem problem(1, tokens, transition, NumLevels(tokens));
  const Context context{.num_threads = kThreads};
  Measure(state, tokens, transition == Transition::kScalarGate ? ForwardFlops(tokens) : 0,
          [&] { fenwick::Forward(problem.inputs, problem.Output(), StateView(), context); });
}

void Backward(benchmark::State& state, Transition transition) {
  const std::int64_t tokens = state.range(0);
  const int levels = NumLevels(tokens);
  Problem problem(1, tokens, transition, levels);
  std::vector<float> dq(problem.q.size()), dk(problem.k.size()), dv(problem.v.size()),
      dg(problem.g.size()), dbeta(problem.beta.size()), dlambda(problem.lambda.size());
  const auto like = [](std::vector<float>& data, TensorView view) {
    view.data = data.data();
    return view;
  };
  Gradients gradients;
  gradients.q = like(dq, problem.inputs.q);
  gradients.k = like(dk, problem.inputs.k);
  gradients.v = like(dv, problem.inputs.v);
  gradients.g = like(dg, problem.inputs.g);
  if (problem.inputs.beta.given()) gradients.beta = like(dbeta, problem.inputs.beta);
  gradients.level_scales = like(dlambda, problem.inputs.level_scales);
  std::copy(problem.v.begin(), problem.v.end(), problem.o.begin());  // d_o
  const Context context{.num_threads = kThreads};
  Measure(state, tokens, transition == Transition::kScalarGate ? BackwardFlops(tokens) : 0, [&] {
    fenwick::Backward(problem.inputs, problem.Output(), StateGradView(), gradients, context);
  });
}

// The recurrent form as one would write it, float32: before a token the lower levels merge,
// then every live level's state [K, V] is transformed, and read. One thread, plain C++.
class NaiveRecurrence {
 public:
  NaiveRecurrence(Transition transition, int levels)
      : delta_(transition == Transition::kGatedDelta),
        levels_(levels),
        states_(kHeads * levels * kSize, 1.0f) {}

  // Token `t` of a problem of one token.
  void Step(Problem& token, std::int64_t t) {
    for (std::int64_t h = 0; h < kHeads; ++h) {
      float* states = states_.data() + h * levels_ * kSize;
      if (t > 0) Merge(states, std::countr_zero(static_cast<std::uint64_t>(t)));
      const float alpha = std::exp(token.g[h]), beta = delta_ ? token.beta[h] : 1;
      const float* k = token.k.data();
      const float* v = token.v.data() + h * kValues;
      float* out = token.o.data() + h * kValues;
      std::fill_n(out, kValues, 0.0f);
      for (std::int64_t i = 0; i < kKeys; ++i) {
        for (std::int64_t j = 0; j < kValues; ++j) states[i * kValues + j] = beta * k[i] * v[j];
      }
      for (int level = 0; level < levels_; ++level) {
        if (level > 0 && (t >> (level - 1) & 1) == 0) continue;
        float* state = states + level * kSize;
        if (level > 0) Transform(k, alpha, beta, state);
        const float lambda = token.lambda[h * levels_ + level];
        for (std::int64_t i = 0; i < kKeys; ++i) {
          const float weight = lambda * token.q[i];
          for (std::int64_t j = 0; j < kValues; ++j) out[j] += weight * state[i * kValues + j];
        }
      }
    }
    benchmark::DoNotOptimize(token.o.data());
  }

 private:
  static constexpr std::int64_t kSize = kKeys * kValues;

  // S[z + 1] = S[0] + ... + S[z].
  static void Merge(float* states, int z) {
    float* into = states + (z + 1) * kSize;
    std::copy_n(states, kSize, into);
    for (int level = 1; level <= z; ++level) {
      for (std::int64_t i = 0; i < kSize; ++i) into[i] += states[level * kSize + i];
    }
  }

  // S = alpha (I - beta k k^T) S, without the delta rule alpha S.
  void Transform(const float* k, float alpha, float beta, float* state) const {
    float erased[kValues] = {};
    for (std::int64_t i = 0; delta_ && i < kKeys; ++i) {
      const float weight = beta * k[i];
      for (std::int64_t j = 0; j < kValues; ++j) erased[j] += weight * state[i * kValues + j];
    }
    for (std::int64_t i = 0; i < kKeys; ++i) {
      float* row = state + i * kValues;
      if (delta_) {
        for (std::int64_t j = 0; j < kValues; ++j) row[j] -= k[i] * erased[j];
      }
      for (std::int64_t j = 0; j < kValues; ++j) row[j] *= alpha;
    }
  }

  const bool delta_;
  const int levels_;
  std::vector<float> states_;  // [H, levels, K, V]
};

// Decoding token by token through the chunk that begins at a position, one sequence, one thread,
// beside the naive recurrence over the same positions. Processor time; reported from the medians
// by position are
//   step_us, naive_us    mean over the chunk
//   median_us, naive_median_us
//   fold_us              the dearest position: a step that folds a chunk into the nodes
void Step(benchmark::State& state, Transition transition) {
  const std::int64_t position = state.range(0);
  StateSpec spec{.transition = transition,
                 .num_sequences = 1,
                 .groups = kGroups,
                 .heads = kHeads,
                 .key_size = kKeys,
                 .value_size = kValues};
  HostState start(spec);
  const int levels = NumLevels(position + kStateChunk);
  {
    Problem prefill(1, position, transition, levels);
    start.Reserve(position + kStateChunk);
    fenwick::Forward(prefill.inputs, prefill.Output(), start.View(), Context());
  }
  Problem token(1, 1, transition, levels);
  const Context context{.num_threads = 1};
  NaiveRecurrence recurrence(transition, levels);
  std::vector<double> times[kStateChunk], naive_times[kStateChunk];
  for (auto _ : state) {
    HostState host = start.Select(std::vector<std::int64_t>{0});
    double seconds = 0;
    for (int i = 0; i < kStateChunk; ++i) {
      token.inputs.initial_state = host.View();
      const double begin = CpuSeconds();
      fenwick::Step(token.inputs, token.Output(), context);
      times[i].push_back(CpuSeconds() - begin);
      seconds += times[i].back();
    }
    for (int i = 0; i < kStateChunk; ++i) {
      const double begin = CpuSeconds();
      recurrence.Step(token, position + i);
      naive_times[i].push_back(CpuSeconds() - begin);
    }
    state.SetIterationTime(seconds);
  }
  const auto medians = [](const std::vector<double>(&samples)[kStateChunk]) {
    std::vector<double> result;
    for (const std::vector<double>& x : samples) result.push_back(Median(x) * 1e6);
    return result;
  };
  const std::vector<double> step = medians(times), naive = medians(naive_times);
  const auto mean = [](const std::vector<double>& x) {
    return std::accumulate(x.begin(), x.end(), 0.0) / static_cast<double>(x.size());
  };
  state.counters["step_us"] = mean(step);
  state.counters["naive_us"] = mean(naive);
  state.counters["median_us"] = Median(step);
  state.counters["naive_median_us"] = Median(naive);
  state.counters["fold_us"] = *std::max_element(step.begin(), step.end());
  state.counters["state_kb"] = static_cast<double>(start.bytes()) / 1024;
}

std::int64_t FromEnvironment(const char* name, std::int64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atoll(text) : otherwise;
}

std::string CpuName() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

void Register() {
  const std::int64_t longest = FromEnvironment("FENWICK_BENCH_MAX_T", std::int64_t{1} << 20);
  const std::int64_t longest_backward =
      FromEnvironment("FENWICK_BENCH_MAX_T_BACKWARD", std::int64_t{1} << 18);
  const auto add = [](const std::string& name, auto&& f, Transition transition, std::int64_t size) {
    // Enough runs for a median where a call is short.
    const std::int64_t runs = std::clamp<std::int64_t>((std::int64_t{1} << 18) / size, 3, 25);
    benchmark::RegisterBenchmark(name.c_str(), f, transition)
        ->Arg(size)
        ->UseManualTime()
        ->Iterations(runs)
        ->Unit(benchmark::kMillisecond);
  };
  for (std::int64_t t = 256; t <= longest; t *= 4) {
    add("scalar_gate/forward", Forward, Transition::kScalarGate, t);
    if (t <= longest_backward) add("scalar_gate/backward", Backward, Transition::kScalarGate, t);
    if (t <= longest_backward) add("gated_delta/forward", Forward, Transition::kGatedDelta, t);
    if (t <= longest_backward) add("gated_delta/backward", Backward, Transition::kGatedDelta, t);
  }
  // The first chunk after a power of two, where many nodes have just become one, and the next.
  for (const std::int64_t position : {0, 128, 1024, 16384, 16448, 262144, 262208}) {
    for (const Transition transition : {Transition::kScalarGate, Transition::kGatedDelta}) {
      benchmark::RegisterBenchmark(
          transition == Transition::kScalarGate ? "scalar_gate/step" : "gated_delta/step", Step,
          transition)
          ->Arg(position)
          ->UseManualTime()
          ->Iterations(25)
          ->Unit(benchmark::kMicrosecond);
    }
  }
}

}  // namespace
}  // namespace fenwick::bench

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  benchmark::AddCustomContext("commit", FENWICK_COMMIT);
  benchmark::AddCustomContext("cpu", fenwick::bench::CpuName());
  benchmark::AddCustomContext("threads", std::to_string(fenwick::bench::kThreads));
  fenwick::bench::Register();
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
