// Reading and writing safetensors files (github.com/huggingface/safetensors), without a framework.
//
//   8 bytes   length n of the header, little-endian
//   n bytes   JSON: {"name": {"dtype": "F32", "shape": [...], "data_offsets": [begin, end]}, ...,
//             "__metadata__": {"key": "value", ...}}
//   the rest  the tensors, C order, without gaps
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace fenwick::support {

struct SafetensorsEntry {
  std::string dtype;                // "F64", "F32", "F16", "BF16", "I64", "I32", "U8", "BOOL", ...
  std::vector<std::int64_t> shape;  // [] for a scalar
  std::span<const std::byte> data;  // all elements; not necessarily aligned
};

// Bytes of one element of `dtype`; 0 for a name that the format does not know.
int SafetensorsElementSize(const std::string& dtype);

// A file mapped into memory. Entries point into it and live as long as any copy of the object.
class SafetensorsFile {
 public:
  // Checks all of the header before anything is used. Throws Error that names the file and what is
  // wrong with it.
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::map<std::string, SafetensorsEntry>& entries() const { return entries_; }

 private:
  std::shared_ptr<const std::byte> bytes_;
  std::map<std::string, std::string> metadata_;
  std::map<std::string, SafetensorsEntry> entries_;
};

// Writes to a temporary name beside `path` and renames it, so that a reader never sees a part.
void WriteSafetensors(const std::filesystem::path& path,
                      const std::map<std::string, SafetensorsEntry>& entries,
                      const std::map<std::string, std::string>& metadata);

}  // namespace fenwick::support
