// Tensors on a device inside poisoned buffers, copied from and to the reference's doubles.
#pragma once

#include <cstdint>
#include <vector>

#include "reference/reference.h"
#include "support/memory.h"

namespace fenwick::support {

enum class Layout {
  kContiguous,
  kPadded,  // rows on 32-byte boundaries with a gap after each row and each outer axis
  kRagged,  // a first element and strides that no vector load divides
};

// Everything in the buffer that is not an element is 0xff bytes: NaN in every floating type, and
// checkable. Elements start as NaN too.
class DeviceTensor {
 public:
  DeviceTensor() = default;  // not given
  DeviceTensor(Device device, DType dtype, const std::vector<std::int64_t>& sizes,
               Layout layout = Layout::kContiguous);
  // With the values of `values`, rounded to dtype; not given where it is not.
  DeviceTensor(Device device, DType dtype, const reference::Tensor& values,
               Layout layout = Layout::kContiguous);

  const TensorView& view() const { return view_; }
  Device device() const { return buffer_[0].device(); }
  reference::Tensor Values() const;
  // True while no byte outside the elements has been written.
  bool PoisonIntact() const;

 private:
  template <typename F>
  void ForEachElement(F&& f) const;  // f(flat index, offset in elements from the buffer's start)

  TensorView view_;
  std::int64_t first_ = 0;          // offset of the first element in the buffer
  std::vector<Allocation> buffer_;  // one, or none where not given
};

// The int64 vectors of a state.
DeviceTensor Int64Tensor(Device device, const std::vector<std::int64_t>& values);
std::vector<std::int64_t> Int64Values(const DeviceTensor& tensor);

}  // namespace fenwick::support
