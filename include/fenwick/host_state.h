// HostState: owning states in host memory for engines written in C++ (see state.h for the layout).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "fenwick/ops.h"
#include "fenwick/state.h"

namespace fenwick {

// Shapes and types that a state must agree on with the calls that use it.
struct StateSpec {
  Transition transition = Transition::kScalarGate;
  std::int64_t num_sequences = 0;      // N
  std::int64_t groups = 0;             // G
  std::int64_t heads = 0;              // H
  std::int64_t key_size = 0;           // K
  std::int64_t value_size = 0;         // V
  DType dtype = DType::kFloat32;       // q, k, v
  DType beta_dtype = DType::kFloat32;  // kGatedDelta only
  bool operator==(const StateSpec&) const = default;
};

class HostState {
 public:
  // Empty states: every sequence at position 0. Throws Error on sizes out of range.
  explicit HostState(const StateSpec& spec);

  const StateSpec& spec() const { return spec_; }
  std::int64_t position(std::int64_t sequence) const;  // throws Error on a sequence not in 0..N-1
  std::int64_t base(std::int64_t sequence) const;      // the same
  std::int64_t max_position() const;
  std::size_t bytes() const;  // memory held

  // Views for ops.h into this object's memory: growing (Reserve), assigning to and destroying it
  // invalidate them. max_position is a copy: take a new view after a step.
  StateView View();
  // Makes room so that `tokens` more tokens can be appended to every sequence; num_levels > 0
  // bounds the slots as LevelPolicy::kSaturate with that many levels does.
  void Reserve(std::int64_t tokens, int num_levels = 0);

  // Forgets the newest `tokens` tokens of one sequence. Allowed up to what the ring still holds
  // (at least the last kStateChunk tokens since the last truncation); throws Error beyond.
  void Truncate(std::int64_t sequence, std::int64_t tokens);
  // A state whose sequence i is a copy of sequence indices[i] (fork, beam search, ragged batches).
  HostState Select(std::span<const std::int64_t> indices) const;

  // Versioned bytes with a checksum. Load throws Error on anything that Save did not write.
  std::vector<std::byte> Save() const;
  static HostState Load(std::span<const std::byte> bytes);

 private:
  void RequireSequence(std::int64_t sequence) const;

  StateSpec spec_;
  std::int64_t num_slots_ = 0;
  std::vector<std::byte> k_, v_, g_, beta_, nodes_;
  std::vector<std::int64_t> position_, base_;
};

}  // namespace fenwick
