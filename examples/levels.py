"""Looks inside a model: how much each Fenwick level contributes, by layer.

    python examples/levels.py out/demo/text        # a run folder or a Hugging Face checkpoint
    python examples/levels.py --random             # an untrained model, to see the mechanism

For every layer it prints the mean weight λ of each level and the share of the output's energy that
comes through it: the operator is linear in λ, so one level's contribution is a call with all other
levels set to zero.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import fenwick_attention as fa
from fenwick_attention import models
from fenwick_attention.layers import log_linear_gated_deltanet, log_linear_mamba2


def level_shares(call, args: tuple, kwargs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean λ ``[L]`` and energy share ``[L]`` of the levels in one call of an operator."""
    *rest, level_scales = args
    levels = fa.num_levels(level_scales.shape[1])
    energy = []
    for level in range(levels):
        only = torch.zeros_like(level_scales)
        only[..., level] = level_scales[..., level]
        energy.append(call(*rest, only, **kwargs)[0].double().square().sum())
    energy = torch.stack(energy)
    return level_scales[..., :levels].double().mean((0, 1, 2)), energy / energy.sum()


def inspect(model: torch.nn.Module, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Mean λ and energy share by level, for each layer of the model on ``ids`` ``[B, T]``."""
    found = []
    places = [
        (log_linear_mamba2, "log_linear_attention"),
        (log_linear_gated_deltanet, "log_linear_gated_delta_rule"),
    ]

    def watch(original):
        def watched(*args, **kwargs):
            found.append(level_shares(original, args, kwargs))
            return original(*args, **kwargs)

        return watched

    originals = [getattr(module, name) for module, name in places]
    try:
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, watch(original))
        with torch.no_grad():
            model(ids, use_cache=False)
    finally:
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, original)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", nargs="?", type=Path)
    parser.add_argument("--random", action="store_true", help="use an untrained model")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="bytes to read")
    parser.add_argument("--tokens", type=int, default=512)
    args = parser.parse_args()
    if args.random == (args.checkpoint is not None):
        parser.error("expected a checkpoint folder or --random")
    if args.random:
        torch.manual_seed(0)
        config = models.LogLinearMamba2Config(
            vocab_size=256, hidden_size=64, num_hidden_layers=2, state_size=32, head_dim=32
        )
        model = models.LogLinearMamba2ForCausalLM(config)
    else:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(args.checkpoint)
    ids = torch.tensor([list(args.text.read_bytes()[: args.tokens])])
    for i, (scales, share) in enumerate(inspect(model.eval(), ids)):
        print(f"layer {i}")
        for level, (scale, part) in enumerate(zip(scales.tolist(), share.tolist(), strict=True)):
            reach = "this token" if level == 0 else f"{2 ** (level - 1)} tokens"
            bar = "#" * round(40 * part)
            print(f"  level {level:2d} ({reach:>11}): mean λ {scale:.3f}  share {part:.3f} {bar}")


if __name__ == "__main__":
    main()
