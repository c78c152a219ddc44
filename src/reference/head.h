// The recurrence and its reverse-mode derivative for one head of one sequence.
//
//   before token t > 0:  z = countr_zero(t);  S[z+1] += S[0] + ... + S[z];  S[0..z] = 0
//   token t:             S[l] = exp(g) S[l]                        scalar gate, all l
//                        S[l] = exp(g) (I - beta k k^T) S[l]       gated delta rule, all l
//                        S[0] = w v^T,  w = k or beta k
//   output:              o = scale * sum_l level_scales[l] S[l]^T q
//
// With num_levels levels the last one takes what would go to a higher one (saturation).
#pragma once

#include <cstdint>
#include <vector>

namespace fenwick::reference {

using Matrix = std::vector<double>;  // [K, V] row-major; empty: nothing was written yet
using Levels = std::vector<Matrix>;  // [num_levels]

struct Token {
  std::vector<double> q, k;  // [K]; no q: the token gives no output
  std::vector<double> v;     // [V]
  double g = 0.0, beta = 0.0;
  std::vector<double> level_scales;  // [L]
};

struct HeadArguments {
  std::int64_t K = 0, V = 0;
  std::int64_t base = 0;      // position of tokens[0]
  std::int64_t end_base = 0;  // position at whose start the final nodes are taken
  int num_levels = 0;
  double scale = 1.0;
  bool delta = false;  // gated delta rule
  std::vector<Token> tokens;
  Levels start;  // states at position `base`, merged as query `base` sees them
};

struct HeadResult {
  std::vector<std::vector<double>> o;  // [tokens][V]; empty for a token without a query
  Levels end;                          // states at position end_base, merged likewise
};

struct HeadGradients {
  std::vector<Token> tokens;
  Levels start;
};

// a += b, where an empty vector is zero.
void Add(std::vector<double>& a, const std::vector<double>& b);

HeadResult HeadForward(const HeadArguments& head);
HeadGradients HeadBackward(const HeadArguments& head, const std::vector<std::vector<double>>& d_o,
                           const Levels& d_end);

}  // namespace fenwick::reference
