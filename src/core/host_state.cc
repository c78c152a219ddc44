// States in host memory: growth, roll-back, selection and bytes; see host_state.h.
#include "fenwick/host_state.h"

#include <bit>
#include <cstring>
#include <string>
#include <utility>

#include "core/require.h"
#include "core/validate.h"

namespace fenwick {
namespace {

constexpr std::int64_t kMaxBytes = std::int64_t{1} << 46;  // of one tensor; keeps sizes in int64
constexpr std::int64_t kMaxSlots = 48;                     // positions stay below 2^48

// Elements of a tensor, or Error where it would not fit into memory.
std::int64_t Elements(const char* name, std::initializer_list<std::int64_t> sizes) {
  std::int64_t n = 1;
  for (const std::int64_t size : sizes) {
    if (size != 0 && n > kMaxBytes / 8 / size) {
      Fail(name, "a state tensor below 2^46 bytes", ShapeText(sizes));
    }
    n *= size;
  }
  return n;
}

// Bytes of each tensor of a state.
struct Layout {
  std::int64_t k, v, g, beta, node;  // node: one slot of one head of one sequence
  std::int64_t nodes;

  Layout(const StateSpec& s, std::int64_t slots) {
    const std::int64_t element = ElementSize(s.dtype), wide = ElementSize(WideType(s.dtype));
    const std::int64_t N = s.num_sequences;
    k = Elements("state.k", {N, kStateRing, s.groups, s.key_size}) * element;
    v = Elements("state.v", {N, kStateRing, s.heads, s.value_size}) * element;
    g = Elements("state.g", {N, kStateRing, s.heads}) * wide;
    beta = s.transition == Transition::kGatedDelta ? g / wide * ElementSize(s.beta_dtype) : 0;
    node = s.key_size * s.value_size * wide;
    nodes = Elements("state.nodes", {N, s.heads, slots, s.key_size, s.value_size}) * wide;
  }
};

void RequireSpec(const StateSpec& s) {
  const auto range = [](const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
    if (value < low || value > high) {
      Fail(name, std::to_string(low) + ".." + std::to_string(high), std::to_string(value));
    }
  };
  range("spec.transition", static_cast<int>(s.transition), 0, 1);
  range("spec.num_sequences", s.num_sequences, 0, kMaxBytes);
  range("spec.groups", s.groups, 1, kMaxBytes);
  range("spec.heads", s.heads, 1, kMaxBytes);
  range("spec.key_size", s.key_size, 1, kMaxHeadSize);
  range("spec.value_size", s.value_size, 1, kMaxHeadSize);
  if (s.heads % s.groups != 0) {
    Fail("spec.heads", "a multiple of the " + std::to_string(s.groups) + " groups",
         std::to_string(s.heads));
  }
  RequireFloating("spec.dtype", s.dtype);
  RequireFloating("spec.beta_dtype", s.beta_dtype);
  if (s.transition == Transition::kGatedDelta && s.beta_dtype != s.dtype &&
      s.beta_dtype != WideType(s.dtype)) {
    Fail("spec.beta_dtype", std::string("the type of q or ") + DTypeName(WideType(s.dtype)),
         DTypeName(s.beta_dtype));
  }
}

// Saved form, little-endian: Header, position[N], base[N], k, v, g, beta, nodes, checksum.
static_assert(std::endian::native == std::endian::little);
constexpr char kMagic[8] = {'F', 'E', 'N', 'W', 'S', 'T', 'A', 'T'};
constexpr std::uint32_t kVersion = 1;

struct Header {
  char magic[8];
  std::uint32_t version;
  std::uint8_t transition, dtype, beta_dtype, unused;
  std::int64_t num_sequences, groups, heads, key_size, value_size, num_slots;
};
static_assert(sizeof(Header) == 64);

// FNV-1a: every step is a bijection of the hash, so that changing any one byte changes the result.
std::uint64_t Checksum(std::span<const std::byte> bytes) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (const std::byte b : bytes) {
    hash = (hash ^ static_cast<std::uint64_t>(b)) * 0x100000001b3ull;
  }
  return hash;
}

void Append(std::vector<std::byte>& bytes, const void* data, std::size_t size) {
  const auto* begin = static_cast<const std::byte*>(data);
  bytes.insert(bytes.end(), begin, begin + size);
}

[[noreturn]] void FailLoad(const std::string& got) { Fail("state bytes", "a saved state", got); }

}  // namespace

