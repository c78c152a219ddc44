"""Ours and the peers side by side on one GPU, in one process: training calls by sequence length.

Peers: torch's FlashAttention-2 and cuDNN attention (causal softmax attention, 24 heads of 64, the
width of the log-linear layer that it replaces) and, where they are installed, flash-linear-
attention's log-linear attention, its linear parent without levels (simple_gla) and its gated delta
rule. bfloat16 on random data; medians with the L2 cache flushed before each call. A contender that
cannot run a length is reported with its error.

    FENWICK_TORCH_LIBRARY=build/gpu/lib/libfenwick_torch.so python bench/compare.py --out FILE.json
    python bench/compare.py --plot FILE.json ... --figure docs/figures/speed_h200.png

The first form measures (a CUDA build and a GPU). The second draws (matplotlib) such files and those
of bench/hopper_scalar_gate.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parents[1]
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """Batch, query/key groups, value heads, key and value size of a layer."""

    B: int
    G: int
    H: int
    K: int
    V: int


MAMBA2 = Shape(B=2, G=1, H=48, K=128, V=64)
GROUPED = Shape(B=2, G=16, H=16, K=128, V=128)
DELTA = Shape(B=1, G=24, H=24, K=128, V=128)
SOFTMAX = Shape(B=2, G=24, H=24, K=64, V=64)


@dataclass(frozen=True)
class Case:
    """What one call needs: `call(*inputs)` gives the output; gradients flow to every input."""

    inputs: list[Tensor]
    call: Callable[..., Tensor]


def num_levels(tokens: int) -> int:
    return (tokens - 1).bit_length() + 1


def normal(*sizes: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*sizes, device="cuda")).to(DTYPE)


def layer_inputs(s: Shape, tokens: int, expand: bool = False) -> list[Tensor]:
    """q, k [B, T, G, K] (or H heads: expand), v [B, T, H, V], g [B, T, H] float32."""
    heads = s.H if expand else s.G
    q, k = (normal(s.B, tokens, heads, s.K, scale=s.K**-0.5) for _ in range(2))
    v = normal(s.B, tokens, s.H, s.V)
    return [q, k, v, -0.1 * torch.rand(s.B, tokens, s.H, device="cuda")]


def level_scales(s: Shape, tokens: int) -> Tensor:
    return torch.rand(s.B, tokens, s.H, num_levels(tokens), device="cuda").to(DTYPE)


def log_linear(s: Shape = MAMBA2) -> Callable[[int], Case]:
    return lambda tokens: Case(
        [*layer_inputs(s, tokens), level_scales(s, tokens)],
        lambda *t: torch.ops.fenwick.log_linear_attention(*t),
    )


def log_linear_delta(tokens: int) -> Case:
    q, k, v, g = layer_inputs(DELTA, tokens)
    k = F.normalize(k.float(), dim=-1).to(DTYPE)
    beta = torch.rand(DELTA.B, tokens, DELTA.H, device="cuda").to(DTYPE)
    return Case(
        [q, k, v, g, beta, level_scales(DELTA, tokens)],
        lambda *t: torch.ops.fenwick.log_linear_gated_delta_rule(*t),
    )


def packed(lengths: Sequence[int]) -> Case:
    """Documents one behind another in one row, at the total's length."""
    s = Shape(B=1, G=MAMBA2.G, H=MAMBA2.H, K=MAMBA2.K, V=MAMBA2.V)
    total = sum(lengths)
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return Case(
        [*layer_inputs(s, total), level_scales(s, total)],
        lambda *t: torch.ops.fenwick.log_linear_attention(*t, cu_seqlens=offsets),
    )


def softmax(backend: SDPBackend) -> Callable[[int], Case]:
    def call(*qkv: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*qkv, is_causal=True)

    return lambda tokens: Case(
        [normal(SOFTMAX.B, SOFTMAX.H, tokens, SOFTMAX.K) for _ in range(3)], call
    )


def peer_log_linear(tokens: int) -> Case:
    from fla.ops.log_linear_attn import chunk_log_linear_attn

    return Case(
        [*layer_inputs(MAMBA2, tokens), level_scales(MAMBA2, tokens)],
        lambda *t: chunk_log_linear_attn(*t)[0],
    )


def peer_linear(tokens: int) -> Case:
    from fla.ops.simple_gla import chunk_simple_gla

    return Case(layer_inputs(MAMBA2, tokens, expand=True), lambda *t: chunk_simple_gla(*t)[0])


