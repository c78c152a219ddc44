"""What a model keeps between calls: one :class:`LayerState` for each layer."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from fenwick_attention.state import LogLinearState


@dataclasses.dataclass(eq=False)
class LayerState:
    """What one mixer keeps between calls: conv inputs ``[N, D, W-1]`` and the operator's state."""

    conv: list[Tensor]
    recurrent: LogLinearState

    def index_select(self, indices: Tensor) -> LayerState:
        """The states of the sequences ``indices``."""
        conv = [c.index_select(0, indices.to(c.device)) for c in self.conv]
        return LayerState(conv, self.recurrent.index_select(indices))


class Cache:
    """States of all layers of a model, indexed by layer; empty until the first call fills it.

    Memory grows with log2 of the tokens seen. Works with ``transformers`` generation (greedy,
    sampling, beams). Pass one as ``past_key_values`` with ``use_cache=True``; ``cache[i]`` is layer
    ``i``'s state: ``.conv``, the last inputs of its convolutions, and ``.recurrent``, a
    :class:`LogLinearState`.
    """

    # What `generate` of transformers asks: no static shapes, no roll-back (of the convolutions).
    is_compileable = False
    is_croppable = False

    def __init__(self) -> None:
        self._layers: dict[int, LayerState] = {}

    def __getitem__(self, layer: int) -> LayerState | None:
        return self._layers.get(layer)

    def __setitem__(self, layer: int, state: LayerState) -> None:
        self._layers[layer] = state

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def is_linear(self) -> list[bool]:
        """For ``generate``: no layer, so that it goes on from a cache with the new tokens only."""
        return [False] * len(self)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the longest sequence seen so far."""
        state = self[layer_idx]
        return 0 if state is None else state.recurrent.max_position

    def reserve(self, tokens: int) -> None:
        """Node slots for ``tokens`` more tokens in every layer, in place; needed before a decode
        step is captured in a CUDA graph (:meth:`LogLinearState.reserve`)."""
        for state in self._layers.values():
            state.recurrent = state.recurrent.reserve(tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(
            s.recurrent.nbytes + sum(c.numel() * c.element_size() for c in s.conv)
            for s in self._layers.values()
        )

    def reorder_cache(self, beam_idx: Tensor) -> Cache:
        """Sequence ``i`` becomes a copy of sequence ``beam_idx[i]``, in place."""
        for layer, state in self._layers.items():
            self._layers[layer] = state.index_select(beam_idx)
        return self

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence ``repeats`` times, in place."""
        if (state := self[0]) is not None:
            sequences = torch.arange(state.recurrent.num_sequences)
            self.reorder_cache(sequences.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps only the sequences ``indices``, in place."""
        self.reorder_cache(indices)


def require_cache(cache: object) -> None:
    """Raises ``ValueError`` where a caller passes the cache of another library."""
    if not isinstance(cache, Cache):
        raise ValueError(
            f"past_key_values: expected a fenwick_attention.Cache, got {type(cache).__name__}"
        )
