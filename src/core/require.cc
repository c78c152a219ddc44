// Checks shared by every public call; see require.h.
#include "core/require.h"

#include <algorithm>

namespace fenwick {
namespace {

constexpr std::uintptr_t kWorkspaceAlignment = 256;

}  // namespace

void Fail(const std::string& name, const std::string& expected, const std::string& got) {
  throw Error(name + ": expected " + expected + ", got " + got);
}

std::string ShapeText(std::initializer_list<std::int64_t> sizes) {
  std::string text = "[";
  for (std::int64_t size : sizes) {
    if (text.size() > 1) text += ", ";
    text += size == kAnySize ? "*" : std::to_string(size);
  }
  return text + "]";
}

std::string ShapeText(const TensorView& view) {
  std::string text = "[";
  for (int i = 0; i < std::min(view.rank, kMaxRank); ++i)
    text += (i ? ", " : "") + std::to_string(view.size(i));
  return text + "]";
}

void RequireGiven(const std::string& name, const TensorView& view) {
  if (!view.given()) Fail(name, "a tensor", "none");
  if (view.rank > kMaxRank)
    Fail(name, "at most " + std::to_string(kMaxRank) + " axes", std::to_string(view.rank));
}

void RequireNotGiven(const std::string& name, const TensorView& view, const char* when) {
  if (view.given()) Fail(name, std::string("none ") + when, "a tensor " + ShapeText(view));
}

void RequireShape(const std::string& name, const char* axes, const TensorView& view,
                  std::initializer_list<std::int64_t> sizes) {
  RequireGiven(name, view);
  bool same = view.rank == static_cast<int>(sizes.size());
  for (int i = 0; same && i < view.rank; ++i) {
    const std::int64_t expected = sizes.begin()[i];
    same = expected == kAnySize ? view.size(i) >= 0 : view.size(i) == expected;
  }
  if (!same) Fail(name, "shape " + std::string(axes) + " = " + ShapeText(sizes), ShapeText(view));
}

void RequireDType(const std::string& name, const TensorView& view, DType expected) {
  if (view.dtype != expected) Fail(name, DTypeName(expected), DTypeName(view.dtype));
}

void RequireFloating(const std::string& name, DType dtype) {
  if (static_cast<int>(dtype) > static_cast<int>(DType::kFloat64)) {
    Fail(name, "float32, bfloat16, float16 or float64", DTypeName(dtype));
  }
}

void RequireMemory(const std::string& name, const TensorView& view) {
  if (view.num_elements() == 0) return;
  const int last = view.rank - 1;
  if (last >= 0 && view.size(last) > 1 && view.stride(last) != 1) {
    Fail(name, "stride 1 on the last axis", std::to_string(view.stride(last)));
  }
  if (view.data == nullptr) Fail(name, "data", "a null pointer");
}

void RequireContiguous(const std::string& name, const TensorView& view) {
  if (view.num_elements() == 0) return;  // strides mean nothing, as in a state without slots
  std::int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    if (view.num_elements() > 0 && view.size(i) > 1 && view.stride(i) != stride) {
      Fail(name, "a contiguous tensor",
           "stride " + std::to_string(view.stride(i)) + " on axis " + std::to_string(i) +
               " of shape " + ShapeText(view));
    }
    stride *= view.size(i);
  }
  RequireMemory(name, view);
}

void RequireDistinctElements(const std::string& name, const TensorView& view) {
  if (view.num_elements() == 0) return;
  for (int i = 0; i < view.rank; ++i) {
    if (view.size(i) > 1 && view.stride(i) == 0) {
      Fail(name, "distinct elements (it is written)", "stride 0 on axis " + std::to_string(i));
    }
  }
}

DType WideType(DType storage) {
  return storage == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

void RequireStorageOrWide(const std::string& name, const TensorView& view, DType storage) {
  if (view.dtype == storage || view.dtype == WideType(storage)) return;
  std::string expected = DTypeName(storage);
  if (WideType(storage) != storage) expected += std::string(" or ") + "float32";
  Fail(name, expected, DTypeName(view.dtype));
}

void RequireSequences(std::span<const std::int64_t> cu, std::int64_t batch, std::int64_t tokens) {
  if (cu.empty()) return;
  if (batch != 1) Fail("cu_seqlens", "none unless B = 1", "B = " + std::to_string(batch));
  if (cu.front() != 0) Fail("cu_seqlens[0]", "0", std::to_string(cu.front()));
  for (std::size_t i = 1; i < cu.size(); ++i) {
    if (cu[i] < cu[i - 1]) {
      Fail("cu_seqlens[" + std::to_string(i) + "]",
           "at least its predecessor " + std::to_string(cu[i - 1]), std::to_string(cu[i]));
    }
  }
  if (cu.back() != tokens) {
    Fail("cu_seqlens[" + std::to_string(cu.size() - 1) + "]", "T = " + std::to_string(tokens),
         std::to_string(cu.back()));
  }
}

void RequireWorkspace(const Context& context, std::size_t needed) {
  if (context.device == Device::kCPU || needed == 0) return;
  if (context.workspace == nullptr || context.workspace_bytes < needed) {
    throw Error("workspace: expected " + std::to_string(needed) + " bytes, got " +
                std::to_string(context.workspace ? context.workspace_bytes : 0));
  }
  if (reinterpret_cast<std::uintptr_t>(context.workspace) % kWorkspaceAlignment != 0) {
    throw Error("workspace: expected an address aligned to 256 bytes, got one that is not");
  }
}

void RequireThreads(const char* name, int num_threads) {
  if (num_threads < 0) {
    throw Error(std::string(name) + ": expected 0 (the default) or more, got " +
                std::to_string(num_threads));
  }
}

}  // namespace fenwick