def peer_delta(tokens: int) -> Case:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return Case(log_linear_delta(tokens).inputs[:5], lambda *t: chunk_gated_delta_rule(*t)[0])


# name -> (legend, maker, longest T worth the device's time)
CONTENDERS: dict[str, tuple[str, Callable[[int], Case], int]] = {
    "fenwick": ("fenwick log-linear Mamba-2", log_linear(), 1 << 20),
    "fla_log_linear": ("flash-linear-attention log-linear Mamba-2", peer_log_linear, 1 << 17),
    "fla_simple_gla": ("flash-linear-attention Mamba-2 (linear)", peer_linear, 1 << 17),
    "flash2": ("FlashAttention-2", softmax(SDPBackend.FLASH_ATTENTION), 1 << 17),
    "cudnn": ("cuDNN attention", softmax(SDPBackend.CUDNN_ATTENTION), 1 << 17),
    "fenwick_delta": ("fenwick log-linear Gated DeltaNet", log_linear_delta, 1 << 17),
    "fla_delta": ("flash-linear-attention Gated DeltaNet (linear)", peer_delta, 1 << 17),
}


MILLION = "B 1, T 1,048,576"  # of the other calls
KERNELS = "kernels"  # in the plot


class Clock:
    """Medians of device time, the L2 cache flushed before each call."""

    def __init__(self) -> None:
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def once(self, call: Callable[[], object]) -> float:
        self.flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    def median(self, call: Callable[[], object], budget_ms: float = 400) -> float:
        self.once(call)
        first = self.once(call)
        repeats = int(min(max(budget_ms / first, 3), 21))
        return statistics.median(self.once(call) for _ in range(repeats))


def bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def failure(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]


def measure(clock: Clock, case: Case, copy_rate: float) -> dict[str, object]:
    """ms forward and forward + backward, the floors of their tensors moved once, peak memory. A
    backward that fails leaves the forward's figures and `both_error`."""
    with torch.no_grad():
        begin = time.perf_counter()
        d_o = torch.randn_like(case.call(*case.inputs))
        torch.cuda.synchronize()
        first = time.perf_counter() - begin
        forward = clock.median(lambda: case.call(*case.inputs))
    moved = bytes_of([*case.inputs, d_o])
    result: dict[str, object] = {
        "forward_ms": forward,
        "forward_floor_ms": moved / copy_rate * 1e3,
        "first_call_s": first,
    }
    leaves = [t.detach().requires_grad_() for t in case.inputs]

    def both() -> object:
        return torch.autograd.grad(case.call(*leaves), leaves, d_o)

    try:
        both()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated() - clock.flush.numel()
        result["both_ms"] = clock.median(both)
        peak = torch.cuda.max_memory_allocated() - clock.flush.numel()
    except Exception as error:
        return result | {"both_error": failure(error)}
    return result | {
        # Inputs twice, o, d_o and the gradients once.
        "both_floor_ms": (3 * moved - bytes_of([d_o])) / copy_rate * 1e3,
        "peak_gib": peak / 2**30,
        # Beside inputs and d_o, o, and gradients of the inputs.
        "workspace_gib": max(0, peak - base - moved) / 2**30,
    }


def device_rates(clock: Clock) -> dict[str, float]:
    """The two ceilings: a large copy (bytes read + written) and a large bf16 product."""
    x = torch.randint(0, 255, (2 << 30,), dtype=torch.uint8, device="cuda")
    copy = 2 * x.numel() / clock.median(partial(torch.empty_like(x).copy_, x)) * 1e3
    a, b = normal(8192, 8192), normal(8192, 8192)
    flops = 2 * 8192**3 / clock.median(lambda: torch.mm(a, b)) * 1e3
    return {"copy_bytes_per_s": copy, "matmul_flops": flops}


def first_call() -> float:
    """Seconds to load the operators and run forward + backward at T = 2,048; the start of torch, of
    the device, and of what makes the inputs taken out. (torch imports sympy when it is first given
    a gradient to begin with: 3 s on a slow disk, once in a process.)"""
    case = log_linear()(2048)
    leaves = [t.requires_grad_() for t in case.inputs]
    d_o = torch.randn_like(leaves[2])
    torch.autograd.grad(leaves[2] * 2, leaves[2], d_o)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    load_operators()
    torch.autograd.grad(case.call(*leaves), leaves, d_o)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def fresh_process_first_call() -> float:
    command = [sys.executable, __file__, "--first-call"]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def load_operators() -> None:
    sys.path.insert(0, str(ROOT / "python"))
    from fenwick_attention import _ops

    _ops.load()


