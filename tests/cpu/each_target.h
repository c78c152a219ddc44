// Runs a piece of a test once for every instruction set that was compiled and that the machine has.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>

#include "cpu/highway_targets.h"
#include "hwy/targets.h"

namespace fenwick::cpu {

// Calls f(name) with run-time dispatch fixed to each target in turn.
inline void ForEachTarget(const std::function<void(const char*)>& f) {
  int count = 0;
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    SCOPED_TRACE(hwy::TargetName(target));
    f(hwy::TargetName(target));
    ++count;
    hwy::SetSupportedTargetsForTest(0);
  }
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  EXPECT_GT(count, 0);
}

}  // namespace fenwick::cpu
