#include "support/device_tensor.h"

#include <algorithm>
#include <cstring>

#include "support/element.h"

namespace fenwick::support {
namespace {

// Elements of poison after the last element, so that a vector load past it meets NaN and not only
// a sanitizer.
constexpr std::int64_t kTail = 64;

}  // namespace

DeviceTensor::DeviceTensor(Device device, DType dtype, const std::vector<std::int64_t>& sizes,
                           Layout layout) {
  const std::int64_t padded_multiple = 32 / ElementSize(dtype);
  view_.dtype = dtype;
  view_.rank = static_cast<int>(sizes.size());
  std::int64_t stride = 1;
  for (int i = view_.rank - 1; i >= 0; --i) {
    view_.sizes[i] = sizes[i];
    view_.strides[i] = stride;
    stride *= std::max<std::int64_t>(sizes[i], 1);
    if (layout == Layout::kPadded) {
      stride = (stride / padded_multiple + 1) * padded_multiple;
    } else if (layout == Layout::kRagged) {
      stride += 1 + stride % 2 * 2;
    }
  }
  first_ = layout == Layout::kRagged ? 3 : layout == Layout::kPadded ? padded_multiple : 0;
  const std::int64_t tail = layout == Layout::kContiguous ? 0 : kTail;
  const std::size_t bytes = (first_ + stride + tail) * ElementSize(dtype);
  buffer_.emplace_back(device, bytes);
  const std::vector<std::byte> poison(bytes, std::byte{0xff});
  MemoryOf(device).CopyIn(buffer_[0].data(), poison.data(), bytes);
  view_.data = buffer_[0].data() + first_ * ElementSize(dtype);
}

DeviceTensor::DeviceTensor(Device device, DType dtype, const reference::Tensor& values,
                           Layout layout) {
  if (!values.given()) return;
  *this = DeviceTensor(device, dtype, values.sizes, layout);
  std::vector<std::byte> host(buffer_[0].bytes(), std::byte{0xff});
  ForEachElement([&](std::int64_t index, std::int64_t offset) {
    StoreElement(host.data(), dtype, offset, values.data[index]);
  });
  MemoryOf(device).CopyIn(buffer_[0].data(), host.data(), host.size());
}

template <typename F>
void DeviceTensor::ForEachElement(F&& f) const {
  const std::int64_t count = view_.num_elements();
  for (std::int64_t index = 0; index < count; ++index) {
    std::int64_t rest = index, offset = first_;
    for (int i = view_.rank - 1; i >= 0; --i) {
      offset += rest % view_.size(i) * view_.stride(i);
      rest /= view_.size(i);
    }
    f(index, offset);
  }
}

reference::Tensor DeviceTensor::Values() const {
  if (!view_.given()) return {};
  reference::Tensor values(
      std::vector<std::int64_t>(view_.sizes.begin(), view_.sizes.begin() + view_.rank));
  std::vector<std::byte> host(buffer_[0].bytes());
  MemoryOf(buffer_[0].device()).CopyOut(host.data(), buffer_[0].data(), host.size());
  ForEachElement([&](std::int64_t index, std::int64_t offset) {
    values.data[index] = LoadElement(host.data(), view_.dtype, offset);
  });
  return values;
}

bool DeviceTensor::PoisonIntact() const {
  if (!view_.given()) return true;
  const int element = ElementSize(view_.dtype);
  std::vector<std::byte> host(buffer_[0].bytes());
  MemoryOf(buffer_[0].device()).CopyOut(host.data(), buffer_[0].data(), host.size());
  ForEachElement([&](std::int64_t, std::int64_t offset) {
    std::memset(host.data() + offset * element, 0xff, element);
  });
  for (const std::byte b : host) {
    if (b != std::byte{0xff}) return false;
  }
  return true;
}

DeviceTensor Int64Tensor(Device device, const std::vector<std::int64_t>& values) {
  DeviceTensor tensor(device, DType::kInt64, {static_cast<std::int64_t>(values.size())});
  MemoryOf(device).CopyIn(tensor.view().data, values.data(), values.size() * sizeof(values[0]));
  return tensor;
}

std::vector<std::int64_t> Int64Values(const DeviceTensor& tensor) {
  std::vector<std::int64_t> values(tensor.view().size(0));
  MemoryOf(tensor.device())
      .CopyOut(values.data(), tensor.view().data, values.size() * sizeof(values[0]));
  return values;
}

}  // namespace fenwick::support