def extra_cases() -> dict[str, Callable[[], Case]]:
    mixed = [1, 300, 12000, 4096, 77, 9000, 5000, 2294]
    generator = torch.Generator().manual_seed(0)
    short = torch.randint(0, 32, (2050,), generator=generator).tolist()
    return {
        "T 8,191": lambda: log_linear()(8191),
        f"packed, {len(mixed)} documents of 1 to 12,000 tokens, {sum(mixed):,} in all": lambda: (
            packed(mixed)
        ),
        f"one row of {sum(mixed):,} tokens": lambda: packed([sum(mixed)]),
        f"packed, 2,050 documents of 0 to 31 tokens, {sum(short):,} in all": lambda: packed(short),
        "H = G = 16, K = V = 128, T 8,192": lambda: log_linear(GROUPED)(8192),
        "H = G = 16, K = V = 128, T 32,768": lambda: log_linear(GROUPED)(32768),
        MILLION: lambda: log_linear(Shape(1, 1, 48, 128, 64))(1 << 20),
    }


def attempt(clock: Clock, make: Callable[[], Case], copy_rate: float) -> dict[str, object]:
    try:
        return measure(clock, make(), copy_rate)
    except Exception as error:  # A peer that fails is a finding, not the end of the run.
        return {"error": failure(error)}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def line(name: str, result: dict[str, object], reference: dict[str, object] | None = None) -> str:
    if "error" in result:
        return f"  {name:<62} {result['error']}"

    def number(key: str, layout: str) -> str:
        return (
            format(result[key], layout) if key in result else "-".rjust(int(layout.split(".")[0]))
        )

    text = f"  {name:<62} {number('forward_ms', '9.3f')} {number('both_ms', '9.3f')}"
    text += f"  {number('forward_floor_ms', '7.3f')} {number('both_floor_ms', '7.3f')}"
    text += f"  {number('peak_gib', '6.1f')} {number('workspace_gib', '6.1f')}"
    text += f"  {number('first_call_s', '6.1f')}"
    for key, layout in (("forward_ms", "<7.1f"), ("both_ms", ".1f")):
        if reference and key in reference and key in result:
            text += f"  x{result[key] / reference[key]:{layout}}"
    return text + (f"  {result['both_error']}" if "both_error" in result else "")


HEADER = (
    f"  {'ms':<62} {'forward':>9} {'fwd+bwd':>9}  {'floor':>7} {'floor':>7}"
    f"  {'peak':>6} {'extra':>6}  {'first':>6}  ratio to ours (GiB: peak, workspace; s: first call)"
)


