// A corpus of bytes from files and folders, split into a training and a held-out part.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace fenwick::tasks {

inline constexpr std::int64_t kByteVocabulary = 256;

struct TextConfig {
  std::vector<std::string> paths;       // files are read as they are, folders recursively
  std::vector<std::string> extensions;  // within folders; empty: every file without NUL bytes
  double held_out = 0.05;               // fraction of the bytes
  std::int64_t max_bytes = 0;           // 0: no limit
};

// Files are taken in the order of a hash of their path below the given folder, so that max_bytes
// takes a fair sample and the same folder gives the same corpus. Documents are joined by one NUL
// byte; whole documents are held out where there are several, the end of the text otherwise.
struct TextCorpus {
  std::vector<std::uint8_t> train;
  std::vector<std::uint8_t> held_out;
  std::int64_t num_files = 0;
};

TextCorpus LoadText(const TextConfig& config);

class Rng;
// batch_size windows of `length` + 1 bytes at random offsets, [B, T + 1]. Throws Error on a text
// that is shorter than a window.
std::vector<std::int64_t> RandomWindows(const std::vector<std::uint8_t>& text, std::int64_t length,
                                        std::int64_t batch_size, Rng& rng);

}  // namespace fenwick::tasks
