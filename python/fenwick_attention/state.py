"""The state of sequences between calls.

Layout (the same as ``include/fenwick/state.h``): the newest tokens as they came, in a ring of
``STATE_RING`` slots (position ``p`` at slot ``p % STATE_RING``), and everything older, positions
``[0, base)``, as one K x V matrix per live Fenwick node over chunks of ``STATE_CHUNK`` tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

STATE_CHUNK = 64
STATE_RING = 2 * STATE_CHUNK


def next_base(base: int, position: int) -> int:
    """Tokens folded into nodes once ``position`` tokens were appended to a state at ``base``."""
    chunks = -(-position // STATE_CHUNK)
    return max(base, (max(chunks, 2) - 2) * STATE_CHUNK)


def num_slots(position: int, num_levels: int | None = None) -> int:
    """Node slots that a state of ``position`` tokens needs.

    ``num_levels`` (the ``L`` of ``level_scales``) bounds them when ``level_policy="saturate"``.
    """
    slots = (next_base(0, position) // STATE_CHUNK).bit_length()
    return slots if num_levels is None else min(slots, max(0, num_levels - 8) + 1)


def capacity(slots: int, num_levels: int, saturate: bool) -> int:
    """Tokens that a state with this many node slots may reach without growing, given ``L``."""
    if not saturate:
        return min((2**slots + 1) * STATE_CHUNK, 2 ** (num_levels - 1))
    full = slots >= num_slots(2**30, num_levels)  # the last slot absorbs the rest
    return 2**30 if full else (2**slots + 1) * STATE_CHUNK


def num_step_slots(position: int, num_levels: int | None = None) -> int:
    """Node slots with which decoding up to ``position`` tokens on the CPU is fastest.

    Just after a power of two one more than :func:`num_slots`: a step keeps the sum of the nodes
    there that will be merged next.
    """
    base = next_base(0, position)
    ahead = STATE_CHUNK if base > 2 * STATE_CHUNK and position - base > STATE_CHUNK else 0
    return num_slots(base + ahead + 2 * STATE_CHUNK, num_levels)


@dataclasses.dataclass(eq=False)
class LogLinearState:
    """State of ``N`` sequences, made of tensors on one device.

    Attributes:
        k: ``[N, STATE_RING, G, K]``, the newest keys.
        v: ``[N, STATE_RING, H, V]``, the newest values.
        g: ``[N, STATE_RING, H]`` float32, their log decays.
        beta: ``[N, STATE_RING, H]``, their write strengths; ``None`` for the scalar gate.
        nodes: ``[N, H, S, K, V]`` float32; node ``b`` covers ``2**b`` chunks and is live exactly
            when bit ``b`` of ``base // STATE_CHUNK`` is set.
        position: ``[N]`` int64, tokens seen.
        base: ``[N]`` int64, tokens folded into ``nodes``.
        max_position: upper bound of ``position`` that the host knows without a synchronisation.

    Gradients flow through ``k``, ``v``, ``g``, ``beta`` and ``nodes``.
    """

    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None
    nodes: Tensor
    position: Tensor
    base: Tensor
    max_position: int = 0

    @classmethod
    def empty(
        cls,
        num_sequences: int,
        *,
        groups: int,
        heads: int,
        key_size: int,
        value_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        beta_dtype: torch.dtype | None = None,
    ) -> LogLinearState:
        """States of ``num_sequences`` sequences that saw no token yet.

        ``beta_dtype`` makes a state for the gated delta rule.
        """
        n, ring = num_sequences, STATE_RING
        wide = torch.float64 if dtype == torch.float64 else torch.float32

        def zeros(*sizes: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        return cls(
            k=zeros(n, ring, groups, key_size, dtype=dtype),
            v=zeros(n, ring, heads, value_size, dtype=dtype),
            g=zeros(n, ring, heads, dtype=wide),
            beta=None if beta_dtype is None else zeros(n, ring, heads, dtype=beta_dtype),
            nodes=zeros(n, heads, 0, key_size, value_size, dtype=wide),
            position=zeros(n, dtype=torch.int64),
            base=zeros(n, dtype=torch.int64),
        )

    @property
    def num_sequences(self) -> int:
        """``N``."""
        return self.position.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self._tensors().values())

    def _tensors(self) -> dict[str, Tensor]:
        fields = ("k", "v", "g", "beta", "nodes", "position", "base")
        return {f: t for f in fields if (t := getattr(self, f)) is not None}

    def _map(self, fn: Any) -> LogLinearState:
        return dataclasses.replace(self, **{f: fn(t) for f, t in self._tensors().items()})

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> LogLinearState:
        """The state on another device; it keeps the dtypes of its tokens."""
        if isinstance(device, torch.dtype):
            raise TypeError(f"device: expected a device, got {device}")
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def clone(self) -> LogLinearState:
        """An independent copy (a fork of the sequences)."""
        return self._map(torch.clone)

    def detach(self) -> LogLinearState:
        """The same values without their history of gradients (truncated back-propagation)."""
        return self._map(torch.detach)

    def index_select(self, indices: Tensor) -> LogLinearState:
        """The states of ``indices`` ``[M]``, for beam search or to regroup a batch."""
        indices = torch.as_tensor(indices)
        return self._map(lambda t: t.index_select(0, indices.to(t.device)))

    def reserve(self, tokens: int, num_levels: int | None = None) -> LogLinearState:
        """A state with node slots for ``tokens`` more tokens, so that steps need not grow it.

        ``num_levels`` bounds the slots as ``level_policy="saturate"`` does. Before a step is
        captured in a CUDA graph, reserve for all of its replays: they find their positions on the
        device, and may go on until the slots are full.
        """
        slots = num_step_slots if self.nodes.device.type == "cpu" else num_slots
        wanted = slots(self.max_position + tokens, num_levels)
        missing = wanted - self.nodes.shape[2]
        if missing <= 0:
            return self
        nodes = torch.nn.functional.pad(self.nodes, (0, 0, 0, 0, 0, missing))
        return dataclasses.replace(self, nodes=nodes)

    def truncate(self, tokens: int | Tensor) -> LogLinearState:
        """Forgets the newest ``tokens`` tokens (an int, or ``[N]`` for one number a sequence).

        The ring keeps at least the last ``STATE_CHUNK`` tokens, so that many can be taken back
        (speculative decoding). Raises ``ValueError`` beyond what the ring still holds.
        """
        amount = torch.as_tensor(tokens, device=self.position.device)
        if amount.is_floating_point() or amount.shape not in ((), self.position.shape):
            raise ValueError(f"tokens: expected an int or {self.num_sequences} ints, got {tokens}")
        position = self.position - amount
        if bool((amount < 0).any()) or bool((position < self.base).any()):
            held = int((self.position - self.base).min()) if self.num_sequences else 0
            raise ValueError(
                f"tokens: expected 0 to {held} tokens (what the ring still holds), got {tokens}"
            )
        return dataclasses.replace(
            self, position=position, max_position=int(position.max()) if position.numel() else 0
        )

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers only; ``torch.save`` and ``weights_only=True`` loading accept it."""
        return {**self._tensors(), "max_position": self.max_position}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> LogLinearState:
        """The inverse of :meth:`state_dict`; raises ``ValueError`` on missing or foreign keys."""
        known = {f.name for f in dataclasses.fields(cls)}
        required = known - {"beta"}
        if not required <= set(state) <= known:
            raise ValueError(f"state: expected the keys {sorted(required)}, got {sorted(state)}")
        return cls(**{"beta": None, **state})


def _flatten(state: LogLinearState) -> tuple[list[Tensor], Any]:
    tensors = state._tensors()
    return list(tensors.values()), [list(tensors), state.max_position]


def _unflatten(children: Any, context: Any) -> LogLinearState:
    names, max_position = context
    return LogLinearState(
        **{"beta": None, **dict(zip(names, children)), "max_position": max_position}
    )


torch.utils._pytree.register_pytree_node(
    LogLinearState,
    _flatten,
    _unflatten,
    serialized_type_name="fenwick_attention.LogLinearState",
)
torch.serialization.add_safe_globals([LogLinearState])
