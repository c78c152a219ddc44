// A random stream named by a key. What a batch holds depends on its key (seed, purpose, step) and
// on nothing else, so a run resumes at any step without a saved generator state.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace fenwick::tasks {

// What a stream is for: part of its key, so that no two uses ever share one.
enum class Stream : std::uint64_t { kTrain = 1, kEvaluation = 2, kSampling = 4, kVerify = 5 };

// SplitMix64 (Steele, Lea, Flood 2014): one 64-bit addition and a finaliser a number.
class Rng {
 public:
  Rng(std::uint64_t seed, Stream stream, std::uint64_t index = 0) {
    for (std::uint64_t word : {seed, static_cast<std::uint64_t>(stream), index}) {
      state_ = Mix(state_ ^ word);
    }
  }

  std::uint64_t Next() { return Mix(state_ += kGolden); }

  // Uniform in [0, 1).
  double Uniform() { return static_cast<double>(Next() >> 11) * 0x1p-53; }

  // Uniform in [0, n), n >= 1, without modulo bias.
  std::int64_t Below(std::int64_t n) {
    const std::uint64_t range = static_cast<std::uint64_t>(n);
    const std::uint64_t excess = (0 - range) % range;  // 2^64 mod n
    std::uint64_t x = Next();
    while (x < excess) x = Next();
    return static_cast<std::int64_t>(x % range);
  }

 private:
  static constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15;
  static std::uint64_t Mix(std::uint64_t z) {
    z += kGolden;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }

  std::uint64_t state_ = 0;
};

}  // namespace fenwick::tasks
