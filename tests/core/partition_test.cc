// The closed forms of partition.h against the paper's recursive definition.
#include "fenwick/partition.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "fenwick/state.h"

namespace fenwick {
namespace {

static_assert(Level(0, 0) == 0 && Level(1, 0) == 1 && Level(5, 4) == 1 && Level(6, 5) == 2);
static_assert(NumLevels(0) == 0 && NumLevels(1) == 1 && NumLevels(2) == 2 && NumLevels(3) == 3);
static_assert(NumLevels(64) == 7 && NumLevels(65) == 8 && NumLevels(16384) == 15);
static_assert(NumLiveLevels(0) == 1 && NumLiveLevels(7) == 4 && NumLiveLevels(8) == 2);
static_assert(MergeLevel(1) == 1 && MergeLevel(6) == 2 && MergeLevel(64) == 7);
static_assert(SaturatedLevel(1000, 0, 5) == 4 && SaturatedLevel(1000, 1000, 1) == 0);
static_assert(BucketBegin(13, 1) == 12 && BucketBegin(13, 3) == 8 && BucketBegin(13, 4) == 0);
static_assert(Level(std::uint64_t{1} << 31, 0) == 32);
static_assert(NumLevels((std::int64_t{1} << 31) + 1) == 33);

// Section 3.1 of the paper: from the end of the prefix [0, t], the query itself is level 0; then,
// greedily, the largest power of two that divides what is left is the next bucket. A bucket of
// 2^(l-1) tokens has level l.
struct Bucket {
  std::uint64_t begin, end;  // [begin, end)
  int level;
};

std::vector<Bucket> PaperBuckets(std::uint64_t t) {
  std::vector<Bucket> buckets = {{t, t + 1, 0}};
  for (std::uint64_t left = t; left > 0;) {
    int log_size = 0;
    while (left % (std::uint64_t{2} << log_size) == 0) ++log_size;
    const std::uint64_t size = std::uint64_t{1} << log_size;
    buckets.push_back({left - size, left, log_size + 1});
    left -= size;
  }
  return buckets;
}

TEST(PartitionTest, LevelIsThePapersRecursiveDefinition) {
  for (std::uint64_t t = 0; t < 2048; ++t) {
    const std::vector<Bucket> buckets = PaperBuckets(t);
    ASSERT_EQ(NumLiveLevels(t), static_cast<int>(buckets.size()));
    std::uint64_t covered = 0;
    for (const Bucket& bucket : buckets) {
      for (std::uint64_t s = bucket.begin; s < bucket.end; ++s, ++covered) {
        ASSERT_EQ(Level(t, s), bucket.level) << "t " << t << " s " << s;
      }
      if (bucket.level > 0) {
        ASSERT_EQ(BucketBegin(t, bucket.level), bucket.begin);
      }
    }
    ASSERT_EQ(covered, t + 1);
  }
}

TEST(PartitionTest, SpotValuesUpTo2To31) {
  const std::uint64_t top = std::uint64_t{1} << 31;
  for (const std::uint64_t t :
       {top, top - 1, top + 1, top / 2 + 12345, 3 * (top / 4), top - 4096}) {
    for (const Bucket& bucket : PaperBuckets(t)) {
      for (const std::uint64_t s :
           {bucket.begin, (bucket.begin + bucket.end) / 2, bucket.end - 1}) {
        if (s < bucket.begin) continue;
        EXPECT_EQ(Level(t, s), bucket.level) << "t " << t << " s " << s;
      }
      EXPECT_LT(bucket.level, NumLevels(static_cast<std::int64_t>(t) + 1));
    }
  }
}

// A token is written to level 0 and then moved by the merges alone.
TEST(PartitionTest, MergesMoveEveryTokenToItsLevel) {
  std::vector<int> level_of;
  for (std::uint64_t t = 0; t < 1100; ++t) {
    for (int& level : level_of) {
      if (level < MergeLevel(t)) level = MergeLevel(t);
    }
    level_of.push_back(0);
    for (std::uint64_t s = 0; s <= t; ++s) ASSERT_EQ(level_of[s], Level(t, s));
    ASSERT_EQ(NumLevels(static_cast<std::int64_t>(t) + 1), Level(t, 0) + 1);
  }
}

TEST(PartitionTest, LeftNodesCoverAllOlderChunksOnce) {
  for (std::uint64_t n = 0; n < 600; ++n) {
    std::uint64_t expected_end = n;
    ForEachLeftNode(n, [&](int bit, std::uint64_t end) {
      ASSERT_EQ(end, expected_end);
      expected_end -= std::uint64_t{1} << bit;
      ASSERT_EQ(Level(n, expected_end), bit + 1);
      ASSERT_EQ(Level(n, end - 1), bit + 1);
    });
    ASSERT_EQ(expected_end, 0u);
  }
}

// The ring keeps what truncation by a chunk needs, never more than it can hold.
TEST(StateLayoutTest, RingHoldsBetweenOneAndTwoChunks) {
  static_assert(NextBase(0, 128) == 0 && NextBase(0, 129) == 64 && NextBase(0, 192) == 64);
  static_assert(NextBase(128, 130) == 128);
  static_assert(NumSlots(0) == 0 && NumSlots(64) == 1 && NumSlots(128) == 2 && NumSlots(192) == 2);
  static_assert(NumStepSlots(0, 129) == 1 && NumStepSlots(0, 256) == 2);
  static_assert(NumStepSlots(0, 257) == 3 && NumStepSlots(192, 300) == 3);
  static_assert(TopSlot(1) == 0 && TopSlot(8) == 0 && TopSlot(9) == 1);
  std::int64_t base = 0;
  for (std::int64_t position = 0; position < 3000; ++position) {
    base = NextBase(base, position);
    ASSERT_EQ(base, NextBase(0, position));
    ASSERT_EQ(base % kStateChunk, 0);
    ASSERT_LE(position - base, kStateRing);
    ASSERT_GE(position - base, std::min<std::int64_t>(position, kStateChunk));
  }
}

}  // namespace
}  // namespace fenwick
