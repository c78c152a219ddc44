// Hands out pieces of the caller's workspace. Without memory it only counts, so that the code that
// lays buffers out also says how many bytes they need.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fenwick::cuda::general {

class Arena {
 public:
  Arena() = default;
  explicit Arena(void* memory) : memory_(static_cast<char*>(memory)) {}

  // `count` elements at a 256-byte boundary; null while counting.
  template <typename T>
  T* Take(std::int64_t count) {
    constexpr std::size_t kAlignment = 256;
    T* piece = memory_ ? reinterpret_cast<T*>(memory_ + used_) : nullptr;
    used_ +=
        (static_cast<std::size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return piece;
  }
  std::size_t used() const { return used_; }

 private:
  char* memory_ = nullptr;
  std::size_t used_ = 0;
};

}  // namespace fenwick::cuda::general
