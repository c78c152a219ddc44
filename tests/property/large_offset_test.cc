// Element offsets past 2^31: few tokens spread over a huge block; on the host one of address space,
// of which only the touched pages exist.
#include <sys/mman.h>

#include "fenwick/ops.h"
#include "property/property.h"

namespace fenwick {
namespace {

using reference::Tensor;
using support::ProblemSpec;
using support::RunOptions;
using testing::ExpectClose;
using testing::NextSeed;

FENWICK_PROPERTY_SUITE(LargeOffsetTest);

constexpr std::int64_t kTokenStride = std::int64_t{1} << 26;  // elements: token 32 is at 2^31

// Address space on the host, memory on a device.
class HugeBlock {
 public:
  HugeBlock(Device device, std::size_t bytes) : device_(device), bytes_(bytes) {
    if (device == Device::kCPU) {
      void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      data_ = data == MAP_FAILED ? nullptr : static_cast<float*>(data);
    } else {
      try {
        data_ = static_cast<float*>(support::MemoryOf(device).Allocate(bytes));
      } catch (const Error&) {
        data_ = nullptr;
      }
    }
  }
  ~HugeBlock() {
    if (data_ == nullptr) return;
    if (device_ == Device::kCPU) {
      munmap(data_, bytes_);
    } else {
      support::MemoryOf(device_).Free(data_);
    }
  }
  HugeBlock(const HugeBlock&) = delete;
  HugeBlock& operator=(const HugeBlock&) = delete;

  float* data() const { return data_; }  // null where there is no such block
  Device device() const { return device_; }

 private:
  Device device_;
  std::size_t bytes_;
  float* data_;
};

// A float32 tensor [1, T, ...] whose tokens lie kTokenStride apart, `first` elements into the
// block.
class SpreadTensor {
 public:
  SpreadTensor(const HugeBlock& block, std::int64_t first, const std::vector<std::int64_t>& sizes)
      : device_(block.device()) {
    view_.data = block.data() + first;
    view_.rank = static_cast<int>(sizes.size());
    for (int i = view_.rank - 1; i >= 0; --i) {
      view_.sizes[i] = sizes[i];
      view_.strides[i] = row_;
      if (i >= 2) row_ *= sizes[i];
    }
    view_.strides[1] = kTokenStride;
  }

  void Set(const Tensor& x) const {
    std::vector<float> row(row_);
    for (std::int64_t t = 0; t < view_.size(1); ++t) {
      for (std::int64_t i = 0; i < row_; ++i) row[i] = static_cast<float>(x.data[t * row_ + i]);
      support::MemoryOf(device_).CopyIn(RowData(t), row.data(), row_ * sizeof(float));
    }
  }
  Tensor Values() const {
    Tensor x(std::vector<std::int64_t>(view_.sizes.begin(), view_.sizes.begin() + view_.rank));
    std::vector<float> row(row_);
    for (std::int64_t t = 0; t < view_.size(1); ++t) {
      support::MemoryOf(device_).CopyOut(row.data(), RowData(t), row_ * sizeof(float));
      std::copy(row.begin(), row.end(), x.data.begin() + t * row_);
    }
    return x;
  }
  const TensorView& view() const { return view_; }

 private:
  float* RowData(std::int64_t t) const {
    return static_cast<float*>(view_.data) + t * kTokenStride;
  }

  Device device_;
  TensorView view_;
  std::int64_t row_ = 1;  // elements of a token
};

TEST_P(LargeOffsetTest, TokensPast2To31Elements) {
  ProblemSpec spec = Spec();
  spec.T = 70;
  spec.H = 2;
  spec.K = 8;
  spec.V = 8;
  const support::Problem problem = support::RandomProblem(spec, NextSeed());
  const reference::Arguments& a = problem.arguments;
  const HugeBlock block(GetParam().device,
                        static_cast<std::size_t>(spec.T) * kTokenStride * sizeof(float));
  if (block.data() == nullptr) GTEST_SKIP() << "no block of " << spec.T << " * 256 MiB";
  // All tensors lie in the same pages, 64 elements apart.
  const auto spread = [&](int slot, const Tensor& x) {
    SpreadTensor tensor(block, slot * 64, x.sizes);
    tensor.Set(x);
    return tensor;
  };
  const SpreadTensor q = spread(0, a.q), k = spread(1, a.k), v = spread(2, a.v), g = spread(3, a.g);
  const SpreadTensor scales = spread(4, a.level_scales);
  const SpreadTensor o(block, 5 * 64, a.v.sizes);
  Inputs inputs{.transition = spec.transition,
                .q = q.view(),
                .k = k.view(),
                .v = v.view(),
                .g = g.view(),
                .level_scales = scales.view()};
  if (a.beta.given()) inputs.beta = spread(6, a.beta).view();
  const RunOptions& options = spec.options;
  const auto forward_workspace =
      support::PoisonedWorkspace(ForwardWorkspaceBytes(inputs, {}, options.device), options);
  Forward(inputs, o.view(), {}, support::ContextFor(options, forward_workspace));
  support::MemoryOf(options.device).Synchronize();
  const double tolerance = support::Tolerance(spec.options, spec.T, false);
  ExpectClose("o", o.Values(), reference::Forward(a).o, tolerance);

  const SpreadTensor d_o = spread(7, problem.d_o);
  const SpreadTensor dq(block, 8 * 64, a.q.sizes), dk(block, 9 * 64, a.k.sizes),
      dv(block, 10 * 64, a.v.sizes), dg(block, 11 * 64, a.g.sizes),
      dscales(block, 12 * 64, a.level_scales.sizes);
  const SpreadTensor dbeta(block, 13 * 64, a.g.sizes);
  Gradients gradients{.q = dq.view(),
                      .k = dk.view(),
                      .v = dv.view(),
                      .g = dg.view(),
                      .level_scales = dscales.view()};
  if (a.beta.given()) gradients.beta = dbeta.view();
  const auto workspace = support::PoisonedWorkspace(
      BackwardWorkspaceBytes(inputs, {}, gradients, options.device), options);
  Backward(inputs, d_o.view(), {}, gradients, support::ContextFor(options, workspace));
  support::MemoryOf(options.device).Synchronize();
  const auto expected = reference::Backward(a, problem.d_o);
  ExpectClose("dq", dq.Values(), expected.q, tolerance);
  ExpectClose("dk", dk.Values(), expected.k, tolerance);
  ExpectClose("dv", dv.Values(), expected.v, tolerance);
  ExpectClose("dg", dg.Values(), expected.g, tolerance);
  if (a.beta.given()) ExpectClose("dbeta", dbeta.Values(), expected.beta, tolerance);
  ExpectClose("dlevel_scales", dscales.Values(), expected.level_scales, tolerance);
}

}  // namespace
}  // namespace fenwick
