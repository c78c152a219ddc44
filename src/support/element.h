// Single elements of a tensor in memory as doubles; not for hot loops.
#pragma once

#include <cstdint>

#include "fenwick/tensor_view.h"

namespace fenwick::support {

double LoadElement(const void* data, DType dtype, std::int64_t index);
// Rounds to nearest, ties to even.
void StoreElement(void* data, DType dtype, std::int64_t index, double value);
// `value` as it comes back from storage.
double Rounded(DType dtype, double value);

}  // namespace fenwick::support
