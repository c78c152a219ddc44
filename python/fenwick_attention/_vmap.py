"""Batching rules of the operators for ``torch.func.vmap`` (registered by :mod:`._ops`).

The attention operators fold the mapped axis into the batch ``B``: one call, as fast as a batch. The
layers' operators sum their weights' gradients over the batch, so they run once for each mapped
element. Steps update their state in place, which a mapped call cannot: they refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _register(name: str, rule: Callable[..., Any]) -> None:
    torch.library.register_vmap(f"fenwick::{name}", rule)


def fold_into_batch(name: str) -> None:
    """Every tensor of the operator has a leading ``B`` (or ``N``), except ``cu_seqlens``."""
    op = getattr(torch.ops.fenwick, name)
    names = [argument.name for argument in op.default._schema.arguments]

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        mapped = info.batch_size

        def fold(argument: str, x: Any, dim: int | None) -> Any:
            if not isinstance(x, Tensor):
                return x
            if argument == "cu_seqlens":
                raise RuntimeError(
                    f"{name}: cu_seqlens: expected None under torch.func.vmap, got packed sequences"
                )
            x = x.expand(mapped, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.flatten(0, 1)

        def unfold(x: Tensor) -> Tensor:
            return x.unflatten(0, (mapped, x.shape[0] // mapped))

        result = op(*map(fold, names, args, in_dims))
        if isinstance(result, Tensor):
            return unfold(result), 0
        return tuple(map(unfold, result)), (0,) * len(result)

    _register(name, rule)


def run_one_by_one(name: str) -> None:
    """Calls the operator for each mapped element and stacks the results."""
    op = getattr(torch.ops.fenwick, name)

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        results = [
            op(*(x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims)))
            for i in range(info.batch_size)
        ]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(map(torch.stack, zip(*results))), (0,) * len(results[0])

    _register(name, rule)


def refuse(name: str, instead: str) -> None:
    """One error for an operator that cannot be mapped."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        raise RuntimeError(
            f"{name}: expected a call outside torch.func.vmap (it updates its state in place), got "
            f"one inside; use {instead}"
        )

    _register(name, rule)
