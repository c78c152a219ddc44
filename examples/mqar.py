"""Trains a small model on multi-query associative recall (MQAR, the Zoology protocol) in PyTorch.

    python examples/mqar.py --model mamba2 --pairs 8 --steps 1000

A sequence shows key-value pairs, then asks for the values of keys in random order; a loss stands
only where an answer is due. Accuracy is the share of answers that are right.
"""

from __future__ import annotations

import argparse

import torch

from fenwick_attention import models


def mqar_batch(
    batch: int, pairs: int, length: int, vocab: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels ``[batch, length]``; label -100 where no answer is due.

    Keys come from the lower half of the vocabulary (without 0, the filler), values from the upper.
    Each key is asked once after all pairs were shown, its value due at the same position.
    """
    if length < 4 * pairs:
        raise ValueError(f"length: expected at least {4 * pairs} for {pairs} pairs, got {length}")
    half = vocab // 2
    scores = torch.rand(batch, half - 1, generator=generator)
    keys = scores.topk(pairs, dim=1).indices + 1
    values = torch.randint(half, vocab, (batch, pairs), generator=generator)
    ids = torch.zeros(batch, length, dtype=torch.long)
    labels = torch.full((batch, length), -100)
    ids[:, 0 : 2 * pairs : 2], ids[:, 1 : 2 * pairs : 2] = keys, values
    slots = torch.rand(batch, length - 2 * pairs, generator=generator).topk(pairs, dim=1).indices
    slots = slots + 2 * pairs
    ids.scatter_(1, slots, keys)
    labels.scatter_(1, slots, values)
    return ids, labels


def make_model(kind: str, size: int, state: int, layers: int, vocab: int) -> torch.nn.Module:
    """A causal LM of ``layers`` blocks with ``state`` keys in each head."""
    common = dict(vocab_size=vocab, hidden_size=size, num_hidden_layers=layers, pad_token_id=None)
    if kind == "mamba2":
        config = models.LogLinearMamba2Config(state_size=state, head_dim=16, **common)
        return models.LogLinearMamba2ForCausalLM(config)
    config = models.LogLinearGatedDeltaNetConfig(
        num_heads=2, head_dim=state, expand_v=1.0, **common
    )
    return models.LogLinearGatedDeltaNetForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=["mamba2", "gated_deltanet"], default="gated_deltanet")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=128)
    parser.add_argument("--hidden-size", type=int, default=32)
    parser.add_argument("--state-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    model = make_model(args.model, args.hidden_size, args.state_size, 2, args.vocab)
    model = model.to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    warmup = max(1, args.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / warmup))
    for step in range(args.steps):
        ids, labels = mqar_batch(args.batch, args.pairs, args.length, args.vocab, generator)
        logits = model(ids.to(args.device)).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.to(args.device).flatten(), ignore_index=-100
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 0 or step == args.steps - 1:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    ids, labels = mqar_batch(512, args.pairs, args.length, args.vocab, generator)
    with torch.no_grad():
        answers = model.eval()(ids.to(args.device)).logits.argmax(-1).cpu()
    due = labels != -100
    accuracy = (answers[due] == labels[due]).double().mean().item()
    print(f"accuracy {accuracy:.4f} ({args.pairs} pairs, chance {2 / args.vocab:.4f})")


if __name__ == "__main__":
    main()
