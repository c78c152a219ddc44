// Checks that every public call makes of its arguments. Each throws Error with a message that names
// the argument, what was expected and what came.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "fenwick/ops.h"

namespace fenwick {

inline constexpr std::int64_t kAnySize = -1;  // in RequireShape

[[noreturn]] void Fail(const std::string& name, const std::string& expected,
                       const std::string& got);

// "[2, 3, *]"
std::string ShapeText(std::initializer_list<std::int64_t> sizes);
std::string ShapeText(const TensorView& view);

// With a rank that its sizes have room for.
void RequireGiven(const std::string& name, const TensorView& view);
// `when` goes on from "expected none".
void RequireNotGiven(const std::string& name, const TensorView& view, const char* when);
// `axes` names the sizes in the message, e.g. "[B, T, G, K]".
void RequireShape(const std::string& name, const char* axes, const TensorView& view,
                  std::initializer_list<std::int64_t> sizes);
void RequireDType(const std::string& name, const TensorView& view, DType expected);
void RequireFloating(const std::string& name, DType dtype);
// Stride 1 on the last axis and memory behind the elements, if there are any.
void RequireMemory(const std::string& name, const TensorView& view);
void RequireContiguous(const std::string& name, const TensorView& view);
// No element twice, for views that a call writes.
void RequireDistinctElements(const std::string& name, const TensorView& view);

// Type of arithmetic and states for a storage type: float64 for float64, else float32.
DType WideType(DType storage);
void RequireStorageOrWide(const std::string& name, const TensorView& view, DType storage);

// cu_seqlens of packed sequences (empty: none) for tensors [batch, tokens, ...].
void RequireSequences(std::span<const std::int64_t> cu, std::int64_t batch, std::int64_t tokens);

void RequireWorkspace(const Context& context, std::size_t needed);
void RequireThreads(const char* name, int num_threads);

}  // namespace fenwick
