#include "tasks/files.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

#include "fenwick/error.h"

namespace fenwick::tasks {

std::string ReadFile(const std::filesystem::path& path) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (status.type() == std::filesystem::file_type::not_found) {
    throw Error(path.string() + ": no such file");
  }
  if (error) throw Error(path.string() + ": " + error.message());
  if (!std::filesystem::is_regular_file(status)) {
    throw Error(path.string() + ": expected a file, got " +
                (std::filesystem::is_directory(status) ? "a folder" : "a device or a pipe"));
  }
  std::ifstream file(path, std::ios::binary);
  std::string bytes(std::filesystem::file_size(path), '\0');
  if (!file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()))) {
    throw Error(path.string() + ": cannot be read: " + std::strerror(errno));
  }
  return bytes;
}

void WriteFileAtomically(const std::filesystem::path& path, std::string_view bytes) {
  ReplaceFile(path, [&](const std::filesystem::path& temporary) {
    std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    file.close();
    if (!file) throw Error(path.string() + ": cannot be written: " + std::strerror(errno));
  });
}

}  // namespace fenwick::tasks
