#include "tasks/text_corpus.h"

#include <algorithm>
#include <string_view>
#include <system_error>
#include <tuple>

#include "fenwick/error.h"
#include "tasks/files.h"
#include "tasks/rng.h"

namespace fenwick::tasks {
namespace {

namespace fs = std::filesystem;

// FNV-1a.
std::uint64_t Hash(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (unsigned char byte : text) hash = (hash ^ byte) * 0x100000001b3;
  return hash;
}

struct Source {
  std::uint64_t hash;
  std::string name;  // below the given path
  fs::path path;
  bool given;  // named by the caller: read whatever it holds
};

std::vector<Source> ListSources(const TextConfig& config) {
  std::vector<Source> sources;
  for (const std::string& given : config.paths) {
    const fs::path root(given);
    std::error_code error;
    if (!fs::exists(root, error)) {
      throw Error(given + ": " + (error ? error.message() : "no such file or folder"));
    }
    if (!fs::is_directory(root, error)) {
      const std::string name = root.filename().string();
      sources.push_back({Hash(name), name, root, true});
      continue;
    }
    for (const auto& entry :
         fs::recursive_directory_iterator(root, fs::directory_options::skip_permission_denied)) {
      if (!entry.is_regular_file(error)) continue;  // nor links that lead nowhere
      const std::string extension = entry.path().extension().string();
      if (!config.extensions.empty() &&
          std::find(config.extensions.begin(), config.extensions.end(), extension) ==
              config.extensions.end()) {
        continue;
      }
      const std::string name = entry.path().lexically_relative(root).string();
      sources.push_back({Hash(name), name, entry.path(), false});
    }
  }
  std::sort(sources.begin(), sources.end(), [](const Source& a, const Source& b) {
    return std::tie(a.hash, a.name) < std::tie(b.hash, b.name);
  });
  return sources;
}

void AppendDocument(std::vector<std::uint8_t>& text, std::string_view bytes) {
  if (!text.empty()) text.push_back(0);
  text.insert(text.end(), bytes.begin(), bytes.end());
}

}  // namespace

TextCorpus LoadText(const TextConfig& config) {
  if (config.paths.empty()) throw Error("--data: expected at least one file or folder, got none");
  TextCorpus corpus;
  std::size_t total = 0;
  for (const Source& source : ListSources(config)) {
    std::string bytes = ReadFile(source.path);
    if (bytes.empty()) continue;
    if (!source.given && config.extensions.empty() && bytes.find('\0') != std::string::npos) {
      continue;
    }
    if (config.max_bytes > 0) {
      bytes.resize(std::min<std::size_t>(bytes.size(), config.max_bytes - total));
    }
    total += bytes.size();
    ++corpus.num_files;
    const bool whole = corpus.num_files > 1 || config.held_out >= 1;
    const bool hold_out =
        static_cast<double>(corpus.held_out.size()) < config.held_out * static_cast<double>(total);
    AppendDocument(whole && hold_out ? corpus.held_out : corpus.train, bytes);
    if (config.max_bytes > 0 && total >= static_cast<std::size_t>(config.max_bytes)) break;
  }
  if (total == 0) throw Error(config.paths.front() + ": no text found");
  if (corpus.num_files == 1 && corpus.held_out.empty()) {
    const auto cut = static_cast<std::ptrdiff_t>(static_cast<double>(corpus.train.size()) *
                                                 (1.0 - config.held_out));
    corpus.held_out.assign(corpus.train.begin() + cut, corpus.train.end());
    corpus.train.resize(cut);
  }
  return corpus;
}

std::vector<std::int64_t> RandomWindows(const std::vector<std::uint8_t>& text, std::int64_t length,
                                        std::int64_t batch_size, Rng& rng) {
  const auto size = static_cast<std::int64_t>(text.size());
  if (size < length + 1) {
    throw Error("text: expected at least " + std::to_string(length + 1) +
                " bytes for windows of length " + std::to_string(length) + ", got " +
                std::to_string(size));
  }
  std::vector<std::int64_t> windows;
  windows.reserve(batch_size * (length + 1));
  for (std::int64_t row = 0; row < batch_size; ++row) {
    const auto begin = text.begin() + rng.Below(size - length);
    windows.insert(windows.end(), begin, begin + length + 1);
  }
  return windows;
}

}  // namespace fenwick::tasks
