"""The operators, in [B, T, H, D] layout with flash-linear-attention's argument names.

Shapes everywhere: ``B`` batch, ``T`` tokens, ``G`` query/key groups, ``H`` value heads (a multiple
of ``G``; head ``h`` reads group ``h // (H // G)``), ``K`` key size, ``V`` value size, ``L`` levels,
``N`` sequences (``B``, or ``len(cu_seqlens) - 1`` when packed).

They work under ``torch.compile(fullgraph=True)`` with dynamic ``T``, ``torch.export``, autocast
(``q``, ``k`` and ``v`` are cast), activation checkpointing and ``torch.func.vmap``, which folds the
mapped axis into ``B``. ``torch.func.grad``, forward-mode derivatives and second derivatives raise:
torch has the first two for no operator that is registered from outside. Use
``torch.autograd.grad``; ``is_grads_batched=True`` gives gradients by sample.
"""

from __future__ import annotations

import operator
from typing import Any, Literal

import torch
from torch import Tensor

from fenwick_attention import _ops
from fenwick_attention.state import STATE_CHUNK, LogLinearState, capacity, num_slots

LevelPolicy = Literal["error", "saturate"]


def num_levels(tokens: int) -> int:
    """Levels that ``tokens`` tokens need: ``bit_width(tokens - 1) + 1``."""
    tokens = operator.index(tokens)
    return 0 if tokens <= 0 else (tokens - 1).bit_length() + 1


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(sum(x**2) + eps)`` over the last axis, in float32, returned in ``x.dtype``."""
    _require_tensors({"x": x})
    _ops.refuse_forward_mode("l2_norm", x)
    return torch.ops.fenwick.l2_norm(x, eps)


def log_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    level_scales: Tensor,
    *,
    initial_state: LogLinearState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float | None = 1.0,
    level_policy: LevelPolicy = "error",
) -> tuple[Tensor, LogLinearState | None]:
    """Log-linear attention with a scalar gate (Mamba-2; paper section 3.2).

    ``o[t] = sum_{s<=t} level_scales[t, level(t,s)] exp(g[s+1]+...+g[t]) scale (q[t].k[s]) v[s]``
    with ``level(t, s) = bit_width(t xor s)``. Costs O(T log T); differentiable with respect to
    every tensor, states included.

    Args:
        q: queries ``[B, T, G, K]``; float32, bfloat16, float16 or float64.
        k: keys ``[B, T, G, K]``, dtype of ``q``.
        v: values ``[B, T, H, V]``, dtype of ``q``.
        g: log decays ``[B, T, H]``, at most 0, ``-inf`` resets; used in float32.
        level_scales: weights ``[B, T, H, L]``; dtype of ``q`` or float32.
        initial_state: states of the ``N`` sequences so far; not modified.
        output_final_state: also return the states after the last token.
        cu_seqlens: ``[N + 1]`` offsets of packed sequences (``B`` must be 1). On the CPU it costs
            no synchronisation.
        scale: multiplies ``q``; ``None`` means ``K ** -0.5``.
        level_policy: when a sequence has more tokens than ``L`` levels cover: ``"error"`` raises,
            ``"saturate"`` reads everything older through the last level.

    Returns:
        ``o`` ``[B, T, H, V]`` in the dtype of ``q``, and the final state or ``None``.

    Raises:
        RuntimeError, TypeError, ValueError: an argument is wrong; the message names it, what was
            expected and what came.
    """
    return _attention(
        "log_linear_attention",
        q,
        k,
        v,
        g,
        None,
        level_scales,
        initial_state,
        output_final_state,
        cu_seqlens,
        scale,
        level_policy,
    )


def log_linear_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    level_scales: Tensor,
    *,
    initial_state: LogLinearState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float | None = 1.0,
    use_qk_l2norm_in_kernel: bool = False,
    level_policy: LevelPolicy = "error",
) -> tuple[Tensor, LogLinearState | None]:
    """Log-linear gated delta rule (Gated DeltaNet; paper section 3.3).

    As :func:`log_linear_attention`, with the transition ``exp(g[t]) (I - beta[t] k[t] k[t]^T)`` in
    place of the scalar decay and writes ``beta[t] k[t] v[t]^T``.

    Args:
        beta: write strengths ``[B, T, H]``; dtype of ``q`` or float32.
        use_qk_l2norm_in_kernel: L2-normalise ``q`` and ``k`` first (eps 1e-6 inside the root);
            otherwise the caller has normalised ``k``.

    The other arguments, the results and the errors are those of :func:`log_linear_attention`.
    """
    if use_qk_l2norm_in_kernel:
        q, k = l2_norm(q), l2_norm(k)
    return _attention(
        "log_linear_gated_delta_rule",
        q,
        k,
        v,
        g,
        beta,
        level_scales,
        initial_state,
        output_final_state,
        cu_seqlens,
        scale,
        level_policy,
    )


def log_linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    level_scales: Tensor,
    state: LogLinearState,
    *,
    scale: float | None = 1.0,
    level_policy: LevelPolicy = "error",
) -> Tensor:
    """Decoding: appends 1 to 64 tokens to each of ``B`` sequences, each at its own position.

    ``state`` is updated in place (its node slots grow when needed; :meth:`LogLinearState.reserve`
    avoids that, e.g. for CUDA graphs). Not differentiable. Nothing synchronises: positions are read
    on the device. Shapes and dtypes as for :func:`log_linear_attention`.

    Returns:
        ``o`` ``[B, T, H, V]``.

    Raises:
        RuntimeError, TypeError, ValueError: an argument is wrong (the message names it), or the
            call stands in ``torch.func.vmap``.
    """
    return _step("log_linear_attention", q, k, v, g, None, level_scales, state, scale, level_policy)


def log_linear_gated_delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    level_scales: Tensor,
    state: LogLinearState,
    *,
    scale: float | None = 1.0,
    use_qk_l2norm_in_kernel: bool = False,
    level_policy: LevelPolicy = "error",
) -> Tensor:
    """Decoding with the gated delta rule; see :func:`log_linear_attention_step`."""
    if use_qk_l2norm_in_kernel:
        q, k = l2_norm(q), l2_norm(k)
    return _step(
        "log_linear_gated_delta_rule", q, k, v, g, beta, level_scales, state, scale, level_policy
    )


def chunk_log_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    level_scales: Tensor,
    initial_state: LogLinearState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float | None = 1.0,
) -> tuple[Tensor, LogLinearState | None]:
    """Drop-in for ``fla.ops.log_linear_attn.chunk_log_linear_attn``, with its exact signature."""
    return log_linear_attention(
        q,
        k,
        v,
        g,
        level_scales,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        scale=scale,
    )


def _require_tensors(named: dict[str, Any]) -> None:
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")


def _require_state(name: str, state: object, beta: Tensor | None) -> None:
    """``state`` is a state of the operator: with betas exactly where the operator has ``beta``."""
    if not isinstance(state, LogLinearState):
        raise TypeError(f"{name}: expected a LogLinearState, got {type(state).__name__}")
    if (state.beta is None) != (beta is None):
        kinds = "scalar gate (without beta)", "gated delta rule (with beta)"
        expected, got = kinds if beta is None else kinds[::-1]
        raise ValueError(f"{name}: expected a state of the {expected}, got one of the {got}")


def _prepare(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    level_scales: Tensor,
    scale: float | None,
    level_policy: str,
) -> tuple[list[Tensor], float, bool]:
    """Argument conventions of Python: autocast, float32 gates, optional scale, policy names."""
    if level_policy not in ("error", "saturate"):
        raise ValueError(f"level_policy: expected 'error' or 'saturate', got {level_policy!r}")
    named: dict[str, Any] = {"q": q, "k": k, "v": v, "g": g, "level_scales": level_scales}
    if name == "log_linear_gated_delta_rule":
        named["beta"] = beta
    _require_tensors(named)
    for argument, x, axes in (("q", q, "G, K"), ("k", k, "G, K"), ("v", v, "H, V")):
        if x.dim() != 4:
            raise ValueError(f"{argument}: expected shape [B, T, {axes}], got {list(x.shape)}")
    for argument in ("g", "beta", "level_scales"):
        if argument in named and named[argument].is_complex():
            raise TypeError(f"{argument}: expected real numbers, got {named[argument].dtype}")
    _ops.refuse_forward_mode(name, *named.values())
    device = q.device.type
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32

    def weight(x: Tensor) -> Tensor:
        return x if x.dtype in (q.dtype, wide) else x.to(q.dtype)

    gates = [g.to(wide)] if beta is None else [g.to(wide), weight(beta)]
    tensors = [q, k, v, *gates, weight(level_scales)]
    return tensors, q.shape[-1] ** -0.5 if scale is None else scale, level_policy == "saturate"


def _attention(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    level_scales: Tensor,
    state: LogLinearState | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    scale: float | None,
    level_policy: str,
) -> tuple[Tensor, LogLinearState | None]:
    _ops.load()
    tensors, scale, saturate = _prepare(name, q, k, v, g, beta, level_scales, scale, level_policy)
    if cu_seqlens is not None:
        _require_tensors({"cu_seqlens": cu_seqlens})
    if state is not None:
        _require_state("initial_state", state, beta)
    if state is None and not output_final_state:
        op = getattr(torch.ops.fenwick, name)
        return op(*tensors, cu_seqlens=cu_seqlens, scale=scale, saturate=saturate), None

    if state is None:
        state = LogLinearState.empty(
            q.shape[0] if cu_seqlens is None else max(cu_seqlens.numel() - 1, 0),
            groups=k.shape[2],
            heads=v.shape[2],
            key_size=k.shape[3],
            value_size=v.shape[3],
            dtype=tensors[0].dtype,
            device=q.device,
            beta_dtype=None if beta is None else tensors[4].dtype,
        )
    longest = q.shape[1]
    if cu_seqlens is not None and cu_seqlens.device.type == "cpu" and cu_seqlens.numel() > 1:
        longest = int(cu_seqlens.diff().max())
    max_position = state.max_position + longest
    slots = num_slots(max_position, level_scales.shape[-1] if saturate else None)
    # A truncated state may have folded more than a fresh one of its length would have.
    slots = max(slots, state.nodes.shape[2])
    op = getattr(torch.ops.fenwick, f"{name}_with_state")
    o, *parts = op(
        *tensors,
        *_state_tensors(state),
        state.max_position,
        slots,
        cu_seqlens=cu_seqlens,
        scale=scale,
        saturate=saturate,
    )
    if not output_final_state:
        return o, None
    beta_ring = None if beta is None else parts.pop(3)
    k_ring, v_ring, g_ring, nodes, position, base = parts
    final = LogLinearState(k_ring, v_ring, g_ring, beta_ring, nodes, position, base, max_position)
    return o, final


def _step(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    level_scales: Tensor,
    state: LogLinearState,
    scale: float | None,
    level_policy: str,
) -> Tensor:
    _ops.load()
    tensors, scale, saturate = _prepare(name, q, k, v, g, beta, level_scales, scale, level_policy)
    _require_state("state", state, beta)
    tokens = q.shape[1]
    if not 1 <= tokens <= STATE_CHUNK:
        raise ValueError(f"q: expected 1 to {STATE_CHUNK} new tokens in a step, got {tokens}")
    grown = state.reserve(tokens, level_scales.shape[-1] if saturate else None)
    state.nodes = grown.nodes
    if _capturing(q):
        # A replay starts where the last one ended: only the slots bound its position.
        reachable = capacity(state.nodes.shape[2], level_scales.shape[-1], saturate)
        state.max_position = max(state.max_position, reachable - tokens)
    op = getattr(torch.ops.fenwick, f"{name}_step")
    parts = _state_tensors(state)
    o = op(*tensors, *parts, state.max_position, scale=scale, saturate=saturate)
    _ops.mark_written(*parts)
    state.max_position += tokens
    return o


def _capturing(q: Tensor) -> bool:
    if not q.is_cuda or torch.compiler.is_compiling():
        return False
    return torch.cuda.is_current_stream_capturing()


def _state_tensors(state: LogLinearState) -> list[Tensor]:
    """The state's tensors in the operators' order."""
    gates = [state.g] if state.beta is None else [state.g, state.beta]
    return [state.k, state.v, *gates, state.nodes, state.position, state.base]
