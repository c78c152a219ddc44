// See reference.h. One head of one sequence at a time: its tokens are those of the ring of the
// initial state, which have no query, followed by those of the call.
#include "reference/reference.h"

#include <algorithm>
#include <cmath>

#include "reference/head.h"

namespace fenwick::reference {
namespace {

struct Sequence {
  std::int64_t n;         // index among the states
  std::int64_t b;         // batch row
  std::int64_t begin;     // first token of the row
  std::int64_t tokens;    // number of new tokens
  std::int64_t base;      // position of the first token of the head, in the ring or new
  std::int64_t position;  // position of the first new token
  std::int64_t end_position() const { return position + tokens; }
  std::int64_t end_base() const { return NextBase(base, end_position()); }
};

std::vector<Sequence> SequencesOf(const Arguments& a) {
  std::vector<Sequence> sequences;
  for (std::int64_t n = 0; n < a.num_sequences(); ++n) {
    Sequence s{.n = n, .b = n, .begin = 0, .tokens = a.q.size(1), .base = 0, .position = 0};
    if (!a.cu_seqlens.empty()) {
      s.b = 0;
      s.begin = a.cu_seqlens[n];
      s.tokens = a.cu_seqlens[n + 1] - s.begin;
    }
    if (a.initial_state.given()) {
      s.base = a.initial_state.base[n];
      s.position = a.initial_state.position[n];
    }
    sequences.push_back(s);
  }
  return sequences;
}

// Row [b, t, h] of a tensor of rank 4.
std::vector<double> Row(const Tensor& x, std::int64_t b, std::int64_t t, std::int64_t h) {
  const double* begin = &x.data[((b * x.size(1) + t) * x.size(2) + h) * x.size(3)];
  return {begin, begin + x.size(3)};
}

void AddRow(Tensor& x, std::int64_t b, std::int64_t t, std::int64_t h,
            const std::vector<double>& row) {
  for (std::size_t i = 0; i < row.size(); ++i) x(b, t, h, i) += row[i];
}

// Slot `slot` of state n, head h; and its place in a tensor of nodes.
Matrix Node(const Tensor& nodes, std::int64_t n, std::int64_t h, std::int64_t slot) {
  const std::int64_t size = nodes.size(3) * nodes.size(4);
  const double* begin = &nodes.data[((n * nodes.size(1) + h) * nodes.size(2) + slot) * size];
  return {begin, begin + size};
}

void SetNode(Tensor& nodes, std::int64_t n, std::int64_t h, std::int64_t slot, const Matrix& node) {
  const std::int64_t size = nodes.size(3) * nodes.size(4);
  std::copy(node.begin(), node.end(),
            &nodes.data[((n * nodes.size(1) + h) * nodes.size(2) + slot) * size]);
}

// The slots that are live at `base`, as f(slot, level); saturation shares the top slot.
template <typename F>
void ForEachLiveSlot(const Arguments& a, std::int64_t base, F&& f) {
  const std::int64_t chunks = base / kStateChunk;
  const int L = static_cast<int>(a.level_scales.size(3));
  const int top = a.saturate ? TopSlot(L) : NumSlots(base);
  for (int slot = 0; slot < std::min(NumSlots(base), top); ++slot) {
    if (chunks >> slot & 1) f(slot, 7 + slot);
  }
  if (chunks >> top != 0) f(top, std::max(L - 1, 0));
}

HeadArguments HeadOf(const Arguments& a, const Sequence& s, std::int64_t h) {
  const std::int64_t group = h / (a.v.size(2) / a.q.size(2));
  const int L = static_cast<int>(a.level_scales.size(3));
  HeadArguments head;
  head.K = a.q.size(3);
  head.V = a.v.size(3);
  head.base = s.base;
  head.end_base = s.end_base();
  head.num_levels = a.saturate ? std::max(L, 1) : NumLevels(s.end_position() + 1);
  head.scale = a.scale;
  head.delta = a.transition == Transition::kGatedDelta;
  for (std::int64_t p = s.base; p < s.end_position(); ++p) {
    const bool is_new = p >= s.position;
    const State& ring = a.initial_state;
    const std::int64_t b = is_new ? s.b : s.n;
    const std::int64_t t = is_new ? s.begin + p - s.position : p % kStateRing;
    Token token;
    token.k = Row(is_new ? a.k : ring.k, b, t, group);
    token.v = Row(is_new ? a.v : ring.v, b, t, h);
    token.g = (is_new ? a.g : ring.g)(b, t, h);
    if (head.delta) token.beta = (is_new ? a.beta : ring.beta)(b, t, h);
    if (is_new) {
      token.q = Row(a.q, b, t, group);
      token.level_scales = Row(a.level_scales, b, t, h);
    }
    head.tokens.push_back(std::move(token));
  }
  head.start.resize(head.num_levels);
  if (a.initial_state.given()) {
    ForEachLiveSlot(a, s.base, [&](int slot, int level) {
      head.start[level] = Node(a.initial_state.nodes, s.n, h, slot);
    });
  }
  return head;
}

State EmptyState(const Arguments& a, std::int64_t slots) {
  const std::int64_t N = a.num_sequences(), G = a.q.size(2), K = a.q.size(3);
  const std::int64_t H = a.v.size(2), V = a.v.size(3);
  State state;
  state.k = Tensor({N, kStateRing, G, K});
  state.v = Tensor({N, kStateRing, H, V});
  state.g = Tensor({N, kStateRing, H});
  if (a.transition == Transition::kGatedDelta) state.beta = Tensor({N, kStateRing, H});
  state.nodes = Tensor({N, H, slots, K, V});
  return state;
}

}  // namespace

Tensor::Tensor(std::vector<std::int64_t> sizes) : sizes(std::move(sizes)) {
  std::int64_t n = 1;
  for (const std::int64_t size : this->sizes) n *= size;
  data.assign(n, 0.0);
}

Result Forward(const Arguments& a) {
  const std::int64_t H = a.v.size(2), H_per_G = H / a.q.size(2);
  const std::vector<Sequence> sequences = SequencesOf(a);
  std::int64_t slots = 0;
  for (const Sequence& s : sequences) slots = std::max<std::int64_t>(slots, NumSlots(s.end_base()));
  if (a.saturate) {
    slots = std::min<std::int64_t>(slots, TopSlot(static_cast<int>(a.level_scales.size(3))) + 1);
  }
  Result result{.o = Tensor(a.v.sizes), .final_state = EmptyState(a, slots)};
  State& state = result.final_state;
  for (const Sequence& s : sequences) {
    for (std::int64_t h = 0; h < H; ++h) {
      const HeadArguments head = HeadOf(a, s, h);
      const HeadResult out = HeadForward(head);
      for (std::int64_t t = 0; t < s.tokens; ++t) {
        AddRow(result.o, s.b, s.begin + t, h, out.o[s.position - s.base + t]);
      }
      ForEachLiveSlot(a, s.end_base(), [&](int slot, int level) {
        SetNode(state.nodes, s.n, h, slot, out.end[level]);
      });
      for (std::int64_t p = s.end_base(); p < s.end_position(); ++p) {
        const Token& token = head.tokens[p - s.base];
        const std::int64_t r = p % kStateRing;
        if (h % H_per_G == 0) AddRow(state.k, s.n, r, h / H_per_G, token.k);
        AddRow(state.v, s.n, r, h, token.v);
        state.g(s.n, r, h) = token.g;
        if (state.beta.given()) state.beta(s.n, r, h) = token.beta;
      }
    }
    state.position.push_back(s.end_position());
    state.base.push_back(s.end_base());
  }
  return result;
}

Tensor ParallelForward(const Arguments& a) {
  const std::int64_t H = a.v.size(2), H_per_G = H / a.q.size(2);
  const int L = static_cast<int>(a.level_scales.size(3));
  Tensor o(a.v.sizes);
  for (const Sequence& s : SequencesOf(a)) {
    for (std::int64_t h = 0; h < H; ++h) {
      for (std::int64_t t = 0; t < s.tokens; ++t) {
        const std::vector<double> q = Row(a.q, s.b, s.begin + t, h / H_per_G);
        double log_decay = 0.0;  // g[source + 1] + ... + g[t]
        for (std::int64_t source = t; source >= 0; --source) {
          const std::vector<double> k = Row(a.k, s.b, s.begin + source, h / H_per_G);
          const int level = a.saturate ? SaturatedLevel(t, source, L) : Level(t, source);
          double weight =
              a.scale * a.level_scales(s.b, s.begin + t, h, level) * std::exp(log_decay);
          double dot = 0.0;
          for (std::size_t i = 0; i < q.size(); ++i) dot += q[i] * k[i];
          for (std::int64_t j = 0; j < o.size(3); ++j) {
            o(s.b, s.begin + t, h, j) += weight * dot * a.v(s.b, s.begin + source, h, j);
          }
          log_decay += a.g(s.b, s.begin + source, h);
        }
      }
    }
  }
  return o;
}

Gradients Backward(const Arguments& a, const Tensor& d_o, const State& d_final_state) {
  const std::int64_t H = a.v.size(2), H_per_G = H / a.q.size(2);
  Gradients d;
  d.q = Tensor(a.q.sizes);
  d.k = Tensor(a.k.sizes);
  d.v = Tensor(a.v.sizes);
  d.g = Tensor(a.g.sizes);
  if (a.beta.given()) d.beta = Tensor(a.beta.sizes);
  d.level_scales = Tensor(a.level_scales.sizes);
  if (a.initial_state.given()) d.initial_state = EmptyState(a, a.initial_state.nodes.size(2));

  for (const Sequence& s : SequencesOf(a)) {
    for (std::int64_t h = 0; h < H; ++h) {
      const std::int64_t group = h / H_per_G;
      const HeadArguments head = HeadOf(a, s, h);
      std::vector<std::vector<double>> d_rows(head.tokens.size());
      for (std::int64_t t = 0; t < s.tokens; ++t) {
        d_rows[s.position - s.base + t] = Row(d_o, s.b, s.begin + t, h);
      }
      Levels d_end(head.num_levels);
      if (d_final_state.given()) {
        ForEachLiveSlot(a, s.end_base(), [&](int slot, int level) {
          d_end[level] = Node(d_final_state.nodes, s.n, h, slot);
        });
      }
      const HeadGradients grad = HeadBackward(head, d_rows, d_end);
      if (a.initial_state.given()) {
        ForEachLiveSlot(a, s.base, [&](int slot, int level) {
          SetNode(d.initial_state.nodes, s.n, h, slot, grad.start[level]);
        });
      }
      for (std::int64_t p = s.base; p < s.end_position(); ++p) {
        Token token = grad.tokens[p - s.base];
        if (d_final_state.given() && p >= s.end_base()) {
          const std::int64_t r = p % kStateRing;
          if (h % H_per_G == 0) Add(token.k, Row(d_final_state.k, s.n, r, group));
          Add(token.v, Row(d_final_state.v, s.n, r, h));
          token.g += d_final_state.g(s.n, r, h);
          if (head.delta) token.beta += d_final_state.beta(s.n, r, h);
        }
        const bool is_new = p >= s.position;
        State& ring = d.initial_state;
        const std::int64_t b = is_new ? s.b : s.n;
        const std::int64_t t = is_new ? s.begin + p - s.position : p % kStateRing;
        AddRow(is_new ? d.k : ring.k, b, t, group, token.k);
        AddRow(is_new ? d.v : ring.v, b, t, h, token.v);
        (is_new ? d.g : ring.g)(b, t, h) += token.g;
        if (head.delta) (is_new ? d.beta : ring.beta)(b, t, h) += token.beta;
        if (is_new) {
          AddRow(d.q, b, t, group, token.q);
          AddRow(d.level_scales, b, t, h, token.level_scales);
        }
      }
    }
  }
  return d;
}

}  // namespace fenwick::reference
