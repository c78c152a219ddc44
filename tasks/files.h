// Whole files: read with a message that names them, written so that a reader never sees a half.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace fenwick::tasks {

// Throws Error "PATH: no such file" and the like.
std::string ReadFile(const std::filesystem::path& path);

// Writes a temporary file beside `path` and renames it.
void WriteFileAtomically(const std::filesystem::path& path, std::string_view bytes);

// Runs write(temporary name), then renames; the temporary file is removed when write throws.
template <typename Write>
void ReplaceFile(const std::filesystem::path& path, Write&& write) {
  std::filesystem::path temporary = path;
  temporary += ".tmp";
  try {
    write(temporary);
    std::filesystem::rename(temporary, path);
  } catch (...) {
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);
    throw;
  }
}

}  // namespace fenwick::tasks
