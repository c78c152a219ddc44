"""The log-linear Mamba-2 mixer (paper section 3.2)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fenwick_attention import _ops
from fenwick_attention.functional import (
    LevelPolicy,
    log_linear_attention,
    log_linear_attention_step,
)
from fenwick_attention.layers.common import (
    MAX_LEVELS,
    LayerState,
    Mixer,
    at_least_float32,
    causal_conv1d,
    inverse_softplus_uniform,
    mark_no_weight_decay,
    require_positive,
)


class GatedRMSNorm(nn.Module):
    """``norm(y * silu(z)) * weight``, or ``norm(y) * weight * silu(z)`` with norm_before_gate."""

    def __init__(
        self, hidden_size: int, eps: float, norm_before_gate: bool = False, groups: int = 1
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps
        self.norm_before_gate = norm_before_gate
        self.groups = groups

    def forward(self, y: Tensor, z: Tensor | None) -> Tensor:
        _ops.refuse_forward_mode("gated_rms_norm", y, z, self.weight)
        weight = self.weight.to(y.dtype)
        norm = torch.ops.fenwick.gated_rms_norm
        if self.groups == 1:
            return norm(y, z, weight, self.eps, self.norm_before_gate)
        split = (self.groups, -1)
        ones = weight.new_ones(weight.numel() // self.groups)
        y = y.unflatten(-1, split)
        z = None if z is None else z.unflatten(-1, split)
        return norm(y, z, ones, self.eps, self.norm_before_gate).flatten(-2) * weight


class LogLinearMamba2(Mixer):
    """Mamba-2 whose state is a Fenwick tree: constructor and parameters as in
    ``fla.layers.LogLinearMamba2``, so that its checkpoints load by name.

    ``z, xBC, dt, dl = in_proj(x)``; ``xBC`` passes a causal depthwise convolution and SiLU and
    splits into ``x, B, C``; ``dt = softplus(dt + dt_bias)``, ``A = -exp(A_log)``,
    ``level_scales = softplus(L * dl)``; then log-linear attention with ``q = C``, ``k = B``,
    ``v = x dt``, ``g = A dt``, plus ``D x``, a gated RMSNorm and ``out_proj``.

    Args:
        num_heads: ``H``; ``H * head_dim`` must be ``expand * hidden_size``.
        head_dim: ``V``.
        hidden_size: width of the residual stream.
        state_size: ``K``.
        expand: inner width over ``hidden_size``.
        n_groups: ``G``; heads of a group share B and C and are normalised together.
        conv_kernel: width of the convolution.
        conv_init: its weights start uniform in ``[-conv_init, conv_init]``; ``None``: torch's way.
        use_conv_bias: whether the convolution has a bias.
        hidden_act: ``"silu"`` or ``"swish"``, the same.
        rmsnorm: gated RMSNorm before ``out_proj``; otherwise only the gate.
        D_has_hdim: ``D`` has ``H * V`` entries instead of ``H``.
        norm_before_gate: ``norm(y) * silu(z)`` instead of ``norm(y * silu(z))``.
        chunk_size: accepted and without effect.
        dt_limit: ``dt`` is clamped to this range.
        dt_min: ``dt`` starts log-uniform in ``[dt_min, dt_max]``, at least ``dt_init_floor``.
        dt_max: see ``dt_min``.
        dt_init_floor: see ``dt_min``.
        use_bias: whether ``in_proj`` and ``out_proj`` have biases.
        norm_eps: of the RMSNorm.
        layer_idx: this layer's place in a :class:`fenwick_attention.Cache`.
        max_num_levels: ``L``; 15 covers 16,384 tokens.
        level_policy: what happens beyond that, see :func:`fenwick_attention.log_linear_attention`.

    Raises:
        ValueError: sizes do not fit each other; the message names the argument.
    """

    float32_parameters = ("A_log", "D", "L", "dt_bias")

    def __init__(
        self,
        num_heads: int,
        head_dim: int = 64,
        hidden_size: int = 2048,
        state_size: int = 128,
        expand: float = 2,
        n_groups: int = 1,
        conv_kernel: int = 4,
        conv_init: float | None = None,
        use_conv_bias: bool = False,
        hidden_act: str = "silu",
        rmsnorm: bool = True,
        D_has_hdim: bool = False,
        norm_before_gate: bool = False,
        chunk_size: int = 64,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        use_bias: bool = True,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
        max_num_levels: int = MAX_LEVELS,
        level_policy: LevelPolicy = "error",
        **kwargs: Any,
    ) -> None:
        super().__init__()
        require_positive(
            num_heads=num_heads,
            head_dim=head_dim,
            hidden_size=hidden_size,
            state_size=state_size,
            n_groups=n_groups,
            conv_kernel=conv_kernel,
            max_num_levels=max_num_levels,
        )
        d_inner = round(expand * hidden_size)
        if num_heads * head_dim != d_inner:
            raise ValueError(
                f"num_heads: expected num_heads * head_dim == expand * hidden_size = {d_inner}, "
                f"got {num_heads} * {head_dim}"
            )
        if num_heads % n_groups:
            raise ValueError(f"n_groups: expected a divisor of {num_heads} heads, got {n_groups}")
        if hidden_act not in ("silu", "swish"):
            raise ValueError(f"hidden_act: expected 'silu' or 'swish', got {hidden_act!r}")
        self.num_heads, self.head_dim, self.n_groups = num_heads, head_dim, n_groups
        self.state_size, self.d_inner, self.conv_kernel = state_size, d_inner, conv_kernel
        self.max_num_levels, self.level_policy = max_num_levels, level_policy
        self.dt_limit = tuple(dt_limit)
        self.layer_idx = layer_idx

        conv_dim = d_inner + 2 * n_groups * state_size
        self.conv1d = nn.Conv1d(
            conv_dim,
            conv_dim,
            conv_kernel,
            groups=conv_dim,
            padding=conv_kernel - 1,
            bias=use_conv_bias,
        )
        if conv_init is not None:
            nn.init.uniform_(self.conv1d.weight, -conv_init, conv_init)
        # z, xBC, dt, dl, in this order.
        self.projections = [d_inner, conv_dim, num_heads, num_heads * max_num_levels]
        self.in_proj = nn.Linear(hidden_size, sum(self.projections), bias=use_bias)
        self.dt_bias = nn.Parameter(
            inverse_softplus_uniform(num_heads, dt_min, dt_max, dt_init_floor)
        )
        self.A_log = nn.Parameter(torch.log(torch.arange(1, num_heads + 1).float()))
        self.L = nn.Parameter(torch.ones(num_heads, max_num_levels))
        self.D = nn.Parameter(torch.ones(d_inner if D_has_hdim else num_heads))
        mark_no_weight_decay(self, self.float32_parameters)
        self.norm = GatedRMSNorm(d_inner, norm_eps, norm_before_gate, n_groups) if rmsnorm else None
        self.out_proj = nn.Linear(d_inner, hidden_size, bias=use_bias)

    def _mix(
        self, x: Tensor, last: LayerState | None, use_cache: bool, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, LayerState | None]:
        z, xbc, dt, dl = self.in_proj(x).split(self.projections, dim=-1)
        state = self._stepping_state(x, last, use_cache, cu_seqlens)
        xbc, conv_state = causal_conv1d(
            self.conv1d,
            xbc,
            None if last is None else last.conv[0],
            cu_seqlens,
            keep=use_cache,
            in_place=state is not None,
        )
        groups = self.n_groups * self.state_size
        u, b, c = xbc.split([self.d_inner, groups, groups], dim=-1)
        u = u.unflatten(-1, (self.num_heads, self.head_dim))
        b, c = (t.unflatten(-1, (self.n_groups, self.state_size)) for t in (b, c))
        dt = F.softplus(at_least_float32(dt) + self.dt_bias)
        if self.dt_limit != (0.0, float("inf")):
            dt = dt.clamp(*self.dt_limit)
        g = -torch.exp(at_least_float32(self.A_log)) * dt
        level_scales = F.softplus(self.L * dl.unflatten(-1, (self.num_heads, -1))).to(u.dtype)
        v = (u * dt[..., None]).to(u.dtype)

        if state is not None:
            y = log_linear_attention_step(
                c, b, v, g, level_scales, state, level_policy=self.level_policy
            )
        else:
            y, state = log_linear_attention(
                c,
                b,
                v,
                g,
                level_scales,
                initial_state=None if last is None else last.recurrent,
                output_final_state=use_cache,
                cu_seqlens=cu_seqlens,
                level_policy=self.level_policy,
            )
        skip = self.D.to(u.dtype)
        y = y + u * (skip[:, None] if skip.numel() == self.num_heads else skip.view_as(u[0, 0]))
        y = y.flatten(-2)
        y = self.norm(y, z) if self.norm is not None else y * F.silu(z)
        new = None if state is None or conv_state is None else LayerState([conv_state], state)
        return self.out_proj(y), new