HostState::HostState(const StateSpec& spec) : spec_(spec) {
  RequireSpec(spec);
  const Layout layout(spec, 0);
  k_.resize(layout.k);
  v_.resize(layout.v);
  g_.resize(layout.g);
  beta_.resize(layout.beta);
  position_.resize(spec.num_sequences);
  base_.resize(spec.num_sequences);
}

std::int64_t HostState::max_position() const {
  std::int64_t max = 0;
  for (const std::int64_t position : position_) max = std::max(max, position);
  return max;
}

std::size_t HostState::bytes() const {
  return k_.size() + v_.size() + g_.size() + beta_.size() + nodes_.size() +
         (position_.size() + base_.size()) * sizeof(std::int64_t);
}

StateView HostState::View() {
  const StateSpec& s = spec_;
  const std::int64_t N = s.num_sequences;
  const DType wide = WideType(s.dtype);
  StateView view;
  view.k = TensorView(k_.data(), s.dtype, {N, kStateRing, s.groups, s.key_size});
  view.v = TensorView(v_.data(), s.dtype, {N, kStateRing, s.heads, s.value_size});
  view.g = TensorView(g_.data(), wide, {N, kStateRing, s.heads});
  if (s.transition == Transition::kGatedDelta) {
    view.beta = TensorView(beta_.data(), s.beta_dtype, {N, kStateRing, s.heads});
  }
  view.nodes = TensorView(nodes_.data(), wide, {N, s.heads, num_slots_, s.key_size, s.value_size});
  view.position = TensorView(position_.data(), DType::kInt64, {N});
  view.base = TensorView(base_.data(), DType::kInt64, {N});
  view.max_position = max_position();
  return view;
}

void HostState::Reserve(std::int64_t tokens, int num_levels) {
  if (tokens < 0 || tokens > kMaxPosition - max_position()) {
    Fail("tokens", "0..2^48 in all", std::to_string(tokens));
  }
  std::int64_t slots = 0;
  for (std::size_t n = 0; n < position_.size(); ++n) {
    slots = std::max<std::int64_t>(slots, NumStepSlots(base_[n], position_[n] + tokens));
  }
  if (num_levels > 0) slots = std::min<std::int64_t>(slots, TopSlot(num_levels) + 1);
  if (slots <= num_slots_) return;
  const Layout layout(spec_, slots);
  std::vector<std::byte> nodes(layout.nodes);
  const std::int64_t old_row = num_slots_ * layout.node, row = slots * layout.node;
  for (std::int64_t i = 0; old_row > 0 && i < spec_.num_sequences * spec_.heads; ++i) {
    std::memcpy(nodes.data() + i * row, nodes_.data() + i * old_row, old_row);
  }
  nodes_ = std::move(nodes);
  num_slots_ = slots;
}

std::int64_t HostState::position(std::int64_t sequence) const {
  RequireSequence(sequence);
  return position_[sequence];
}

std::int64_t HostState::base(std::int64_t sequence) const {
  RequireSequence(sequence);
  return base_[sequence];
}

void HostState::RequireSequence(std::int64_t sequence) const {
  if (sequence < 0 || sequence >= spec_.num_sequences) {
    Fail("sequence", "0.." + std::to_string(spec_.num_sequences - 1), std::to_string(sequence));
  }
}

void HostState::Truncate(std::int64_t sequence, std::int64_t tokens) {
  RequireSequence(sequence);
  const std::int64_t held = position_[sequence] - base_[sequence];
  if (tokens < 0 || tokens > held) {
    Fail("tokens",
         "0.." + std::to_string(held) + " that sequence " + std::to_string(sequence) +
             " still holds",
         std::to_string(tokens));
  }
  position_[sequence] -= tokens;
}

HostState HostState::Select(std::span<const std::int64_t> indices) const {
  StateSpec spec = spec_;
  spec.num_sequences = static_cast<std::int64_t>(indices.size());
  for (std::size_t i = 0; i < indices.size(); ++i) {
    if (indices[i] < 0 || indices[i] >= spec_.num_sequences) {
      Fail("indices[" + std::to_string(i) + "]", "0.." + std::to_string(spec_.num_sequences - 1),
           std::to_string(indices[i]));
    }
  }
  HostState selected(spec);
  selected.num_slots_ = num_slots_;
  selected.nodes_.resize(Layout(spec, num_slots_).nodes);
  const auto copy_rows = [&](const std::vector<std::byte>& from, std::vector<std::byte>& to) {
    if (to.empty()) return;
    const std::size_t row = to.size() / indices.size();
    for (std::size_t i = 0; i < indices.size(); ++i) {
      std::memcpy(to.data() + i * row, from.data() + indices[i] * row, row);
    }
  };
  copy_rows(k_, selected.k_);
  copy_rows(v_, selected.v_);
  copy_rows(g_, selected.g_);
  copy_rows(beta_, selected.beta_);
  copy_rows(nodes_, selected.nodes_);
  for (std::size_t i = 0; i < indices.size(); ++i) {
    selected.position_[i] = position_[indices[i]];
    selected.base_[i] = base_[indices[i]];
  }
  return selected;
}

