#include "support/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "fenwick/error.h"

namespace fenwick::support {
namespace {

using nlohmann::json;

constexpr std::uint64_t kMaxHeader = 100'000'000;  // the format's own limit
constexpr char kMetadata[] = "__metadata__";

[[noreturn]] void Fail(const std::filesystem::path& path, const std::string& what) {
  throw Error(path.string() + ": " + what);
}

struct Mapping {
  std::shared_ptr<const std::byte> bytes;
  std::uint64_t size = 0;
};

Mapping Map(const std::filesystem::path& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) Fail(path, std::strerror(errno));
  struct stat status {};
  void* data = MAP_FAILED;
  const bool regular = fstat(file, &status) == 0 && S_ISREG(status.st_mode);
  const auto size = static_cast<std::uint64_t>(status.st_size);
  if (regular && size > 0) data = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
  close(file);
  if (!regular || size < 8) Fail(path, "not a safetensors file: no header");
  if (data == MAP_FAILED) Fail(path, std::strerror(errno));
  return {std::shared_ptr<const std::byte>(
              static_cast<const std::byte*>(data),
              [size](const std::byte* begin) { munmap(const_cast<std::byte*>(begin), size); }),
          size};
}

// Elements of a shape, or -1 where the product does not fit.
std::int64_t NumElements(const std::vector<std::int64_t>& shape) {
  std::int64_t n = 1;
  for (const std::int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(n, size, &n)) return -1;
  }
  return n;
}

}  // namespace

int SafetensorsElementSize(const std::string& dtype) {
  static const std::map<std::string, int> kSizes = {
      {"F64", 8}, {"I64", 8}, {"U64", 8},  {"F32", 4},     {"I32", 4},
      {"U32", 4}, {"F16", 2}, {"BF16", 2}, {"I16", 2},     {"U16", 2},
      {"I8", 1},  {"U8", 1},  {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}};
  const auto found = kSizes.find(dtype);
  return found == kSizes.end() ? 0 : found->second;
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) {
  const Mapping mapping = Map(path);
  bytes_ = mapping.bytes;
  std::uint64_t header_size = 0;
  for (int i = 7; i >= 0; --i) {
    header_size = header_size << 8 | std::to_integer<std::uint64_t>(bytes_.get()[i]);
  }
  if (header_size > kMaxHeader || header_size > mapping.size - 8) {
    Fail(path, "not a safetensors file: header length " + std::to_string(header_size) + " in " +
                   std::to_string(mapping.size) + " bytes");
  }
  const char* text = reinterpret_cast<const char*>(bytes_.get()) + 8;
  const json header = json::parse(text, text + header_size, nullptr, /*allow_exceptions=*/false);
  if (!header.is_object()) Fail(path, "not a safetensors file: the header is not a JSON object");

  const std::byte* data = bytes_.get() + 8 + header_size;
  const std::uint64_t data_size = mapping.size - 8 - header_size;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> extents;
  for (const auto& [name, value] : header.items()) {
    if (name == kMetadata) {
      if (!value.is_object()) Fail(path, "the metadata is not an object");
      for (const auto& [key, text_value] : value.items()) {
        if (!text_value.is_string()) Fail(path, "metadata " + key + " is not a string");
        metadata_[key] = text_value.get<std::string>();
      }
      continue;
    }
    SafetensorsEntry entry;
    std::vector<std::uint64_t> offsets;
    try {
      entry.dtype = value.at("dtype").get<std::string>();
      for (const json& size : value.at("shape")) {
        if (!size.is_number_unsigned()) Fail(path, "tensor " + name + " has a bad shape");
        entry.shape.push_back(size.get<std::int64_t>());
      }
      for (const json& offset : value.at("data_offsets")) {
        if (!offset.is_number_unsigned()) Fail(path, "tensor " + name + " has a bad offset");
        offsets.push_back(offset.get<std::uint64_t>());
      }
    } catch (const json::exception&) {
      Fail(path, "tensor " + name + " has no dtype, shape and data_offsets");
    }
    const int element_size = SafetensorsElementSize(entry.dtype);
    if (element_size == 0) Fail(path, "tensor " + name + " has unknown dtype " + entry.dtype);
    if (offsets.size() != 2 || offsets[0] > offsets[1] || offsets[1] > data_size) {
      Fail(path, "tensor " + name + " lies outside the file (is it cut off?)");
    }
    const std::int64_t elements = NumElements(entry.shape);
    const std::uint64_t bytes = offsets[1] - offsets[0];
    if (elements < 0 || bytes % element_size != 0 ||
        bytes / element_size != static_cast<std::uint64_t>(elements)) {
      Fail(path, "tensor " + name + " has " + std::to_string(bytes) +
                     " bytes, which does not fit its shape");
    }
    entry.data = {data + offsets[0], bytes};
    extents.emplace_back(offsets[0], offsets[1]);
    entries_.emplace(name, std::move(entry));
  }
  std::sort(extents.begin(), extents.end());
  std::uint64_t end = 0;
  for (const auto& [first, last] : extents) {
    if (first != end) Fail(path, "tensors overlap or leave gaps");
    end = last;
  }
  if (end != data_size) Fail(path, "bytes after the last tensor");
}

void WriteSafetensors(const std::filesystem::path& path,
                      const std::map<std::string, SafetensorsEntry>& entries,
                      const std::map<std::string, std::string>& metadata) {
  // Wide elements first, so that every tensor is aligned to its element.
  std::vector<const std::pair<const std::string, SafetensorsEntry>*> order;
  for (const auto& named : entries) {
    const int size = SafetensorsElementSize(named.second.dtype);
    if (size == 0) {
      Fail(path, "tensor " + named.first + " has unknown dtype " + named.second.dtype);
    }
    const std::int64_t elements = NumElements(named.second.shape);
    if (elements < 0 || named.second.data.size() != static_cast<std::size_t>(elements) * size) {
      Fail(path, "tensor " + named.first + " has bytes that do not fit its shape");
    }
    order.push_back(&named);
  }
  std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return SafetensorsElementSize(a->second.dtype) > SafetensorsElementSize(b->second.dtype);
  });
  json header = json::object();
  if (!metadata.empty()) header[kMetadata] = metadata;
  std::uint64_t offset = 0;
  for (const auto* named : order) {
    const SafetensorsEntry& entry = named->second;
    header[named->first] = {{"dtype", entry.dtype},
                            {"shape", entry.shape},
                            {"data_offsets", {offset, offset + entry.data.size()}}};
    offset += entry.data.size();
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  std::string length(8, '\0');
  for (int i = 0; i < 8; ++i) length[i] = static_cast<char>(text.size() >> (8 * i) & 0xff);

  std::filesystem::path temporary = path;
  temporary += ".tmp";
  try {
    std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
    if (!file) Fail(path, "cannot be written");
    file << length << text;
    for (const auto* named : order) {
      const auto& data = named->second.data;
      file.write(reinterpret_cast<const char*>(data.data()),
                 static_cast<std::streamsize>(data.size()));
    }
    file.close();
    if (!file) Fail(path, "cannot be written in full (is the disk full?)");
    std::error_code error;
    std::filesystem::rename(temporary, path, error);
    if (error) Fail(path, error.message());
  } catch (...) {
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);
    throw;
  }
}

}  // namespace fenwick::support
