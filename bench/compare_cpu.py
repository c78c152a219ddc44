"""Log-linear attention beside torch's causal ``scaled_dot_product_attention`` and ``torch.mm`` on the
same CPU threads, in one process.

float32, B = 1; fenwick: H = 8, G = 1, K = 128, V = 64; softmax attention: 8 heads of 64. Every round
times all of them one after the other; the table gives medians over the rounds of wall time and of
the processor time of all threads (robust against other load on the machine).

    FENWICK_TORCH_LIBRARY=build/lib/libfenwick_torch.so python bench/compare_cpu.py --out FILE.json
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[1]
HEADS, KEYS, VALUES = 8, 128, 64


def seconds(call):
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def cases(tokens):
    """Name -> callable. Backward cases time the backward alone; add the forward's time."""
    levels = (tokens - 1).bit_length() + 1
    q, k = (0.15 * torch.randn(1, tokens, 1, KEYS) for _ in range(2))
    v = torch.randn(1, tokens, HEADS, VALUES)
    g = -0.1 * torch.rand(1, tokens, HEADS)
    scales = torch.rand(1, tokens, HEADS, levels)
    ops = torch.ops.fenwick
    d_o = torch.randn_like(v)
    sq, sk, sv = (torch.randn(1, HEADS, tokens, VALUES, requires_grad=True) for _ in range(3))
    so = F.scaled_dot_product_attention(sq, sk, sv, is_causal=True)
    d_so = torch.randn_like(so)

    def softmax_forward():
        with torch.no_grad():
            F.scaled_dot_product_attention(sq, sk, sv, is_causal=True)

    return {
        "sdpa_forward": softmax_forward,
        "fenwick_forward": lambda: ops.log_linear_attention(q, k, v, g, scales),
        "sdpa_backward": lambda: torch.autograd.grad(so, (sq, sk, sv), d_so, retain_graph=True),
        "fenwick_backward": lambda: ops.log_linear_attention_backward(
            d_o, q, k, v, g, scales, None, 1.0, False
        ),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    library = os.environ.get("FENWICK_TORCH_LIBRARY", ROOT / "build/lib/libfenwick_torch.so")
    torch.ops.load_library(str(library))
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)

    results = []
    for tokens in args.tokens:
        calls = {"mm": lambda: torch.mm(a, b), **cases(tokens)}
        times = {name: [] for name in calls}
        for call in calls.values():
            call()
        for _ in range(args.rounds):
            for name, call in calls.items():
                times[name].append(seconds(call))
        row = {"tokens": tokens}
        for name, samples in times.items():
            row[f"{name}_ms"] = 1e3 * statistics.median(s[0] for s in samples)
            row[f"{name}_cpu_ms"] = 1e3 * statistics.median(s[1] for s in samples)
        for unit in ("ms", "cpu_ms"):
            suffix = "" if unit == "ms" else "_cpu"
            sdpa = row[f"sdpa_forward_{unit}"], row[f"sdpa_backward_{unit}"]
            ours = row[f"fenwick_forward_{unit}"], row[f"fenwick_backward_{unit}"]
            row[f"speedup_forward{suffix}"] = sdpa[0] / ours[0]
            row[f"speedup_both{suffix}"] = sum(sdpa) / sum(ours)
        results.append(row)
        print(
            f"T {tokens:6d}  mm {2.147 / row['mm_ms'] * 1e3:6.1f} GFLOP/s wall, "
            f"{2.147 / row['mm_cpu_ms'] * 1e3:5.1f} per thread  |  forward: "
            f"sdpa {row['sdpa_forward_ms']:8.1f} ms, fenwick {row['fenwick_forward_ms']:8.1f} ms, "
            f"x{row['speedup_forward']:.2f} (cpu x{row['speedup_forward_cpu']:.2f})  |  "
            f"forward + backward: x{row['speedup_both']:.2f} (cpu x{row['speedup_both_cpu']:.2f})"
        )
    if args.out:
        git = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        cpu = next(
            (line.split(":")[1].strip() for line in open("/proc/cpuinfo") if "model name" in line),
            platform.processor(),
        )
        context = {
            "commit": git.stdout.strip(),
            "cpu": cpu,
            "threads": args.threads,
            "torch": torch.__version__,
            "load_average": os.getloadavg()[0],
        }
        args.out.write_text(json.dumps({"context": context, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
