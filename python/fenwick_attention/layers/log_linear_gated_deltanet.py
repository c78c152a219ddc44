"""The log-linear Gated DeltaNet mixer (paper section 3.3)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fenwick_attention import _ops
from fenwick_attention.functional import (
    LevelPolicy,
    log_linear_gated_delta_rule,
    log_linear_gated_delta_rule_step,
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


class HeadRMSNormGated(nn.Module):
    """``norm(o) * weight * silu(gate)`` over the head's ``V`` values."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, o: Tensor, gate: Tensor | None) -> Tensor:
        _ops.refuse_forward_mode("gated_rms_norm", o, gate, self.weight)
        return torch.ops.fenwick.gated_rms_norm(o, gate, self.weight.to(o.dtype), self.eps, True)


class LogLinearGatedDeltaNet(Mixer):
    """Gated DeltaNet whose state is a Fenwick tree: constructor and parameters as in
    ``fla.layers.GatedDeltaNet`` plus the authors' ``l_proj`` and ``L``.

    ``q, k, v`` are projections that pass a causal depthwise convolution and SiLU each, ``q`` and
    ``k`` L2-normalised; ``beta = sigmoid(b_proj x)``,
    ``g = -exp(A_log) softplus(a_proj x + dt_bias)``, ``level_scales = softplus(L * l_proj x)``;
    then the log-linear gated delta rule, an RMSNorm by head gated with ``silu(g_proj x)``, and
    ``o_proj``.

    Args:
        hidden_size: width of the residual stream.
        expand_v: value size over key size.
        head_dim: ``K``; ``V = expand_v * head_dim``.
        num_heads: ``G``.
        num_v_heads: ``H``, a multiple of ``num_heads`` (which is the default).
        mode: accepted and without effect.
        use_gate: gate the output norm with ``silu(g_proj x)``.
        use_short_conv: without it ``q, k, v`` pass SiLU alone.
        allow_neg_eigval: doubles beta.
        conv_size: width of the convolutions.
        conv_bias: whether they have biases.
        layer_idx: this layer's place in a :class:`fenwick_attention.Cache`.
        norm_eps: of the RMSNorm.
        max_num_levels: ``L``; 15 covers 16,384 tokens.
        level_policy: what happens beyond that, see :func:`fenwick_attention.log_linear_attention`.
        output_gate_activation: ``"swish"`` or ``"silu"``, the same.

    Raises:
        ValueError: sizes do not fit each other; the message names the argument.
    """

    float32_parameters = ("A_log", "dt_bias", "L")

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        max_num_levels: int = MAX_LEVELS,
        level_policy: LevelPolicy = "error",
        output_gate_activation: str = "swish",
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if output_gate_activation not in ("silu", "swish"):
            raise ValueError(
                f"output_gate_activation: expected 'silu' or 'swish', got "
                f"{output_gate_activation!r}"
            )
        value_heads = num_heads if num_v_heads is None else num_v_heads
        require_positive(
            hidden_size=hidden_size,
            head_dim=head_dim,
            num_heads=num_heads,
            num_v_heads=value_heads,
            conv_size=conv_size,
            max_num_levels=max_num_levels,
        )
        value_size = int(head_dim * expand_v)
        if value_size != head_dim * expand_v or value_size < 1:
            raise ValueError(
                "expand_v: expected head_dim * expand_v to be whole and at least 1, got "
                f"{head_dim} * {expand_v}"
            )
        if value_heads % num_heads:
            raise ValueError(
                f"num_v_heads: expected a multiple of num_heads = {num_heads}, got {num_v_heads}"
            )
        self.num_heads, self.num_v_heads = num_heads, value_heads
        self.head_k_dim, self.head_v_dim = head_dim, value_size
        self.conv_size, self.use_short_conv, self.use_gate = conv_size, use_short_conv, use_gate
        self.allow_neg_eigval = allow_neg_eigval
        self.max_num_levels, self.level_policy = max_num_levels, level_policy
        self.layer_idx = layer_idx
        key_dim, value_dim = num_heads * head_dim, value_heads * value_size

        def linear(out_features: int) -> nn.Linear:
            return nn.Linear(hidden_size, out_features, bias=False)

        def conv(size: int) -> nn.Conv1d:
            return nn.Conv1d(
                size, size, conv_size, groups=size, padding=conv_size - 1, bias=conv_bias
            )

        self.q_proj, self.k_proj = linear(key_dim), linear(key_dim)
        self.v_proj = linear(value_dim)
        self.a_proj, self.b_proj = linear(value_heads), linear(value_heads)
        self.l_proj = linear(value_heads * max_num_levels)
        if use_short_conv:
            self.q_conv1d, self.k_conv1d = conv(key_dim), conv(key_dim)
            self.v_conv1d = conv(value_dim)
        # A in (0, 16]: log of exactly 0 would never be learned away.
        self.A_log = nn.Parameter(torch.empty(value_heads).uniform_(1e-4, 16).log())
        self.dt_bias = nn.Parameter(inverse_softplus_uniform(value_heads))
        self.L = nn.Parameter(torch.ones(value_heads, max_num_levels))
        mark_no_weight_decay(self, self.float32_parameters)
        if use_gate:
            self.g_proj = linear(value_dim)
        self.o_norm = HeadRMSNormGated(value_size, norm_eps)
        self.o_proj = nn.Linear(value_dim, hidden_size, bias=False)

    def _mix(
        self, x: Tensor, last: LayerState | None, use_cache: bool, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, LayerState | None]:
        state = self._stepping_state(x, last, use_cache, cu_seqlens)
        inputs = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        conv_states: list[Tensor] = []
        if self.use_short_conv:
            convs = [self.q_conv1d, self.k_conv1d, self.v_conv1d]
            before = [None] * 3 if last is None else last.conv
            in_place = state is not None
            for i, (conv, conv_state) in enumerate(zip(convs, before, strict=True)):
                inputs[i], after = causal_conv1d(
                    conv, inputs[i], conv_state, cu_seqlens, keep=use_cache, in_place=in_place
                )
                conv_states += [] if after is None else [after]
        else:
            inputs = [F.silu(u) for u in inputs]
        q, k = (u.unflatten(-1, (self.num_heads, self.head_k_dim)) for u in inputs[:2])
        v = inputs[2].unflatten(-1, (self.num_v_heads, self.head_v_dim))
        beta = torch.sigmoid(at_least_float32(self.b_proj(x)))
        if self.allow_neg_eigval:
            beta = 2 * beta
        dt = F.softplus(at_least_float32(self.a_proj(x)) + self.dt_bias)
        g = -torch.exp(at_least_float32(self.A_log)) * dt
        dl = self.l_proj(x).unflatten(-1, (self.num_v_heads, -1))
        level_scales = F.softplus(self.L * dl).to(v.dtype)

        if state is not None:
            o = log_linear_gated_delta_rule_step(
                q,
                k,
                v,
                g,
                beta,
                level_scales,
                state,
                use_qk_l2norm_in_kernel=True,
                level_policy=self.level_policy,
            )
        else:
            o, state = log_linear_gated_delta_rule(
                q,
                k,
                v,
                g,
                beta,
                level_scales,
                initial_state=None if last is None else last.recurrent,
                output_final_state=use_cache,
                cu_seqlens=cu_seqlens,
                use_qk_l2norm_in_kernel=True,
                level_policy=self.level_policy,
            )
        gate = self.g_proj(x).view_as(o) if self.use_gate else None
        out = self.o_proj(self.o_norm(o, gate).flatten(-2))
        new = None if state is None else LayerState(conv_states, state)
        return out, new
