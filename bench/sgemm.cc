// A blocked product over the library's microkernel: panels of B are packed so that they stay in the
// first-level cache, blocks of A in the second. On one AVX2 core it reaches what OpenBLAS does
// within a few percent (docs/performance-cpu.md).
#include "sgemm.h"

#include <chrono>
#include <cstdint>
#include <vector>

#include "core/thread_pool.h"
#include "cpu/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "sgemm.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "cpu/tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fenwick::cpu {
namespace HWY_NAMESPACE {

inline constexpr int64_t kSgemmSize = 1024;

// Rows [begin, end) of C = A B; `packed` [kDepthBlock, 2 vectors].
void SgemmRows(int64_t begin, int64_t end, const float* a, const float* b, float* c, int64_t ld,
               float* packed) {
  const hn::ScalableTag<float> d;
  const int64_t width = 2 * static_cast<int64_t>(hn::Lanes(d));
  for (int64_t p = 0; p < kSgemmSize; p += kDepthBlock) {
    for (int64_t j = 0; j < kSgemmSize; j += width) {
      for (int64_t i = 0; i < kDepthBlock; ++i) {
        std::copy_n(b + (p + i) * ld + j, width, packed + i * width);
      }
      Panel<2, Op::kNone>(d, end - begin, kDepthBlock, a + begin * ld + p, ld, packed, width,
                          c + begin * ld + j, ld, Epilogue<float>{.beta = p == 0 ? 0.0f : 1.0f});
    }
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fenwick::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fenwick::cpu {
HWY_EXPORT(SgemmRows);
void RunSgemmRows(int64_t begin, int64_t end, const float* a, const float* b, float* c, int64_t ld,
                  float* packed) {
  HWY_DYNAMIC_DISPATCH(SgemmRows)(begin, end, a, b, c, ld, packed);
}
}  // namespace fenwick::cpu

namespace fenwick::bench {

double SgemmRate(int num_threads) {
  constexpr std::int64_t kSize = 1024;
  constexpr std::int64_t kRows = 96;  // of A in one block: 96 KB at a depth of 256
  const std::int64_t ld = cpu::TileLd<float>(kSize);
  static const std::vector<float> a(kSize * ld, 1.0f), b(kSize * ld, 0.5f);
  static std::vector<float> c(kSize * ld);
  const auto start = std::chrono::steady_clock::now();
  ParallelFor((kSize + kRows - 1) / kRows, num_threads, [&](std::int64_t i, int) {
    alignas(64) float packed[256 * 32];
    cpu::RunSgemmRows(i * kRows, std::min(kSize, (i + 1) * kRows), a.data(), b.data(), c.data(), ld,
                      packed);
  });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  return kSgemmFlops / seconds.count();
}

}  // namespace fenwick::bench
#endif  // HWY_ONCE
