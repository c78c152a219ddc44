// Multi-query associative recall, generated as in the Zoology protocol (Arora et al.,
// arXiv 2312.04927, appendix E): a sequence opens with P key-value pairs; later each key appears
// once more, at a gap drawn from a power law, and the label there is its value. All other
// positions hold random tokens and carry no label.
#pragma once

#include <cstdint>
#include <vector>

namespace fenwick::tasks {

inline constexpr std::int64_t kIgnoreLabel = -100;  // what cross_entropy skips

struct MqarConfig {
  std::int64_t length = 64;                   // T, even
  std::int64_t vocab_size = 128;              // keys [1, vocab/2), values [vocab/2, vocab)
  std::vector<std::int64_t> pairs{4, 8, 16};  // row r of a batch has pairs[r % size]
  double power = 0.01;      // gap i + 1 has weight proportional to (i + 1)^(power - 1)
  bool random_fill = true;  // false: positions that are no pair and no query hold token 0
};

struct MqarBatch {
  std::vector<std::int64_t> inputs;  // [B, T]
  std::vector<std::int64_t> labels;  // [B, T], kIgnoreLabel where nothing is asked
  std::vector<std::int64_t> pairs;   // [B]
};

// Throws Error on sizes the protocol does not allow.
void ValidateMqar(const MqarConfig& config);

class Rng;
MqarBatch MakeMqarBatch(const MqarConfig& config, std::int64_t batch_size, Rng& rng);

}  // namespace fenwick::tasks
