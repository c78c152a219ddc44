// The layers on CUDA.
#include "support/layer_cases.h"

namespace fenwick {
namespace {

class CudaLayers : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!DeviceAvailable(Device::kCUDA)) GTEST_SKIP() << "no CUDA device";
  }
};

TEST_F(CudaLayers, CausalConv) { testing::CheckCausalConv(Device::kCUDA); }
TEST_F(CudaLayers, GatedRmsNorm) { testing::CheckGatedRmsNorm(Device::kCUDA); }
TEST_F(CudaLayers, L2Norm) { testing::CheckL2Norm(Device::kCUDA); }

}  // namespace
}  // namespace fenwick
