// Chunk forms. With C tokens a chunk, a = the running sum of g inside the chunk, A its total and
// D(i, j) = exp(g[j+1] + ... + g[i]) for j <= i, else 0:
//
//   scalar gate   o  = (Q K^T * D) V + e^a * Q S          S' = e^A S + K^T (D(C-1, .) * V)
//   delta rule    (I + tril(beta K K^T * D, -1)) [U W] = beta [V, e^a K]       (UT transform)
//                 N  = U - W S
//                 o  = (Q K^T * D) N + e^a * Q S          S' = e^A S + K^T (D(C-1, .) * N)
//
// Exponents are sums of g over the tokens in between, never differences of longer sums, so that
// they are accurate and g = -inf (a hard reset) gives exact zeros.
#include "models/linear_recurrence.h"

#include <algorithm>
#include <limits>

namespace fenwick::models {
namespace {

// Large enough for matrix products to dominate, small enough for the C x C work to stay below the
// work on the states of the usual head sizes (64 and 128).
constexpr std::int64_t kChunkLength = 64;

torch::ScalarType Wide(const torch::Tensor& x) {
  return x.scalar_type() == torch::kDouble ? torch::kDouble : torch::kFloat;
}

// Inputs by head, R = H / G value heads for each group:
//   q, k [B, G, 1, T, K]   v [B, G, R, T, V]   g, beta [B, G, R, T]
struct ByHead {
  torch::Tensor q, k, v, g, beta;
};

ByHead Transpose(const LinearInputs& inputs) {
  const auto type = Wide(inputs.v);
  const std::int64_t batch = inputs.q.size(0), tokens = inputs.q.size(1);
  const std::int64_t groups = inputs.q.size(2), ratio = inputs.v.size(2) / groups;
  const auto grouped = [&](const torch::Tensor& x) {
    return x.to(type).permute({0, 2, 1, 3}).unsqueeze(2);
  };
  const auto scalars = [&](const torch::Tensor& x) {
    return x.to(type).permute({0, 2, 1}).reshape({batch, groups, ratio, tokens});
  };
  ByHead result;
  result.q = grouped(inputs.q);
  result.k = grouped(inputs.k);
  result.v = inputs.v.to(type)
                 .permute({0, 2, 1, 3})
                 .reshape({batch, groups, ratio, tokens, inputs.v.size(3)});
  result.g = scalars(inputs.g);
  if (inputs.beta.defined()) result.beta = scalars(inputs.beta);
  return result;
}

// o [B, G, R, T, V], state [B, G, R, K, V] -> public shapes.
LinearOutput Finish(const torch::Tensor& o, const torch::Tensor& state, const torch::Tensor& like) {
  return {o.flatten(1, 2).transpose(1, 2).to(like.scalar_type()), state.flatten(1, 2)};
}

torch::Tensor InitialState(const torch::Tensor& state, const ByHead& x) {
  const std::vector<std::int64_t> sizes = {x.v.size(0), x.v.size(1), x.v.size(2), x.k.size(4),
                                           x.v.size(4)};
  return state.defined() ? state.reshape(sizes) : torch::zeros(sizes, x.v.options());
}

// [..., T, (D)] -> [..., chunks, length, (D)], padded with zeros, which neither decay nor write.
torch::Tensor Chunks(const torch::Tensor& x, std::int64_t axis, std::int64_t length) {
  const std::int64_t tokens = x.size(axis);
  const std::int64_t missing = (length - tokens % length) % length;
  torch::Tensor padded = x;
  if (missing > 0) {
    std::vector<std::int64_t> sizes = x.sizes().vec();
    sizes[axis] = missing;
    padded = torch::cat({x, x.new_zeros(sizes)}, axis);
  }
  return padded.unflatten(axis, {(tokens + missing) / length, length});
}

// g [..., C] -> D [..., C, C].
torch::Tensor Decays(const torch::Tensor& g) {
  const std::int64_t length = g.size(-1);
  const torch::Tensor sums =
      g.unsqueeze(-1).expand({-1, -1, -1, -1, length, length}).tril(-1).cumsum(-2);
  const torch::Tensor later =
      torch::ones({length, length}, g.options().dtype(torch::kBool)).triu(1);
  return sums.masked_fill(later, -std::numeric_limits<double>::infinity()).exp();
}

}  // namespace

LinearOutput LinearChunked(const LinearInputs& inputs, const torch::Tensor& state) {
  const std::int64_t tokens = inputs.q.size(1);
  const ByHead x = Transpose(inputs);
  torch::Tensor carried = InitialState(state, x);
  if (tokens == 0) return Finish(torch::zeros_like(x.v), carried, inputs.v);

  const std::int64_t length = std::min(tokens, kChunkLength);
  const torch::Tensor q = Chunks(x.q, 3, length);  // [B, G, 1, n, C, K]
  const torch::Tensor k = Chunks(x.k, 3, length);  // [B, G, 1, n, C, K]
  torch::Tensor v = Chunks(x.v, 3, length);        // [B, G, R, n, C, V]
  const torch::Tensor g = Chunks(x.g, 3, length);  // [B, G, R, n, C]

  const torch::Tensor decay = Decays(g);                                    // [..., C, C]
  const torch::Tensor from_start = g.cumsum(-1).exp().unsqueeze(-1);        // [..., C, 1]
  const torch::Tensor to_end = decay.select(-2, length - 1).unsqueeze(-1);  // [..., C, 1]
  const torch::Tensor total = from_start.narrow(-2, length - 1, 1);         // [..., 1, 1]
  const torch::Tensor k_transposed = k.transpose(-1, -2);
  const std::int64_t chunks = k.size(3);

  torch::Tensor w;  // delta rule: [B, G, R, n, C, K]
  if (x.beta.defined()) {
    const torch::Tensor beta = Chunks(x.beta, 3, length).unsqueeze(-1);
    const torch::Tensor system = (k.matmul(k_transposed) * decay * beta).tril(-1);
    const torch::Tensor right = torch::cat({beta * v, beta * from_start * k}, -1);
    const torch::Tensor solved = torch::linalg_solve_triangular(
        system, right, /*upper=*/false, /*left=*/true, /*unitriangular=*/true);
    w = solved.narrow(-1, v.size(-1), k.size(-1));
    v = solved.narrow(-1, 0, v.size(-1));
  }

  std::vector<torch::Tensor> before;  // of each chunk, the state that it starts with
  if (w.defined()) {
    std::vector<torch::Tensor> corrected;  // N of each chunk
    for (std::int64_t n = 0; n < chunks; ++n) {
      before.push_back(carried);
      corrected.push_back(v.select(3, n) - w.select(3, n).matmul(carried));
      carried = total.select(3, n) * carried +
                k_transposed.select(3, n).matmul(to_end.select(3, n) * corrected.back());
    }
    v = torch::stack(corrected, 3);
  } else {
    const torch::Tensor written = k_transposed.matmul(to_end * v);  // [B, G, R, n, K, V]
    for (std::int64_t n = 0; n < chunks; ++n) {
      before.push_back(carried);
      carried = total.select(3, n) * carried + written.select(3, n);
    }
  }
  const torch::Tensor weights = q.matmul(k_transposed) * decay;
  const torch::Tensor o = weights.matmul(v) + from_start * q.matmul(torch::stack(before, 3));
  return Finish(o.flatten(3, 4).narrow(3, 0, tokens), carried, inputs.v);
}

LinearOutput LinearRecurrent(const LinearInputs& inputs, const torch::Tensor& state) {
  const ByHead x = Transpose(inputs);
  torch::Tensor carried = InitialState(state, x);
  std::vector<torch::Tensor> outputs;
  for (std::int64_t t = 0; t < inputs.q.size(1); ++t) {
    const torch::Tensor k = x.k.narrow(3, t, 1);  // [B, G, 1, 1, K]
    torch::Tensor v = x.v.narrow(3, t, 1);        // [B, G, R, 1, V]
    carried = x.g.narrow(3, t, 1).exp().unsqueeze(-1) * carried;
    if (x.beta.defined()) v = x.beta.narrow(3, t, 1).unsqueeze(-1) * (v - k.matmul(carried));
    carried = carried + k.transpose(-1, -2).matmul(v);
    outputs.push_back(x.q.narrow(3, t, 1).matmul(carried));
  }
  return Finish(outputs.empty() ? torch::zeros_like(x.v) : torch::cat(outputs, 3), carried,
                inputs.v);
}

torch::Tensor LinearPacked(const LinearInputs& inputs, const std::vector<std::int64_t>& offsets) {
  // g = -inf on the first token of a sequence forgets all before it: one row, no padding.
  std::vector<std::int64_t> starts;
  for (std::size_t n = 0; n + 1 < offsets.size(); ++n) {
    if (offsets[n] < offsets[n + 1]) starts.push_back(offsets[n]);
  }
  LinearInputs reset = inputs;
  const torch::Tensor index = torch::tensor(starts, torch::kLong).to(inputs.g.device());
  reset.g = inputs.g.index_fill(1, index, -std::numeric_limits<double>::infinity());
  return LinearChunked(reset, {}).o;
}

}  // namespace fenwick::models
