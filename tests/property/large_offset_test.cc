// Element offsets past 2^31: few tokens spread over a huge block of address space, of which only
// the touched pages exist.
#include <sys/mman.h>

#include "fenwick/ops.h"
#include "property/property.h"
#include "support/element.h"

namespace fenwick {
namespace {

using reference::Tensor;
using support::ProblemSpec;
using testing::ExpectClose;
using testing::NextSeed;

FENWICK_PROPERTY_SUITE(LargeOffsetTest);

constexpr std::int64_t kTokenStride = std::int64_t{1} << 26;  // elements: token 32 is at 2^31

class HugeBlock {
 public:
  explicit HugeBlock(std::size_t bytes)
      : bytes_(bytes),
        data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~HugeBlock() {
    if (data_ != MAP_FAILED) munmap(data_, bytes_);
  }
  bool ok() const { return data_ != MAP_FAILED; }
  float* at(std::int64_t element) const { return static_cast<float*>(data_) + element; }

 private:
  std::size_t bytes_;
  void* data_;
};

// A view of x's shape with its tokens kTokenStride apart, starting `first` elements into the block.
class SpreadTensor {
 public:
  SpreadTensor(const HugeBlock& block, std::int64_t first, const std::vector<std::int64_t>& sizes) {
    view_.data = block.at(first);
    view_.rank = static_cast<int>(sizes.size());
    std::int64_t stride = 1;
    for (int i = view_.rank - 1; i >= 0; --i) {
      view_.sizes[i] = sizes[i];
      view_.strides[i] = stride;
      stride *= sizes[i];
    }
    view_.strides[1] = kTokenStride;
  }

  void Set(const Tensor& x) {
    ForEach([&](std::int64_t i, std::int64_t offset) {
      support::StoreElement(view_.data, DType::kFloat32, offset, x.data[i]);
    });
  }
  Tensor Values() const {
    Tensor x(std::vector<std::int64_t>(view_.sizes.begin(), view_.sizes.begin() + view_.rank));
    ForEach([&](std::int64_t i, std::int64_t offset) {
      x.data[i] = support::LoadElement(view_.data, DType::kFloat32, offset);
    });
    return x;
  }
  const TensorView& view() const { return view_; }

 private:
  template <typename F>
  void ForEach(F&& f) const {
    for (std::int64_t i = 0; i < view_.num_elements(); ++i) {
      std::int64_t rest = i, offset = 0;
      for (int axis = view_.rank - 1; axis >= 0; --axis) {
        offset += rest % view_.size(axis) * view_.stride(axis);
        rest /= view_.size(axis);
      }
      f(i, offset);
    }
  }

  TensorView view_;
};

TEST_P(LargeOffsetTest, TokensPast2To31Elements) {
  if (GetParam().device != Device::kCPU)
    GTEST_SKIP() << "address space without memory is the host's";
  FENWICK_REQUIRE_KERNEL(kForward);
  ProblemSpec spec = Spec();
  spec.T = 70;
  spec.H = 2;
  spec.K = 8;
  spec.V = 8;
  const support::Problem problem = support::RandomProblem(spec, NextSeed());
  const reference::Arguments& a = problem.arguments;
  const HugeBlock block(static_cast<std::size_t>(spec.T) * kTokenStride * sizeof(float));
  if (!block.ok()) GTEST_SKIP() << "no address space of " << spec.T << " * 256 MiB";
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
  Forward(inputs, o.view(), {}, {});
  const double tolerance = support::Tolerance(spec.options, spec.T, false);
  ExpectClose("o", o.Values(), reference::Forward(a).o, tolerance);

  if (!testing::HasKernel(GetParam(), testing::Operation::kBackward)) return;
  const SpreadTensor d_o = spread(7, problem.d_o);
  const SpreadTensor dq(block, 8 * 64, a.q.sizes), dk(block, 9 * 64, a.k.sizes),
      dv(block, 10 * 64, a.v.sizes), dg(block, 11 * 64, a.g.sizes),
      dscales(block, 12 * 64, a.level_scales.sizes);
  Backward(inputs, d_o.view(), {},
           {.q = dq.view(),
            .k = dk.view(),
            .v = dv.view(),
            .g = dg.view(),
            .level_scales = dscales.view()},
           {});
  const auto expected = reference::Backward(a, problem.d_o);
  ExpectClose("dq", dq.Values(), expected.q, tolerance);
  ExpectClose("dk", dk.Values(), expected.k, tolerance);
  ExpectClose("dv", dv.Values(), expected.v, tolerance);
  ExpectClose("dg", dg.Values(), expected.g, tolerance);
  ExpectClose("dlevel_scales", dscales.Values(), expected.level_scales, tolerance);
}

}  // namespace
}  // namespace fenwick
