// The public operators run on values of the reference: copied to a device in a storage type and
// layout, run, and copied back. Values that were rounded to the storage type stay bit for bit.
#pragma once

#include <cstdint>
#include <vector>

#include "reference/reference.h"
#include "support/device_tensor.h"

namespace fenwick::support {

struct RunOptions {
  Device device = Device::kCPU;
  DType dtype = DType::kFloat32;         // q, k, v, o
  DType beta_dtype = DType::kFloat32;    // dtype or float32 (float64)
  DType scales_dtype = DType::kFloat32;  // dtype or float32 (float64)
  Layout layout = Layout::kContiguous;
  int num_threads = 0;
  int spare_slots = 0;      // node slots beyond those needed, in states that a call writes
  bool final_state = true;  // that RunForward asks for one

  DType wide_dtype() const { return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }
};

// All three throw Error where a call touched a byte outside the elements that it may write.
reference::Result RunForward(const reference::Arguments& arguments, const RunOptions& options);
// Bits of `wanted`, lowest first: gradients of q, k, v, g, beta, level_scales, initial_state.
reference::Gradients RunBackward(const reference::Arguments& arguments,
                                 const reference::Tensor& d_o,
                                 const reference::State& d_final_state, const RunOptions& options,
                                 unsigned wanted = ~0u);
// Step by step from arguments.initial_state (or from empty states), step_sizes[i] tokens at a time;
// they sum to T.
reference::Result RunSteps(const reference::Arguments& arguments,
                           const std::vector<std::int64_t>& step_sizes, const RunOptions& options);

// For calls of one's own: a workspace of NaN, and the context that names it.
Allocation PoisonedWorkspace(std::size_t bytes, const RunOptions& options);
Context ContextFor(const RunOptions& options, const Allocation& workspace);

// A state on a device, with room for `min_slots` node slots at least. Ring slots that hold no token
// are poisoned.
class DeviceState {
 public:
  DeviceState() = default;  // not given
  DeviceState(const reference::State& values, std::int64_t min_slots, const RunOptions& options);

  StateView View(std::int64_t max_position) const;
  StateGradView GradView() const;
  reference::State Values() const;  // ring slots that hold no token are zero

 private:
  DeviceTensor k_, v_, g_, beta_, nodes_, position_, base_;
};

// Empty states for the sequences of `arguments`, without slots.
reference::State EmptyState(const reference::Arguments& arguments);
// Node slots that the state after the call needs.
std::int64_t FinalSlots(const reference::Arguments& arguments);

// Indices [begin, end) of one axis, and the opposite.
reference::Tensor Slice(const reference::Tensor& x, int axis, std::int64_t begin, std::int64_t end);
reference::Tensor Concatenate(const std::vector<reference::Tensor>& parts, int axis);
// Tokens [begin, end) of every tensor; packing and initial state are left out.
reference::Arguments SliceTokens(const reference::Arguments& a, std::int64_t begin,
                                 std::int64_t end);
// Row b alone, with its initial state.
reference::Arguments SliceRow(const reference::Arguments& a, std::int64_t b);
reference::State SliceState(const reference::State& state, std::int64_t begin, std::int64_t end);

}  // namespace fenwick::support
