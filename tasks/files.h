// Whole files: read with a message that names them, written so that a reader never sees a half.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>

#include "fenwick/error.h"

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
    std::error_code error;
    std::filesystem::rename(temporary, path, error);
    if (error) throw Error(path.string() + ": cannot be written: " + error.message());
  } catch (...) {
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);
    throw;
  }
}

}  // namespace fenwick::tasks
