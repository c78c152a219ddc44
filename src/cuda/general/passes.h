// What every call of the general kernels shares: its plan and problem, and passes of whole q/k
// groups of heads that use the same workspace one after the other.
//
// `take(arena, plan, heads)` lays out the buffers of a pass of `heads` heads and returns them; on
// an arena without memory it tells what they need.
#pragma once

#include <algorithm>

#include "cuda/general/call.h"

namespace fenwick::cuda::general {

template <typename Take>
std::int64_t PassGroups(const Plan& plan, const Take& take) {
  return GroupsPerPass(plan, [&](std::int64_t groups) {
    Arena arena;
    take(arena, plan, groups * plan.heads_per_group());
    return arena.used();
  });
}

// Workspace of a call.
template <typename Take>
std::size_t CallBytes(const Inputs& inputs, const Take& take) {
  const Plan plan = MakePlan(inputs);
  Arena arena;
  TakeTables(arena, plan);
  take(arena, plan, PassGroups(plan, take) * plan.heads_per_group());
  return arena.used();
}

struct Call {
  Call(const Inputs& inputs, const Context& context)
      : plan(MakePlan(inputs)),
        stream(static_cast<cudaStream_t>(context.stream)),
        arena(context.workspace) {
    const Tables tables = TakeTables(arena, plan);
    UploadTables(plan, tables, stream);
    problem = MakeProblem(inputs, plan, tables);
  }

  // run(buffers) for each pass, with `problem` set to the pass's heads.
  template <typename Take, typename Run>
  void ForEachPass(const Take& take, const Run& run) {
    const std::int64_t groups = PassGroups(plan, take);
    for (std::int64_t begin = 0; begin < plan.G; begin += groups) {
      SetPass(problem, begin, std::min(groups, plan.G - begin));
      Arena pass = arena;
      run(take(pass, plan, problem.heads));
    }
  }

  Plan plan;
  cudaStream_t stream;
  Arena arena;  // behind the tables
  Problem problem;
};

}  // namespace fenwick::cuda::general
