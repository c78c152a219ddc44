// The operators: log-linear attention with a scalar gate (Mamba-2 / SSD) and the log-linear gated
// delta rule (Gated DeltaNet); docs/mathematics.md derives them.
//
//   o[t] = sum_{s<=t} level_scales[t, level(t,s)] * scale * q[t]^T A(t,s) w[s] v[s]^T
//     kScalarGate   A = exp(g[s+1] + ... + g[t]),                          w[s] = k[s]
//     kGatedDelta   A = prod_{r=s+1..t} exp(g[r]) (I - beta[r] k[r] k[r]^T), w[s] = beta[s] k[s]
//
// Every call: validate (throws Error, nothing touched) -> plan -> backend. All pointers live on
// Context::device. Axes: B batch, T tokens, G query/key groups, H value heads (head h reads group
// h / (H/G)), K key size, V value size, L levels, N sequences; K and V are 1 to kMaxHeadSize.
//
// Nothing is kept: memory, spans and structs may go when a call has returned (memory of the GPU:
// when the stream has passed the call). What a call writes must overlap neither its inputs nor
// other outputs; only states are checked for that. Calls may run at the same time on several
// threads: on the CPU one of them has the thread pool, the others work on their own thread, with
// the same results. Beside Error, the CPU's calls can throw std::bad_alloc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "fenwick/error.h"
#include "fenwick/partition.h"
#include "fenwick/state.h"
#include "fenwick/tensor_view.h"

namespace fenwick {

inline constexpr std::int64_t kMaxHeadSize = 512;

enum class Transition : std::uint8_t { kScalarGate, kGatedDelta };
enum class Device : std::uint8_t { kCPU, kCUDA };

// What to do when a sequence is longer than level_scales has levels for.
enum class LevelPolicy : std::uint8_t {
  kError,     // throw
  kSaturate,  // the last level absorbs all that is older
};

// Inputs of one call. Storage type: q, k, v, o share float32, bfloat16, float16 or float64.
// level_scales and beta have the storage type or float32. g is float32. With float64 storage every
// tensor is float64. Arithmetic and states are float32 (float64 for float64 storage).
struct Inputs {
  Transition transition = Transition::kScalarGate;
  TensorView q;             // [B, T, G, K]
  TensorView k;             // [B, T, G, K]
  TensorView v;             // [B, T, H, V]
  TensorView g;             // [B, T, H] log decay, <= 0, -inf allowed (a hard reset)
  TensorView beta;          // [B, T, H]; kGatedDelta only
  TensorView level_scales;  // [B, T, H, L]
  // Packed sequences, host memory: N + 1 offsets into T, first 0, last T, non-decreasing (empty
  // sequences allowed); needs B = 1. Empty span: N = B sequences of T tokens.
  std::span<const std::int64_t> cu_seqlens;
  double scale = 1.0;  // multiplies q
  LevelPolicy level_policy = LevelPolicy::kError;
  StateView initial_state;  // N sequences; not given: every sequence starts at position 0

  std::int64_t num_sequences() const {
    return cu_seqlens.empty() ? q.size(0) : static_cast<std::int64_t>(cu_seqlens.size()) - 1;
  }
};

// Where gradients go; shapes and types of the inputs they belong to, strides as for inputs. A view
// that is not given is not computed. All given outputs are overwritten.
struct Gradients {
  TensorView q, k, v, g, beta, level_scales;
  StateGradView initial_state;
};

// Where and with what a call runs.
struct Context {
  Device device = Device::kCPU;
  void* stream = nullptr;     // cudaStream_t; the current device is the caller's
  void* workspace = nullptr;  // device memory, 256-byte aligned; CPU calls may leave it null
  std::size_t workspace_bytes = 0;
  int num_threads = 0;  // CPU only; 0: SetNumThreads's value. Never changes a result.
};

// o [B, T, H, V]. final_state, where given, receives the state after the last token of every
// sequence: base[n] becomes NextBase(base, position), nodes needs NumSlots of the largest base
// (min(that, TopSlot(L) + 1) under kSaturate), all other slots are zero-filled. It must not overlap
// initial_state. Complexity O(T log T).
void Forward(const Inputs& inputs, const TensorView& o, const StateView& final_state,
             const Context& context);

// d_o [B, T, H, V]; d_final_state: gradient of the final state, may be not given. States are
// recomputed, nothing of the forward is needed.
void Backward(const Inputs& inputs, const TensorView& d_o, const StateGradView& d_final_state,
              const Gradients& gradients, const Context& context);

// Decoding: T new tokens, 1 <= T <= kStateChunk, for each of B sequences, each at its own position;
// `inputs.initial_state` is updated in place (position += T). cu_seqlens must be empty. On CUDA: no
// host synchronisation, one launch, capturable in a graph (positions are read on the device;
// capacity is checked against StateView::max_position + T).
void Step(const Inputs& inputs, const TensorView& o, const Context& context);

// Workspace that the calls above need for these shapes (0 on the CPU is allowed).
std::size_t ForwardWorkspaceBytes(const Inputs& inputs, const StateView& final_state,
                                  Device device);
std::size_t BackwardWorkspaceBytes(const Inputs& inputs, const StateGradView& d_final_state,
                                   const Gradients& gradients, Device device);

// Threads that CPU calls use; 0 restores the default (hardware concurrency).
void SetNumThreads(int num_threads);
int GetNumThreads();

// True where this build and machine have kernels for `device`.
bool DeviceAvailable(Device device);

}  // namespace fenwick
