"""The recurrences in plain PyTorch: slow, differentiable, and independent of the C++
reference. Also the layers, from torch's own functions."""

import torch
import torch.nn.functional as F
from torch import Tensor


def countr_zero(t: int) -> int:
    return (t & -t).bit_length() - 1


def recurrence(
    q: Tensor,  # [T, G, K]
    k: Tensor,  # [T, G, K]
    v: Tensor,  # [T, H, V]
    g: Tensor,  # [T, H]
    beta: Tensor | None,  # [T, H]; None: scalar gate
    level_scales: Tensor,  # [T, H, L]
    scale: float,
) -> Tensor:
    """One sequence, one K x V state per level; the last level absorbs all that is older."""
    tokens, heads, levels = level_scales.shape
    repeats = heads // q.shape[1]
    q, k = (x.repeat_interleave(repeats, dim=1) for x in (q, k))
    states = v.new_zeros(levels, heads, k.shape[-1], v.shape[-1])
    outputs = []
    for t in range(tokens):
        if t > 0 and levels > 1:
            into = min(countr_zero(t) + 1, levels - 1)
            merged = states[: into + 1].sum(0, keepdim=True)
            states = torch.cat([torch.zeros_like(states[:into]), merged, states[into + 1 :]])
        decay = g[t].exp()[:, None, None]
        write = k[t][:, :, None] * v[t][:, None, :]
        if beta is not None:
            b = beta[t][:, None, None]
            recalled = torch.einsum("hk,lhkv->lhv", k[t], states)
            states = states - b * k[t][:, :, None] * recalled[:, :, None, :]
            write = b * write
        states = decay * states
        states = torch.cat([states[:1] + write, states[1:]])
        read = torch.einsum("hk,lhkv->lhv", q[t] * scale, states)
        outputs.append(torch.einsum("hl,lhv->hv", level_scales[t], read))
    return torch.stack(outputs) if outputs else v.new_zeros(0, heads, v.shape[-1])


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    level_scales: Tensor,
    cu_seqlens: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Batch [B, T, ...] of sequences, or one packed row."""

    def run(row: int, rows: slice) -> Tensor:
        parts = (None if x is None else x[row, rows] for x in (q, k, v, g, beta, level_scales))
        return recurrence(*parts, scale)

    if cu_seqlens is None:
        return torch.stack([run(row, slice(None)) for row in range(q.shape[0])])
    offsets = cu_seqlens.tolist()
    return torch.cat([run(0, slice(a, b)) for a, b in zip(offsets, offsets[1:])])[None]


def causal_conv1d(
    x: Tensor,  # [B, T, D]
    weight: Tensor,  # [D, W]
    bias: Tensor | None,  # [D]
    initial_state: Tensor | None,  # [N, D, W - 1]
    cu_seqlens: Tensor | None = None,
    silu: bool = True,
) -> Tensor:
    if cu_seqlens is not None:
        offsets = cu_seqlens.tolist()
        parts = [
            causal_conv1d(
                x[:, a:b],
                weight,
                bias,
                None if initial_state is None else initial_state[n : n + 1],
                silu=silu,
            )
            for n, (a, b) in enumerate(zip(offsets, offsets[1:]))
        ]
        return torch.cat(parts, dim=1)
    channels, width = weight.shape
    if initial_state is None:
        initial_state = x.new_zeros(x.shape[0], channels, width - 1)
    padded = torch.cat([initial_state, x.transpose(1, 2)], dim=2)
    if x.shape[1] == 0:
        return x.clone()
    z = F.conv1d(padded, weight[:, None], bias, groups=channels).transpose(1, 2)
    return F.silu(z) if silu else z


def gated_rms_norm(
    x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, norm_before_gate: bool
) -> Tensor:
    gated = torch.ones_like(x) if gate is None else F.silu(gate)
    if norm_before_gate:
        return F.rms_norm(x, x.shape[-1:], weight, eps) * gated
    return F.rms_norm(x * gated, x.shape[-1:], weight, eps)


def l2_norm(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + eps).sqrt()


def relative_error(out: Tensor, ref: Tensor) -> float:
    """||out - ref|| / ||ref||, and ||out|| where ref is zero; never below a tolerance when NaN."""
    out, ref = out.detach().double(), ref.detach().double()
    norm = ref.norm()
    return float((out - ref).norm() / (norm if norm > 0 else 1.0))
