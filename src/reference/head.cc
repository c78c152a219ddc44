// See head.h.
#include "reference/head.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

namespace fenwick::reference {
namespace {

using Vector = std::vector<double>;

// m^T x, [V].
Vector ReadRows(const Matrix& m, const Vector& x, std::int64_t V) {
  Vector y(V, 0.0);
  for (std::size_t i = 0; i < x.size(); ++i) {
    for (std::int64_t j = 0; j < V; ++j) y[j] += m[i * V + j] * x[i];
  }
  return y;
}

// m y, [K].
Vector ReadColumns(const Matrix& m, const Vector& y) {
  Vector x(m.size() / y.size(), 0.0);
  for (std::size_t i = 0; i < x.size(); ++i) {
    for (std::size_t j = 0; j < y.size(); ++j) x[i] += m[i * y.size() + j] * y[j];
  }
  return x;
}

// m += factor x y^T, where an empty m is zero.
void AddOuter(Matrix& m, double factor, const Vector& x, const Vector& y) {
  if (m.empty()) m.assign(x.size() * y.size(), 0.0);
  for (std::size_t i = 0; i < x.size(); ++i) {
    for (std::size_t j = 0; j < y.size(); ++j) m[i * y.size() + j] += factor * x[i] * y[j];
  }
}

void AddScaled(Vector& a, double factor, const Vector& b) {
  if (a.empty()) a.assign(b.size(), 0.0);
  for (std::size_t i = 0; i < b.size(); ++i) a[i] += factor * b[i];
}

double Dot(const Vector& a, const Vector& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

int MergeTarget(std::int64_t t, int num_levels) {
  return std::min(std::countr_zero(static_cast<std::uint64_t>(t)) + 1, num_levels - 1);
}

void Merge(Levels& S, std::int64_t t) {
  if (t == 0) return;
  const int target = MergeTarget(t, static_cast<int>(S.size()));
  for (int level = 0; level < target; ++level) {
    Add(S[target], S[level]);
    S[level].clear();
  }
}

void MergeAdjoint(Levels& dS, std::int64_t t) {
  if (t == 0) return;
  const int target = MergeTarget(t, static_cast<int>(dS.size()));
  for (int level = 0; level < target; ++level) dS[level] = dS[target];
}

// S <- exp(g) (I - beta k k^T) S.
void Transition(Matrix& S, const Token& token, const HeadArguments& head) {
  if (head.delta) AddOuter(S, -token.beta, token.k, ReadRows(S, token.k, head.V));
  for (double& x : S) x *= std::exp(token.g);
}

// All that token t does to states that were merged for it.
void Absorb(Levels& S, const Token& token, const HeadArguments& head) {
  for (Matrix& m : S) {
    if (!m.empty()) Transition(m, token, head);
  }
  AddOuter(S[0], head.delta ? token.beta : 1.0, token.k, token.v);
}

// Derivative of Transition: dS of its result becomes dS of its argument S.
void TransitionAdjoint(Matrix& dS, const Matrix& S, const Token& token, const HeadArguments& head,
                       Token& grad) {
  Matrix after = S;
  Transition(after, token, head);
  grad.g += Dot(dS, after);
  for (double& x : dS) x *= std::exp(token.g);
  if (!head.delta) return;
  const Vector read = ReadRows(S, token.k, head.V), d_read = ReadRows(dS, token.k, head.V);
  grad.beta -= Dot(read, d_read);
  AddScaled(grad.k, -token.beta, ReadColumns(dS, read));
  AddScaled(grad.k, -token.beta, ReadColumns(S, d_read));
  AddOuter(dS, -token.beta, token.k, d_read);
}

// Derivative of one token: `merged` are the states merged for it, dS the gradient of those after
// it, replaced by that of `merged`.
void TokenAdjoint(Levels& dS, const Levels& merged, const Token& token, const Vector& d_o,
                  const HeadArguments& head, Token& grad) {
  grad.k.assign(head.K, 0.0);
  grad.v.assign(head.V, 0.0);
  if (!token.q.empty()) {
    Levels S = merged;
    Absorb(S, token, head);
    grad.q.assign(head.K, 0.0);
    grad.level_scales.assign(token.level_scales.size(), 0.0);
    for (std::size_t level = 0; level < S.size(); ++level) {
      if (S[level].empty()) continue;
      const double weight = head.scale * token.level_scales[level];
      grad.level_scales[level] = head.scale * Dot(ReadRows(S[level], token.q, head.V), d_o);
      AddScaled(grad.q, weight, ReadColumns(S[level], d_o));
      AddOuter(dS[level], weight, token.q, d_o);
    }
  }
  if (!dS[0].empty()) {
    const Vector d_w = ReadColumns(dS[0], token.v);
    AddScaled(grad.k, head.delta ? token.beta : 1.0, d_w);
    AddScaled(grad.v, head.delta ? token.beta : 1.0, ReadRows(dS[0], token.k, head.V));
    if (head.delta) grad.beta += Dot(d_w, token.k);
  }
  for (std::size_t level = 0; level < dS.size(); ++level) {
    if (merged[level].empty()) {
      dS[level].clear();
    } else if (!dS[level].empty()) {
      TransitionAdjoint(dS[level], merged[level], token, head, grad);
    }
  }
}

}  // namespace

void Add(Vector& a, const Vector& b) {
  if (!b.empty()) AddScaled(a, 1.0, b);
}

HeadResult HeadForward(const HeadArguments& head) {
  HeadResult result;
  Levels S = head.start;
  for (std::size_t i = 0; i <= head.tokens.size(); ++i) {
    const std::int64_t t = head.base + static_cast<std::int64_t>(i);
    Merge(S, t);
    if (t == head.end_base) result.end = S;
    if (i == head.tokens.size()) break;
    const Token& token = head.tokens[i];
    Absorb(S, token, head);
    Vector o;
    if (!token.q.empty()) {
      o.assign(head.V, 0.0);
      for (std::size_t level = 0; level < S.size(); ++level) {
        if (S[level].empty()) continue;
        AddScaled(o, head.scale * token.level_scales[level], ReadRows(S[level], token.q, head.V));
      }
    }
    result.o.push_back(std::move(o));
  }
  return result;
}

HeadGradients HeadBackward(const HeadArguments& head, const std::vector<Vector>& d_o,
                           const Levels& d_end) {
  constexpr std::size_t kBlock = 64;  // states are kept at block starts and recomputed inside
  const std::size_t count = head.tokens.size();
  const auto run_block = [&](Levels S, std::size_t begin, std::vector<Levels>* merged) {
    for (std::size_t i = begin; i < std::min(begin + kBlock, count); ++i) {
      Merge(S, head.base + static_cast<std::int64_t>(i));
      if (merged != nullptr) merged->push_back(S);
      Absorb(S, head.tokens[i], head);
    }
    return S;
  };
  std::vector<Levels> starts = {head.start};
  for (std::size_t begin = 0; begin + kBlock < count; begin += kBlock) {
    starts.push_back(run_block(starts.back(), begin, nullptr));
  }

  HeadGradients grad;
  grad.tokens.resize(count);
  Levels dS(head.num_levels);
  const auto add_end = [&](std::int64_t t) {
    if (t != head.end_base) return;
    for (int level = 0; level < head.num_levels; ++level) Add(dS[level], d_end[level]);
  };
  const std::int64_t end = head.base + static_cast<std::int64_t>(count);
  add_end(end);
  if (count > 0) MergeAdjoint(dS, end);
  for (std::size_t block = count > 0 ? starts.size() : 0; block-- > 0;) {
    std::vector<Levels> merged;
    run_block(starts[block], block * kBlock, &merged);
    for (std::size_t j = merged.size(); j-- > 0;) {
      const std::size_t i = block * kBlock + j;
      const std::int64_t t = head.base + static_cast<std::int64_t>(i);
      TokenAdjoint(dS, merged[j], head.tokens[i], d_o[i], head, grad.tokens[i]);
      add_end(t);
      if (i > 0) MergeAdjoint(dS, t);
    }
  }
  for (Matrix& m : dS) {
    if (m.empty()) m.assign(head.K * head.V, 0.0);
  }
  grad.start = std::move(dS);
  return grad;
}

}  // namespace fenwick::reference
