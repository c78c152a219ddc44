// The layers on the CPU, on every instruction set.
#include "each_target.h"
#include "support/layer_cases.h"

namespace fenwick::cpu {
namespace {

TEST(CpuLayers, CausalConv) {
  ForEachTarget([](const char*) { testing::CheckCausalConv(Device::kCPU); });
}
TEST(CpuLayers, GatedRmsNorm) {
  ForEachTarget([](const char*) { testing::CheckGatedRmsNorm(Device::kCPU); });
}
TEST(CpuLayers, L2Norm) {
  ForEachTarget([](const char*) { testing::CheckL2Norm(Device::kCPU); });
}

}  // namespace
}  // namespace fenwick::cpu
