// Properties of the MQAR generator, the text corpus and the files of a run.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <set>

#include "fenwick/error.h"
#include "tasks/files.h"
#include "tasks/mqar.h"
#include "tasks/rng.h"
#include "tasks/run_folder.h"
#include "tasks/text_corpus.h"

namespace fenwick::tasks {
namespace {

namespace fs = std::filesystem;

class TemporaryFolder : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "fenwick_test_XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    path_ = name;
  }
  void TearDown() override { fs::remove_all(path_); }
  void Write(const std::string& name, const std::string& bytes) {
    fs::create_directories((path_ / name).parent_path());
    std::ofstream(path_ / name, std::ios::binary) << bytes;
  }
  fs::path path_;
};

using TextTest = TemporaryFolder;
using FilesTest = TemporaryFolder;

std::string MessageOf(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(RngTest, BelowIsUniformAndStreamsDiffer) {
  Rng rng(7, Stream::kTrain, 3);
  std::vector<int> counts(6);
  constexpr int kDraws = 60000;
  for (int i = 0; i < kDraws; ++i) ++counts[rng.Below(6)];
  for (int count : counts) EXPECT_NEAR(count, kDraws / 6, 400);  // 4 standard deviations: 365
  EXPECT_NE(Rng(7, Stream::kTrain, 3).Next(), Rng(7, Stream::kTrain, 4).Next());
  EXPECT_NE(Rng(7, Stream::kTrain, 3).Next(), Rng(7, Stream::kEvaluation, 3).Next());
  EXPECT_NE(Rng(7, Stream::kTrain, 3).Next(), Rng(8, Stream::kTrain, 3).Next());
  EXPECT_EQ(Rng(7, Stream::kTrain, 3).Next(), Rng(7, Stream::kTrain, 3).Next());
}

TEST(MqarTest, EveryQueryAsksForTheValueOfItsKey) {
  for (std::int64_t length : {16, 64, 256}) {
    MqarConfig config;
    config.length = length;
    config.vocab_size = 2 * length + 1;
    config.pairs = {1, length / 8, length / 4};
    Rng rng(11, Stream::kTrain, length);
    const MqarBatch batch = MakeMqarBatch(config, 30, rng);
    for (std::int64_t row = 0; row < 30; ++row) {
      const std::int64_t* inputs = batch.inputs.data() + row * length;
      const std::int64_t* labels = batch.labels.data() + row * length;
      const std::int64_t pairs = batch.pairs[row];
      EXPECT_EQ(pairs, config.pairs[row % 3]);
      std::map<std::int64_t, std::int64_t> value_of;
      std::set<std::int64_t> values;
      for (std::int64_t i = 0; i < pairs; ++i) {
        EXPECT_TRUE(value_of.emplace(inputs[2 * i], inputs[2 * i + 1]).second) << "key twice";
        EXPECT_TRUE(values.insert(inputs[2 * i + 1]).second) << "value twice";
        EXPECT_GE(inputs[2 * i], 1);
        EXPECT_LT(inputs[2 * i], config.vocab_size / 2);
        EXPECT_GE(inputs[2 * i + 1], config.vocab_size / 2);
      }
      std::set<std::int64_t> asked;
      for (std::int64_t t = 0; t < length; ++t) {
        EXPECT_GE(inputs[t], 0);
        EXPECT_LT(inputs[t], config.vocab_size);
        if (labels[t] == kIgnoreLabel) continue;
        EXPECT_GE(t, 2 * pairs);
        EXPECT_EQ(t % 2, 0);
        ASSERT_TRUE(value_of.contains(inputs[t]));
        EXPECT_EQ(labels[t], value_of[inputs[t]]);
        EXPECT_TRUE(asked.insert(inputs[t]).second) << "asked twice";
      }
      EXPECT_EQ(static_cast<std::int64_t>(asked.size()), pairs);
    }
  }
}

// With one pair the gap i has probability (i + 1)^(a - 1) / sum.
TEST(MqarTest, GapsFollowThePowerLaw) {
  MqarConfig config;
  config.length = 18;
  config.pairs = {1};
  constexpr int kRows = 20000;
  Rng rng(5, Stream::kTrain);
  const MqarBatch batch = MakeMqarBatch(config, kRows, rng);
  std::vector<double> counts(8);
  for (std::int64_t i = 0; i < kRows * config.length; ++i) {
    if (batch.labels[i] != kIgnoreLabel) ++counts[(i % config.length - 2) / 2];
  }
  double total = 0;
  for (int i = 1; i <= 8; ++i) total += std::pow(i, config.power - 1);
  for (int i = 0; i < 8; ++i) {
    const double p = std::pow(i + 1, config.power - 1) / total;
    EXPECT_NEAR(counts[i] / kRows, p, 5 * std::sqrt(p / kRows)) << i;
  }
}

TEST(MqarTest, SameKeySameBatchAndZeroFill) {
  MqarConfig config;
  Rng a(3, Stream::kTrain, 9), b(3, Stream::kTrain, 9), c(3, Stream::kTrain, 10);
  const MqarBatch first = MakeMqarBatch(config, 4, a);
  EXPECT_EQ(first.inputs, MakeMqarBatch(config, 4, b).inputs);
  EXPECT_NE(first.inputs, MakeMqarBatch(config, 4, c).inputs);
  config.random_fill = false;
  const MqarBatch zeros = MakeMqarBatch(config, 1, b);
  EXPECT_EQ(std::count(zeros.inputs.begin(), zeros.inputs.end(), 0),
            config.length - 3 * config.pairs[0]);
}

TEST(MqarTest, RefusesSizesOutsideTheProtocol) {
  MqarConfig config;
  config.length = 63;
  EXPECT_NE(MessageOf([&] { ValidateMqar(config); }).find("length"), std::string::npos);
  config.length = 64;
  config.vocab_size = 64;
  EXPECT_NE(MessageOf([&] { ValidateMqar(config); }).find("vocab"), std::string::npos);
  config.vocab_size = 128;
  config.pairs = {17};
  EXPECT_NE(MessageOf([&] { ValidateMqar(config); }).find("pairs"), std::string::npos);
}

TEST_F(TextTest, FolderIsFilteredSplitAndRepeatable) {
  for (int i = 0; i < 40; ++i) {
    Write("a/b" + std::to_string(i) + ".py", std::string(100, static_cast<char>('A' + i % 26)));
  }
  Write("a/notes.txt", "not python");
  Write("empty.py", "");
  TextConfig config;
  config.paths = {path_.string()};
  config.extensions = {".py"};
  config.held_out = 0.1;
  const TextCorpus corpus = LoadText(config);
  EXPECT_EQ(corpus.num_files, 40);
  const auto bytes = [](const std::vector<std::uint8_t>& text) {
    return std::count_if(text.begin(), text.end(), [](std::uint8_t b) { return b != 0; });
  };
  EXPECT_EQ(bytes(corpus.train) + bytes(corpus.held_out), 4000);
  EXPECT_EQ(bytes(corpus.held_out), 400);
  EXPECT_EQ(std::count(corpus.train.begin(), corpus.train.end(), 0), 35);
  EXPECT_EQ(LoadText(config).train, corpus.train);

  config.max_bytes = 1050;
  const TextCorpus capped = LoadText(config);
  EXPECT_EQ(bytes(capped.train) + bytes(capped.held_out), 1050);

  config.extensions = {};
  config.max_bytes = 0;
  Write("a/binary", std::string("\0\1\2", 3));
  EXPECT_EQ(LoadText(config).num_files, 41);
}

TEST_F(TextTest, OneFileHoldsOutItsEnd) {
  Write("one", "0123456789");
  TextConfig config;
  config.paths = {(path_ / "one").string()};
  config.held_out = 0.3;
  const TextCorpus corpus = LoadText(config);
  EXPECT_EQ(std::string(corpus.train.begin(), corpus.train.end()), "0123456");
  EXPECT_EQ(std::string(corpus.held_out.begin(), corpus.held_out.end()), "789");
  Rng rng(1, Stream::kTrain);
  std::set<std::int64_t> starts;
  const auto windows = RandomWindows(corpus.train, 4, 100, rng);
  ASSERT_EQ(windows.size(), 500u);
  for (int row = 0; row < 100; ++row) {
    starts.insert(windows[row * 5]);
    for (int i = 1; i < 5; ++i) EXPECT_EQ(windows[row * 5 + i], windows[row * 5] + i);
  }
  EXPECT_EQ(starts, (std::set<std::int64_t>{'0', '1', '2'}));
  EXPECT_NE(MessageOf([&] { RandomWindows(corpus.held_out, 3, 1, rng); }).find("at least 4 bytes"),
            std::string::npos);
}

TEST_F(TextTest, MissingPathIsNamed) {
  TextConfig config;
  config.paths = {(path_ / "nothing").string()};
  EXPECT_NE(MessageOf([&] { LoadText(config); }).find("nothing: no such file"), std::string::npos);
}

TEST_F(FilesTest, ReplaceLeavesTheOldFileWhenWritingFails) {
  const fs::path path = path_ / "file";
  WriteFileAtomically(path, "old");
  EXPECT_THROW(ReplaceFile(path,
                           [](const fs::path& temporary) {
                             std::ofstream(temporary) << "ha";
                             throw Error("disk full");
                           }),
               Error);
  EXPECT_EQ(ReadFile(path), "old");
  WriteFileAtomically(path, "new");
  EXPECT_EQ(ReadFile(path), "new");
  EXPECT_EQ(std::distance(fs::directory_iterator(path_), fs::directory_iterator()), 1);
}

TEST_F(FilesTest, MetricsDropWhatCameAfterTheCheckpoint) {
  const RunFolder run{path_};
  Metrics metrics(run.metrics(), 0);
  for (int step : {1, 2, 3}) metrics.Add({{"step", step}, {"loss", 0.1 * step}});
  metrics.Write();
  EXPECT_EQ(Metrics(run.metrics(), 2).records().size(), 2u);
  EXPECT_EQ(Metrics(run.metrics(), 0).records().size(), 0u);
  Write("config.json", "{\"other\": 1}");
  EXPECT_NE(MessageOf([&] { run.ReadConfig(); }).find("config.json: not the configuration"),
            std::string::npos);
}

}  // namespace
}  // namespace fenwick::tasks
