// Host side of a call: from the views of ops.h to the kernels' Problem, pass by pass.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/general/arena.h"
#include "cuda/general/plan.h"
#include "cuda/general/problem.cuh"
#include "fenwick/ops.h"

namespace fenwick::cuda::general {

// Tables of packed sequences in device memory.
struct Tables {
  std::int64_t* token_begin = nullptr;  // [N + 1]
  std::int64_t* chunk_begin = nullptr;  // [N + 1]
};
Tables TakeTables(Arena& arena, const Plan& plan);
// Copies the tables through kernel parameters: no host memory has to outlive the call, and the
// copy can be captured in a graph.
void UploadTables(const Plan& plan, const Tables& tables, cudaStream_t stream);

Rows MakeRows(const TensorView& view);  // [B, T, heads, width] or [B, T, heads]

// All but the heads of a pass.
Problem MakeProblem(const Inputs& inputs, const Plan& plan, const Tables& tables);
void SetPass(Problem& problem, std::int64_t group_begin, std::int64_t groups);

// Where the gradient of a token tensor goes: to the call's, and for ring tokens to the initial
// state's, which is zeroed first. Any of the views may be not given.
TokenGradients MakeGradients(const TensorView& call, const TensorView& ring,
                             const TensorView& d_final_ring, cudaStream_t stream);

// Writes position, base, and the ring of the final state (final_state.cu).
void WriteFinalRing(const Problem& problem, const StateView& final_state, cudaStream_t stream);

}  // namespace fenwick::cuda::general
