#include "support/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <iterator>

#include "fenwick/error.h"

namespace fenwick::support {
namespace {

class Safetensors : public testing::Test {
 protected:
  void SetUp() override {
    path_ = std::filesystem::path(testing::TempDir()) /
            (std::string("safetensors_") +
             testing::UnitTest::GetInstance()->current_test_info()->name());
    const std::map<std::string, SafetensorsEntry> entries = {
        {"bytes", {"U8", {3}, Bytes(bytes_)}},
        {"empty", {"F32", {0, 4}, {}}},
        {"matrix", {"F32", {2, 2}, Bytes(matrix_)}},
        {"scalar", {"F64", {}, Bytes(scalar_)}}};
    WriteSafetensors(path_, entries, {{"format", "pt"}, {"note", "\"quoted\""}});
  }
  void TearDown() override { std::filesystem::remove(path_); }

  template <typename T>
  static std::span<const std::byte> Bytes(const std::vector<T>& values) {
    return std::as_bytes(std::span(values));
  }
  std::string Read() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }
  void Write(const std::string& bytes) const {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << bytes;
  }

  std::filesystem::path path_;
  std::vector<std::uint8_t> bytes_ = {1, 2, 255};
  std::vector<float> matrix_ = {1.5f, -2.f, 3.f, 4.25f};
  std::vector<double> scalar_ = {0.1};
};

TEST_F(Safetensors, ReadsWhatItWrote) {
  const SafetensorsFile file(path_);
  EXPECT_EQ(file.metadata().at("note"), "\"quoted\"");
  ASSERT_EQ(file.entries().size(), 4u);
  const SafetensorsEntry& matrix = file.entries().at("matrix");
  EXPECT_EQ(matrix.dtype, "F32");
  EXPECT_EQ(matrix.shape, (std::vector<std::int64_t>{2, 2}));
  ASSERT_EQ(matrix.data.size(), 16u);
  EXPECT_EQ(std::memcmp(matrix.data.data(), matrix_.data(), 16), 0);
  EXPECT_TRUE(file.entries().at("scalar").shape.empty());
  EXPECT_EQ(std::memcmp(file.entries().at("scalar").data.data(), scalar_.data(), 8), 0);
  EXPECT_EQ(file.entries().at("bytes").data.size(), 3u);
  EXPECT_EQ(file.entries().at("empty").data.size(), 0u);
  EXPECT_FALSE(std::filesystem::exists(path_.string() + ".tmp"));
}

TEST_F(Safetensors, EveryTruncationIsAnError) {
  const std::string whole = Read();
  for (std::size_t length = 0; length < whole.size(); ++length) {
    Write(whole.substr(0, length));
    EXPECT_THROW(SafetensorsFile{path_}, Error) << length;
  }
  Write(whole + "x");
  EXPECT_THROW(SafetensorsFile{path_}, Error);
}

TEST_F(Safetensors, EveryChangedHeaderByteIsAnErrorOrHarmless) {
  const std::string whole = Read();
  const std::size_t header = whole.find('}', whole.rfind("scalar"));
  for (std::size_t i = 0; i <= header; ++i) {
    for (const char flip : {1, 16, 64}) {
      std::string changed = whole;
      changed[i] = static_cast<char>(changed[i] ^ flip);
      Write(changed);
      try {
        const SafetensorsFile file(path_);
        std::size_t sum = 0;
        for (const auto& [name, entry] : file.entries()) {
          for (const std::byte byte : entry.data) sum += std::to_integer<std::size_t>(byte);
        }
        EXPECT_LT(sum, 255u * whole.size());
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find(path_.string()), std::string::npos);
      }
    }
  }
}

TEST_F(Safetensors, NamesTheFileThatIsMissing) {
  try {
    SafetensorsFile("/no/such/file.safetensors");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("/no/such/file.safetensors"), std::string::npos);
  }
}

TEST_F(Safetensors, RefusesBytesThatDoNotFitTheShape) {
  EXPECT_THROW(WriteSafetensors(path_, {{"x", {"F32", {3}, Bytes(matrix_)}}}, {}), Error);
  EXPECT_THROW(WriteSafetensors(path_, {{"x", {"F33", {4}, Bytes(matrix_)}}}, {}), Error);
}

}  // namespace
}  // namespace fenwick::support