std::vector<std::byte> HostState::Save() const {
  Header header{.magic = {},
                .version = kVersion,
                .transition = static_cast<std::uint8_t>(spec_.transition),
                .dtype = static_cast<std::uint8_t>(spec_.dtype),
                .beta_dtype = static_cast<std::uint8_t>(spec_.beta_dtype),
                .unused = 0,
                .num_sequences = spec_.num_sequences,
                .groups = spec_.groups,
                .heads = spec_.heads,
                .key_size = spec_.key_size,
                .value_size = spec_.value_size,
                .num_slots = num_slots_};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  std::vector<std::byte> saved;
  saved.reserve(sizeof(Header) + bytes() + sizeof(std::uint64_t));
  Append(saved, &header, sizeof(header));
  Append(saved, position_.data(), position_.size() * sizeof(std::int64_t));
  Append(saved, base_.data(), base_.size() * sizeof(std::int64_t));
  for (const auto* part : {&k_, &v_, &g_, &beta_, &nodes_}) {
    Append(saved, part->data(), part->size());
  }
  const std::uint64_t checksum = Checksum(saved);
  Append(saved, &checksum, sizeof(checksum));
  return saved;
}

HostState HostState::Load(std::span<const std::byte> bytes) {
  Header header;
  std::uint64_t checksum;
  if (bytes.size() < sizeof(header) + sizeof(checksum)) {
    FailLoad(std::to_string(bytes.size()) + " bytes");
  }
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) FailLoad("something else");
  if (header.version != kVersion) {
    Fail("state bytes", "version " + std::to_string(kVersion), std::to_string(header.version));
  }
  const std::span<const std::byte> body = bytes.first(bytes.size() - sizeof(checksum));
  std::memcpy(&checksum, body.data() + body.size(), sizeof(checksum));
  if (Checksum(body) != checksum) FailLoad("bytes that were changed (checksum)");

  const StateSpec spec{.transition = static_cast<Transition>(header.transition),
                       .num_sequences = header.num_sequences,
                       .groups = header.groups,
                       .heads = header.heads,
                       .key_size = header.key_size,
                       .value_size = header.value_size,
                       .dtype = static_cast<DType>(header.dtype),
                       .beta_dtype = static_cast<DType>(header.beta_dtype)};
  RequireSpec(spec);
  if (header.num_slots < 0 || header.num_slots > kMaxSlots) {
    FailLoad(std::to_string(header.num_slots) + " slots");
  }
  const Layout layout(spec, header.num_slots);
  const std::int64_t counters =
      spec.num_sequences * static_cast<std::int64_t>(sizeof(std::int64_t));
  const std::int64_t expected = static_cast<std::int64_t>(sizeof(header)) + 2 * counters +
                                layout.k + layout.v + layout.g + layout.beta + layout.nodes;
  if (expected != static_cast<std::int64_t>(body.size())) {
    FailLoad(std::to_string(body.size()) + " bytes where its header needs " +
             std::to_string(expected));
  }

  HostState state(spec);
  state.num_slots_ = header.num_slots;
  state.nodes_.resize(layout.nodes);
  const std::byte* at = body.data() + sizeof(header);
  const auto take = [&](void* data, std::size_t size) {
    if (size > 0) std::memcpy(data, at, size);
    at += size;
  };
  take(state.position_.data(), counters);
  take(state.base_.data(), counters);
  for (auto* part : {&state.k_, &state.v_, &state.g_, &state.beta_, &state.nodes_}) {
    take(part->data(), part->size());
  }
  for (std::size_t n = 0; n < state.position_.size(); ++n) {
    const std::int64_t position = state.position_[n], base = state.base_[n];
    if (position < 0 || position > kMaxPosition || base < 0 || base > position ||
        base % kStateChunk != 0 || position - base > kStateRing) {
      FailLoad("position " + std::to_string(position) + " with base " + std::to_string(base));
    }
  }
  return state;
}

}  // namespace fenwick
