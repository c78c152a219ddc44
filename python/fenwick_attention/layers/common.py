"""What both mixers share: padding, convolution state, caches, float32 parameters."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fenwick_attention import _ops
from fenwick_attention.cache import LayerState, require_cache
from fenwick_attention.functional import LevelPolicy, num_levels
from fenwick_attention.state import STATE_CHUNK, LogLinearState

MAX_LEVELS = 15  # the peers' default: 16,384 tokens


@dataclasses.dataclass(eq=False)
class Packing:
    """How a padded batch ``[B, T]`` was packed into one row of its real tokens."""

    indices: Tensor  # [total] positions in the flattened batch
    cu_seqlens: Tensor  # [B + 1] int64 on the CPU
    shape: tuple[int, int]

    @classmethod
    def from_mask(cls, attention_mask: Tensor, x: Tensor) -> Packing | None:
        """``None`` where the mask (1 = token, 0 = padding) of the last ``T`` tokens hides nothing
        of ``x`` ``[B, T, ...]``."""
        batch, tokens = x.shape[:2]
        shape = tuple(attention_mask.shape)
        if len(shape) != 2 or shape[0] != batch or shape[1] < tokens:
            raise ValueError(
                f"attention_mask: expected [{batch}, {tokens}], or more tokens when decoding, got "
                f"{list(shape)}"
            )
        values = attention_mask[:, shape[1] - tokens :]
        mask = values != 0
        others = (mask & (values != 1)).sum()  # an additive mask has them, and reads upside down
        lengths, others = torch.cat([mask.sum(dim=1), others[None]]).cpu().split([batch, 1])
        if others:
            raise ValueError(
                f"attention_mask: expected 1 for tokens and 0 for padding, got {int(others)} other "
                "values"
            )
        if bool((lengths == mask.shape[1]).all()):
            return None
        cu_seqlens = nn.functional.pad(lengths.cumsum(0), (1, 0))
        return cls(mask.flatten().nonzero().squeeze(1), cu_seqlens, (batch, tokens))

    def pack(self, x: Tensor) -> Tensor:
        """``[B, T, ...]`` to ``[1, total, ...]``."""
        return x.flatten(0, 1).index_select(0, self.indices)[None]

    def unpack(self, x: Tensor) -> Tensor:
        """``[1, total, ...]`` to ``[B, T, ...]`` with zeros where padding was."""
        batch, tokens = self.shape
        flat = x.new_zeros(batch * tokens, *x.shape[2:]).index_copy(0, self.indices, x[0])
        return flat.unflatten(0, (batch, tokens))


def causal_conv1d(
    conv: nn.Conv1d,
    x: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    keep: bool,
    in_place: bool,
) -> tuple[Tensor, Tensor | None]:
    """Depthwise causal convolution, then SiLU, of ``x`` ``[B, T, D]`` after ``state``.

    Returns the result and, to ``keep``, the state after ``x``: the last ``W - 1`` inputs of every
    sequence ``[N, D, W - 1]``. ``in_place`` updates ``state`` itself (decoding).
    """
    weight, bias = conv.weight.squeeze(1), conv.bias
    _ops.refuse_forward_mode("causal_conv1d", x, weight, bias, state)
    if weight.dtype != x.dtype:
        weight = weight.to(x.dtype)
        bias = None if bias is None else bias.to(x.dtype)
    if in_place and state is not None:
        y = torch.ops.fenwick.causal_conv1d_step(x, weight, bias, state)
        _ops.mark_written(state)
        return y, state
    y = torch.ops.fenwick.causal_conv1d(x, weight, bias, state, cu_seqlens)
    return y, conv_state_after(x, weight.shape[1], state, cu_seqlens) if keep else None


def conv_state_after(
    x: Tensor, width: int, state: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    """The last ``width - 1`` inputs of every sequence, ``[N, D, width - 1]``, zeros before it."""
    keep = width - 1
    if cu_seqlens is None:
        before = x.new_zeros(x.shape[0], keep, x.shape[2])
        if state is not None:
            before = state.transpose(1, 2)
        return torch.cat([before, x], dim=1)[:, x.shape[1] :].transpose(1, 2).contiguous()
    if x.shape[1] == 0:
        shape = cu_seqlens.numel() - 1, x.shape[2], keep
        return x.new_zeros(shape) if state is None else state.clone()
    begin, end = (c.to(x.device)[:, None] for c in (cu_seqlens[:-1], cu_seqlens[1:]))
    row = end - keep + torch.arange(keep, device=x.device)  # [N, keep] rows of x
    inside = (row >= begin)[..., None]
    rows = x[0].index_select(0, row.clamp(min=0).flatten()).unflatten(0, row.shape)
    before = torch.zeros_like(rows)
    if state is not None:
        column = (row - begin + keep).clamp(0, keep - 1)[..., None].expand_as(rows)
        before = state.transpose(1, 2).gather(1, column)
    return torch.where(inside, rows, before).transpose(1, 2).contiguous()


def require_positive(**sizes: Any) -> None:
    """Raises ``ValueError`` that names a size below 1."""
    for name, size in sizes.items():
        if not isinstance(size, numbers.Integral) or size < 1:
            raise ValueError(f"{name}: expected a whole number of at least 1, got {size!r}")


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` in float32, or as it is where it is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def inverse_softplus_uniform(
    size: int, dt_min: float = 0.001, dt_max: float = 0.1, dt_init_floor: float = 1e-4
) -> Tensor:
    """``dt_bias`` such that softplus(dt_bias) is log-uniform in [dt_min, dt_max] (Mamba-2)."""
    low, high = math.log(dt_min), math.log(dt_max)
    dt = torch.exp(torch.rand(size) * (high - low) + low).clamp(min=dt_init_floor)
    return dt + torch.log(-torch.expm1(-dt))


class Float32Parameters(nn.Module):
    """Keeps the named parameters in float32 under ``.to(bfloat16)``, ``.half()`` and the like.

    Decay rates live where bfloat16 is too coarse. Devices change as usual; ``.double()`` is obeyed.
    """

    float32_parameters: tuple[str, ...] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def keep(t: Tensor) -> Tensor:
            out = fn(t)
            narrowed = out.dtype in (torch.bfloat16, torch.float16)
            return t.to(out.device) if narrowed and t.dtype == torch.float32 else out

        held = {name: self._parameters.pop(name) for name in self.float32_parameters}
        super()._apply(fn, recurse)
        # The module that holds only these parameters goes through torch's own conversion.
        holder = nn.Module()
        holder._parameters.update(held)
        nn.Module._apply(holder, keep)
        self._parameters.update(holder._parameters)
        return self


class Mixer(Float32Parameters):
    """The walk of a call that both mixers share; a subclass computes ``_mix``."""

    layer_idx: int | None = None
    max_num_levels: int
    level_policy: LevelPolicy

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Any]:
        """Mixes ``hidden_states`` ``[B, T, hidden_size]``, or packed ``[1, T, hidden_size]`` with
        ``cu_seqlens`` ``[N + 1]``.

        Args:
            hidden_states: any dtype that the parameters have; A_log, dt_bias, D and L are float32
                whatever it is.
            attention_mask: ``[B, T]`` (or more tokens, of which the last ``T`` count); 1 for a
                token, 0 for padding, anywhere. A padded batch equals its rows alone; positions of
                padding come out as zeros.
            past_key_values: a :class:`fenwick_attention.Cache` to go on from; needs ``layer_idx``.
            use_cache: update it. Without gradients, 1 to 64 tokens update it in place.
            output_attentions: accepted and without effect.
            cu_seqlens: offsets of packed sequences; on the CPU it costs no synchronisation. Where
                it is given, ``attention_mask`` is not read.

        Returns:
            The output ``[B, T, hidden_size]``, ``None`` (no attention weights exist) and
            ``past_key_values``.

        Raises:
            ValueError: a mask of another shape or with other values; another class of cache; a
                cache and no ``layer_idx``; a step past the levels (the cache stays as it was).
        """
        _ops.load()
        packing = None
        if attention_mask is not None and cu_seqlens is None:
            packing = Packing.from_mask(attention_mask, hidden_states)
        if packing is not None:
            hidden_states, cu_seqlens = packing.pack(hidden_states), packing.cu_seqlens
        last = None
        if past_key_values is not None:
            require_cache(past_key_values)
            if self.layer_idx is None:
                raise ValueError(
                    "layer_idx: expected this layer's place in past_key_values, got None"
                )
            last = past_key_values[self.layer_idx]
        out, new = self._mix(hidden_states, last, bool(use_cache), cu_seqlens)
        if use_cache and past_key_values is not None:
            past_key_values[self.layer_idx] = new
        return out if packing is None else packing.unpack(out), None, past_key_values

    def _mix(
        self, x: Tensor, last: LayerState | None, use_cache: bool, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, LayerState | None]:
        """Output ``[B, T, hidden_size]`` and, with ``use_cache``, the state after ``x``."""
        raise NotImplementedError

    def _stepping_state(
        self, x: Tensor, last: LayerState | None, use_cache: bool, cu_seqlens: Tensor | None
    ) -> LogLinearState | None:
        """The state, where the decode kernel may update it in place. Raises before the convolution
        is stepped where the kernel would raise behind it."""
        if last is None or not use_cache or cu_seqlens is not None or torch.is_grad_enabled():
            return None
        state, tokens = last.recurrent, x.shape[1]
        if not 1 <= tokens <= STATE_CHUNK:
            return None
        most = 2 ** (self.max_num_levels - 1)
        if self.level_policy == "error" and state.max_position + tokens > most:
            longest = state.max_position  # a bound; the kernels on the CPU read the positions
            if state.position.device.type == "cpu":
                longest = int(state.position.max())
            if longest + tokens > most:
                raise ValueError(
                    f"max_num_levels: expected at least {num_levels(longest + tokens)} for "
                    f"{longest + tokens} tokens (or level_policy saturate), got "
                    f"{self.max_num_levels}"
                )
        return state


def mark_no_weight_decay(module: nn.Module, names: tuple[str, ...]) -> None:
    """Sets the peers' flag that optimiser set-ups look for."""
    for name in names:
        getattr(module, name)._no_weight_decay = True  # type: ignore[attr-defined]
