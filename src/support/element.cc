#include "support/element.h"

#include <bit>
#include <cmath>
#include <cstring>

namespace fenwick::support {
namespace {

double HalfToDouble(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  double value;
  if (exponent == 31) {
    value = fraction ? std::nan("") : HUGE_VAL;
  } else if (exponent == 0) {
    value = std::ldexp(fraction, -24);
  } else {
    value = std::ldexp(fraction + 1024, exponent - 25);
  }
  return bits & 0x8000 ? -value : value;
}

std::uint16_t DoubleToHalf(double value) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7e00;
  if (magnitude >= 65520.0) return sign | 0x7c00;  // rounds past the largest, 65504
  const int exponent = magnitude < 0x1p-14 ? -14 : std::ilogb(magnitude);
  // In units of the last place; a carry out of the fraction moves the exponent field up by one.
  const auto units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  return sign | static_cast<std::uint16_t>(((exponent + 14) << 10) + units);
}

std::uint16_t DoubleToBFloat16(double value) {
  if (std::isnan(value)) return 0x7fc0;
  const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(value));
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <typename T>
T Get(const void* data, std::int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + index * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
void Put(void* data, std::int64_t index, T value) {
  std::memcpy(static_cast<char*>(data) + index * sizeof(T), &value, sizeof(T));
}

}  // namespace

double LoadElement(const void* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::kFloat32: return Get<float>(data, index);
    case DType::kFloat64: return Get<double>(data, index);
    case DType::kFloat16: return HalfToDouble(Get<std::uint16_t>(data, index));
    case DType::kBFloat16:
      return std::bit_cast<float>(std::uint32_t{Get<std::uint16_t>(data, index)} << 16);
    case DType::kInt64: return static_cast<double>(Get<std::int64_t>(data, index));
  }
  return 0.0;
}

void StoreElement(void* data, DType dtype, std::int64_t index, double value) {
  switch (dtype) {
    case DType::kFloat32: return Put(data, index, static_cast<float>(value));
    case DType::kFloat64: return Put(data, index, value);
    case DType::kFloat16: return Put(data, index, DoubleToHalf(value));
    case DType::kBFloat16: return Put(data, index, DoubleToBFloat16(value));
    case DType::kInt64: return Put(data, index, static_cast<std::int64_t>(value));
  }
}

double Rounded(DType dtype, double value) {
  std::uint64_t storage = 0;
  StoreElement(&storage, dtype, 0, value);
  return LoadElement(&storage, dtype, 0);
}

}  // namespace fenwick::support