def compare(
    tokens: Sequence[int],
    names: Sequence[str],
    extras: bool,
    save: Callable[[dict[str, object]], None],
) -> None:
    load_operators()
    torch.manual_seed(0)
    clock = Clock()
    rates = device_rates(clock)
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    context: dict[str, object] = {
        "commit": os.environ.get("FENWICK_COMMIT") or git.stdout.strip(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": time.strftime("%Y-%m-%d"),
        **rates,
        "first_call_fresh_process_s": fresh_process_first_call(),
    }
    try:
        import fla

        context["flash_linear_attention"] = fla.__version__
    except ImportError:
        names = [name for name in names if not name.startswith("fla_")]
        print("flash-linear-attention is not installed: its contenders are left out")
    print(
        f"{context['device']}: copy {rates['copy_bytes_per_s'] / 1e12:.2f} TB/s, bf16 product "
        f"{rates['matmul_flops'] / 1e12:.0f} TFLOP/s; first call in a fresh process "
        f"{context['first_call_fresh_process_s']:.2f} s"
    )
    lengths: list[dict[str, object]] = []
    others: dict[str, object] = {}
    results = {
        "context": context,
        "shapes": {"mamba2": vars(MAMBA2), "delta": vars(DELTA), "softmax": vars(SOFTMAX)},
        "lengths": lengths,
        "others": others,
    }
    if extras:
        print(f"other calls of ours\n{HEADER}")
        for name, make in extra_cases().items():
            others[name] = attempt(clock, make, rates["copy_bytes_per_s"])
            print(line(name, others[name]), flush=True)
    for t in tokens:
        print(f"T = {t:,}\n{HEADER}")
        row: dict[str, object] = {"tokens": t, "contenders": {}}
        lengths.append(row)
        for name in names:
            label, make, longest = CONTENDERS[name]
            if t > longest:
                continue
            result = attempt(clock, partial(make, t), rates["copy_bytes_per_s"])
            row["contenders"][name] = result
            ours = "fenwick_delta" if name.endswith("delta") else "fenwick"
            print(line(label, result, row["contenders"].get(ours)), flush=True)
            save(results)


def points_of(results: dict, name: str, key: str) -> list[tuple[int, float]]:
    """(T, ms) of one contender in a file of this script, or, of our kernels without torch, in one of
    bench/hopper_scalar_gate."""
    if "times" in results:
        prefix = "H 48 K 128 V 64 T "
        return [
            (
                int(row["case"].removeprefix(prefix)),
                row["forward_ms"] + (key == "both_ms") * row["backward_ms"],
            )
            for row in results["times"]
            if name == KERNELS and row["case"].startswith(prefix) and row["case"][-3:] != "191"
        ]
    points = [
        (row["tokens"], row["contenders"][name][key])
        for row in results["lengths"]
        if key in row["contenders"].get(name, {})
    ]
    if name == "fenwick" and key in results["others"].get(MILLION, {}):
        points.append((1 << 20, results["others"][MILLION][key]))
    return points


def plot(files: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    styles = {
        KERNELS: ("#e8a09b", "-", ""),
        "fenwick": ("#b3261e", "-", "o"),
        "fla_log_linear": ("#555555", "-", "s"),
        "fla_simple_gla": ("#999999", ":", "s"),
        "flash2": ("#3566a8", "-", "^"),
        "cudnn": ("#7fa8d9", "-", "v"),
        "fenwick_delta": ("#e07b39", "--", "o"),
        "fla_delta": ("#999999", "--", "s"),
    }
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.6), sharey=True)
    ticks: set[int] = set()
    for axis, key, title in zip(axes, ["forward_ms", "both_ms"], ["forward", "forward + backward"]):
        for name, (color, dash, marker) in styles.items():
            label = (
                "fenwick log-linear Mamba-2, kernels alone"
                if name == KERNELS
                else CONTENDERS[name][0]
            )
            curve = sorted(point for results in files for point in points_of(results, name, key))
            if not curve:
                continue
            ticks.update(tokens for tokens, _ in curve)
            axis.loglog(
                *zip(*curve), color=color, ls=dash, lw=1.2, marker=marker, ms=4, label=label
            )
        axis.set_title(f"{title}, ms, one H200, bfloat16", fontsize=10)
        axis.set_xlabel("tokens", fontsize=9)
        axis.set_xscale("log", base=2)
        axis.grid(True, which="major", lw=0.4, alpha=0.6)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    for axis in axes:
        names = [f"{t // 1024}K" if t < 1 << 20 else f"{t >> 20}M" for t in sorted(ticks)]
        axis.set_xticks(sorted(ticks), names)
        axis.minorticks_off()
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    lines, labels = axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, fontsize=8, frameon=False, loc="lower center", ncol=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768, 131072])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument(
        "--no-extras", action="store_true", help="leave out ragged, packed, 1M, ..."
    )
    parser.add_argument("--out", type=Path, help="write the figures here (JSON)")
    parser.add_argument("--plot", type=Path, nargs="+", help="draw these files, measure nothing")
    parser.add_argument("--first-call", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--figure", type=Path, default=ROOT / "docs/figures/speed.png")
    args = parser.parse_args()
    if args.plot:
        plot([json.loads(file.read_text()) for file in args.plot], args.figure)
        return
    if not torch.cuda.is_available():
        parser.error("no CUDA device: bench/compare_cpu.py is for the CPU")
    if args.first_call:
        print(first_call())
        return

    def save(results: dict[str, object]) -> None:
        if not args.out:
            return
        unfinished = args.out.with_suffix(".partial")
        unfinished.write_text(json.dumps(results, indent=1) + "\n")
        unfinished.replace(args.out)

    compare(args.tokens, args.contenders, not args.no_extras, save)


if __name__ == "__main__":
    main()
