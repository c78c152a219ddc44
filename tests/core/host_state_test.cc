// HostState: growth, roll-back, selection, and bytes that reject every change.
#include "fenwick/host_state.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "support/testing.h"

namespace fenwick {
namespace {

using testing::ErrorOf;

StateSpec SmallSpec(Transition transition = Transition::kGatedDelta) {
  return {.transition = transition,
          .num_sequences = 3,
          .groups = 1,
          .heads = 2,
          .key_size = 3,
          .value_size = 2,
          .dtype = DType::kBFloat16,
          .beta_dtype = DType::kFloat32};
}

void FillRandom(const TensorView& view, std::mt19937_64& random) {
  auto* bytes = static_cast<unsigned char*>(view.data);
  for (std::int64_t i = 0; i < view.num_elements() * ElementSize(view.dtype); ++i) {
    bytes[i] = static_cast<unsigned char>(random());
  }
}

// A state with random contents at the given positions.
HostState RandomState(const StateSpec& spec, std::vector<std::int64_t> positions) {
  HostState state(spec);
  state.Reserve(*std::max_element(positions.begin(), positions.end()));
  const StateView view = state.View();
  std::mt19937_64 random(testing::NextSeed());
  for (const TensorView* tensor : {&view.k, &view.v, &view.g, &view.beta, &view.nodes}) {
    if (tensor->given()) FillRandom(*tensor, random);
  }
  for (std::size_t n = 0; n < positions.size(); ++n) {
    static_cast<std::int64_t*>(view.position.data)[n] = positions[n];
    static_cast<std::int64_t*>(view.base.data)[n] = NextBase(0, positions[n]);
  }
  return state;
}

std::vector<std::byte> RowBytes(const TensorView& view, std::int64_t n) {
  const std::int64_t row = view.num_elements() / view.size(0) * ElementSize(view.dtype);
  std::vector<std::byte> bytes(row);
  if (row > 0) std::memcpy(bytes.data(), static_cast<std::byte*>(view.data) + n * row, row);
  return bytes;
}

void ExpectSameRow(const StateView& a, std::int64_t n, const StateView& b, std::int64_t m) {
  EXPECT_EQ(RowBytes(a.k, n), RowBytes(b.k, m));
  EXPECT_EQ(RowBytes(a.v, n), RowBytes(b.v, m));
  EXPECT_EQ(RowBytes(a.g, n), RowBytes(b.g, m));
  EXPECT_EQ(a.beta.given(), b.beta.given());
  if (a.beta.given()) {
    EXPECT_EQ(RowBytes(a.beta, n), RowBytes(b.beta, m));
  }
  EXPECT_EQ(RowBytes(a.nodes, n), RowBytes(b.nodes, m));
  EXPECT_EQ(RowBytes(a.position, n), RowBytes(b.position, m));
  EXPECT_EQ(RowBytes(a.base, n), RowBytes(b.base, m));
}

TEST(HostStateTest, StartsEmpty) {
  HostState state(SmallSpec());
  EXPECT_EQ(state.max_position(), 0);
  const StateView view = state.View();
  EXPECT_EQ(view.nodes.size(2), 0);
  EXPECT_EQ(view.k.size(1), kStateRing);
  EXPECT_TRUE(view.beta.given());
  EXPECT_FALSE(HostState(SmallSpec(Transition::kScalarGate)).View().beta.given());
}

TEST(HostStateTest, GrowsWithTheLogarithmOfThePosition) {
  HostState state(SmallSpec());
  state.Reserve(128);
  EXPECT_EQ(state.View().nodes.size(2), 0);
  state.Reserve(129);
  EXPECT_EQ(state.View().nodes.size(2), 1);
  state.Reserve(1 << 20);
  EXPECT_EQ(state.View().nodes.size(2), 14);
  HostState saturated(SmallSpec());
  saturated.Reserve(1 << 20, /*num_levels=*/10);
  EXPECT_EQ(saturated.View().nodes.size(2), 3);
}

TEST(HostStateTest, GrowingKeepsEveryNode) {
  HostState state = RandomState(SmallSpec(), {300, 10, 0});
  HostState before = state;
  state.Reserve(10000);
  const TensorView small = before.View().nodes, large = state.View().nodes;
  ASSERT_GT(large.size(2), small.size(2));
  const std::int64_t node = small.size(3) * small.size(4);
  for (std::int64_t nh = 0; nh < small.size(0) * small.size(1); ++nh) {
    for (std::int64_t s = 0; s < large.size(2); ++s) {
      const float* grown = static_cast<float*>(large.data) + (nh * large.size(2) + s) * node;
      for (std::int64_t i = 0; i < node; ++i) {
        if (s >= small.size(2)) {
          ASSERT_EQ(grown[i], 0.0f);
        } else {
          ASSERT_EQ(
              std::memcmp(grown + i,
                          static_cast<float*>(small.data) + (nh * small.size(2) + s) * node + i,
                          sizeof(float)),
              0);
        }
      }
    }
  }
}

TEST(HostStateTest, TruncatesWhatTheRingHolds) {
  HostState state = RandomState(SmallSpec(), {300, 10, 0});
  state.Truncate(0, 64);
  EXPECT_EQ(state.position(0), 236);
  EXPECT_EQ(state.base(0), 192);
  state.Truncate(0, 44);
  EXPECT_EQ(ErrorOf([&] { state.Truncate(0, 1); }),
            "tokens: expected 0..0 that sequence 0 still holds, got 1");
  EXPECT_EQ(ErrorOf([&] { state.Truncate(1, 11); }),
            "tokens: expected 0..10 that sequence 1 still holds, got 11");
  EXPECT_EQ(ErrorOf([&] { state.Truncate(3, 0); }), "sequence: expected 0..2, got 3");
  EXPECT_EQ(ErrorOf([&] { state.position(3); }), "sequence: expected 0..2, got 3");
  EXPECT_EQ(ErrorOf([&] { state.base(-1); }), "sequence: expected 0..2, got -1");
  state.Truncate(1, 10);
  EXPECT_EQ(state.position(1), 0);
}

TEST(HostStateTest, SelectCopiesRows) {
  HostState state = RandomState(SmallSpec(), {300, 10, 70});
  const std::int64_t indices[] = {2, 0, 0, 1};
  HostState selected = state.Select(indices);
  EXPECT_EQ(selected.spec().num_sequences, 4);
  for (int i = 0; i < 4; ++i) ExpectSameRow(selected.View(), i, state.View(), indices[i]);
  EXPECT_EQ(state.Select({}).spec().num_sequences, 0);
  const std::int64_t bad[] = {0, 3};
  EXPECT_EQ(ErrorOf([&] { state.Select(bad); }), "indices[1]: expected 0..2, got 3");
}

TEST(HostStateTest, SaveAndLoadRoundTrip) {
  for (const Transition transition : {Transition::kScalarGate, Transition::kGatedDelta}) {
    HostState state = RandomState(SmallSpec(transition), {300, 10, 0});
    HostState loaded = HostState::Load(state.Save());
    EXPECT_EQ(loaded.spec(), state.spec());
    for (int n = 0; n < 3; ++n) ExpectSameRow(loaded.View(), n, state.View(), n);
    EXPECT_EQ(loaded.Save(), state.Save());
  }
  HostState none(
      StateSpec{.num_sequences = 0, .groups = 1, .heads = 1, .key_size = 1, .value_size = 1});
  EXPECT_EQ(HostState::Load(none.Save()).spec(), none.spec());
}

TEST(HostStateTest, EveryChangedByteIsRejected) {
  const std::vector<std::byte> saved = RandomState(SmallSpec(), {200, 10, 0}).Save();
  std::mt19937_64 random(testing::NextSeed());
  for (std::size_t i = 0; i < saved.size(); ++i) {
    std::vector<std::byte> changed = saved;
    changed[i] ^= static_cast<std::byte>(1 + random() % 255);
    EXPECT_THROW(HostState::Load(changed), Error) << "byte " << i;
  }
  for (std::size_t size = 0; size < saved.size(); size += 97) {
    EXPECT_THROW(HostState::Load(std::span(saved).first(size)), Error) << size << " bytes";
  }
  std::vector<std::byte> longer = saved;
  longer.push_back(std::byte{0});
  EXPECT_THROW(HostState::Load(longer), Error);
}

// Even with a checksum that fits, a bad header or position is found before memory is touched.
TEST(HostStateTest, ChangesWithAForgedChecksumAreRejectedOrHarmless) {
  const std::vector<std::byte> saved = RandomState(SmallSpec(), {200, 10, 0}).Save();
  const auto forge = [](std::vector<std::byte>& bytes) {
    std::uint64_t hash = 0xcbf29ce484222325ull;
    for (std::size_t i = 0; i + 8 < bytes.size(); ++i) {
      hash = (hash ^ static_cast<std::uint64_t>(bytes[i])) * 0x100000001b3ull;
    }
    std::memcpy(bytes.data() + bytes.size() - 8, &hash, 8);
  };
  std::vector<std::byte> same = saved;
  forge(same);
  ASSERT_EQ(same, saved);
  int accepted = 0;
  for (std::size_t i = 8; i < 64 + 2 * 3 * 8; ++i) {
    for (const int change : {1, 2, 64, 128, 255}) {
      std::vector<std::byte> changed = saved;
      changed[i] ^= static_cast<std::byte>(change);
      forge(changed);
      try {
        HostState loaded = HostState::Load(changed);
        ++accepted;
        for (int n = 0; n < 3; ++n) {
          EXPECT_GE(loaded.position(n), loaded.base(n));
          EXPECT_LE(loaded.position(n) - loaded.base(n), kStateRing);
        }
        EXPECT_LE(loaded.bytes(), 2 * saved.size());
      } catch (const Error&) {
      }
    }
  }
  EXPECT_GT(accepted, 0) << "e.g. another position within the ring";
}

TEST(HostStateTest, MessagesNameTheArgument) {
  const auto with = [](auto&& change) {
    StateSpec spec = SmallSpec();
    change(spec);
    return ErrorOf([&] { HostState state(spec); });
  };
  EXPECT_EQ(with([](StateSpec& s) { s.key_size = 513; }),
            "spec.key_size: expected 1..512, got 513");
  EXPECT_EQ(with([](StateSpec& s) { s.heads = 3, s.groups = 2; }),
            "spec.heads: expected a multiple of the 2 groups, got 3");
  EXPECT_EQ(with([](StateSpec& s) { s.beta_dtype = DType::kFloat64; }),
            "spec.beta_dtype: expected the type of q or float32, got float64");
  EXPECT_EQ(with([](StateSpec& s) { s.dtype = DType::kInt64; }),
            "spec.dtype: expected float32, bfloat16, float16 or float64, got int64");
  HostState state(SmallSpec());
  EXPECT_EQ(ErrorOf([&] { state.Reserve(-1); }), "tokens: expected 0..2^48 in all, got -1");
  EXPECT_EQ(ErrorOf([] { HostState::Load({}); }),
            "state bytes: expected a saved state, got 0 bytes");
}

}  // namespace
}  // namespace fenwick
