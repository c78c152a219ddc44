"""Random inputs and states for the attention operators."""

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK, RING = 64, 128  # fenwick/state.h


def num_levels(tokens: int) -> int:
    return max(1, (tokens - 1).bit_length() + 1)


def num_slots(position: int) -> int:
    chunks = max(-(-position // CHUNK), 2) - 2
    return chunks.bit_length()


@dataclass
class Operator:
    """One of the two operators with a fixed `scale`; tensors go in and out in schema order."""

    name: str
    has_beta: bool

    def call(self, suffix: str, *arguments, **options):
        return getattr(torch.ops.fenwick, self.name + suffix)(*arguments, **options)

    def inputs(
        self, batch: int, tokens: int, groups=1, heads=2, key=6, value=5, levels=None,
        dtype=torch.float64,
    ) -> list[Tensor]:  # fmt: skip
        """q, k, v, g, [beta,] level_scales; keys are unit vectors."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        k = torch.nn.functional.normalize(torch.randn(batch, tokens, groups, key), dim=-1)
        gates = [-torch.rand(batch, tokens, heads, dtype=wide)]
        if self.has_beta:
            gates.append(torch.rand(batch, tokens, heads, dtype=dtype))
        return [
            torch.randn(batch, tokens, groups, key, dtype=dtype),
            k.to(dtype),
            torch.randn(batch, tokens, heads, value, dtype=dtype),
            *gates,
            torch.rand(batch, tokens, heads, levels or num_levels(tokens), dtype=dtype),
        ]

    def empty_state(self, sequences: int, inputs: list[Tensor]) -> list[Tensor]:
        """k, v, g, [beta,] nodes, position, base of sequences without tokens."""
        k, v, *gates = inputs[1:-1]
        nodes = v.new_zeros(sequences, v.shape[2], 0, k.shape[3], v.shape[3], dtype=gates[0].dtype)
        rings = [t.new_zeros(sequences, RING, *t.shape[2:]) for t in (k, v, *gates)]
        counts = [torch.zeros(sequences, dtype=torch.int64) for _ in range(2)]
        return [*rings, nodes, *counts]

    def after(self, position: int, sequences: int, inputs: list[Tensor]) -> list[Tensor]:
        """The state after `position` random tokens, with the sizes and types of `inputs`."""
        q, k, v = inputs[:3]
        prefix = self.inputs(
            sequences, position, k.shape[2], v.shape[2], k.shape[3], v.shape[3], dtype=q.dtype
        )
        state = self.empty_state(sequences, prefix)
        return self.call("_with_state", *prefix, *state, 0, num_slots(position))[1:]


OPERATORS = [
    Operator("log_linear_attention", has_beta=False),
    Operator("log_linear_gated_delta_rule", has_beta=True),
]
