// Scratch memory of a thread: a stack of aligned blocks that is kept between calls, so that a task
// of a few microseconds does not pay for an allocation.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fenwick::cpu {

// Memory taken through a Scratch lives until that Scratch is destroyed. Scopes of one thread nest.
class Scratch {
 public:
  Scratch();
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // `count` elements, aligned to kAlignment, not initialised.
  template <typename T>
  T* New(std::int64_t count) {
    return static_cast<T*>(Bytes(static_cast<std::size_t>(count) * sizeof(T)));
  }

  static constexpr std::size_t kAlignment = 128;  // two cache lines, the widest vector twice

 private:
  void* Bytes(std::size_t bytes);

  std::size_t block_;  // where the stack stood when this scope began
  std::size_t offset_;
};

}  // namespace fenwick::cpu
