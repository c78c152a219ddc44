"""Trains a byte-level language model on text files with DDP or FSDP2.

    torchrun --nproc-per-node 8 examples/train_distributed.py --parallel fsdp --data src/
    torchrun --nproc-per-node 2 examples/train_distributed.py --data README.md \\
        --checkpoint out/ddp --save-every 10    # again, with any number of processes: goes on

The global batch is fixed and cut over the processes, so that losses do not depend on their number.
FSDP2 keeps parameters in bfloat16 where the device is a GPU and reduces gradients in float32.
Checkpoints go through torch.distributed.checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fenwick_attention import models


def read_bytes(paths: list[str]) -> torch.Tensor:
    """All bytes of the files and of the text files below the folders, as one int64 tensor."""
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise SystemExit(f"--data: no such file or folder: {path}")
        files += sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    data = b"".join(p.read_bytes() for p in files)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def make_model(kind: str, size: int, layers: int) -> torch.nn.Module:
    """A model over the 256 byte values."""
    common = dict(vocab_size=256, hidden_size=size, num_hidden_layers=layers, head_dim=32)
    if kind == "mamba2":
        return models.LogLinearMamba2ForCausalLM(
            models.LogLinearMamba2Config(state_size=32, **common)
        )
    return models.LogLinearGatedDeltaNetForCausalLM(
        models.LogLinearGatedDeltaNetConfig(num_heads=max(1, size // 32), expand_v=1.0, **common)
    )


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """No decay for norms, biases and what the layers mark (A_log, D, dt_bias, L)."""
    groups: list[dict] = [
        {"params": [], "weight_decay": weight_decay},
        {"params": [], "weight_decay": 0.0},
    ]
    for p in model.parameters():
        plain = p.dim() < 2 or getattr(p, "_no_weight_decay", False)
        groups[plain]["params"].append(p)
    return groups


def batch_of(data: torch.Tensor, step: int, batch: int, length: int) -> torch.Tensor:
    """The global batch ``[batch, length]`` of a step: the same for any number of processes."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(data) - length, (batch,), generator=generator)
    return torch.stack([data[s : s + length] for s in starts.tolist()])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--model", choices=["mamba2", "gated_deltanet"], default="mamba2")
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8, help="global batch")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--save-every", type=int, default=50)
    args = parser.parse_args()

    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if args.batch % world:
        raise SystemExit(f"--batch: expected a multiple of {world} processes, got {args.batch}")

    torch.manual_seed(0)
    model = make_model(args.model, args.hidden_size, args.layers).to(device)
    if args.parallel == "fsdp":
        mesh = init_device_mesh(device.type, (world,))
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if gpu else None, reduce_dtype=torch.float32
        )
        for layer in model.base_model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        wrapped = model
    else:
        wrapped = DistributedDataParallel(model, device_ids=[device] if gpu else None)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=args.lr)

    first = 0
    marker = args.checkpoint / "step.json" if args.checkpoint else None
    if marker is not None and marker.exists():
        first = json.loads(marker.read_text())["step"]
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=args.checkpoint / f"step-{first}")
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    data = read_bytes(args.data)
    share = args.batch // world
    for step in range(first, args.steps):
        start = time.perf_counter()
        ids = batch_of(data, step, args.batch, args.length)[rank * share : (rank + 1) * share]
        ids = ids.to(device)
        loss = wrapped(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        if rank == 0:
            rate = args.batch * args.length / (time.perf_counter() - start)
            print(f"step {step} loss {mean.item() / world:.6f} tokens/s {rate:.0f}", flush=True)
        if marker is not None and (step + 1) % args.save_every == 0:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save(
                {"model": weights, "optimizer": moments},
                checkpoint_id=args.checkpoint / f"step-{step + 1}",
            )
            if rank == 0:
                temporary = marker.with_suffix(".tmp")
                temporary.write_text(json.dumps({"step": step + 1}))
                temporary.replace(marker)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
