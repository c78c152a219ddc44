"""Writes the demonstration's report.md and its plots from the results of scripts/demo.py."""

import platform
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

NAMES = {
    "mamba2": "Mamba-2",
    "log_linear_mamba2": "Log-Linear Mamba-2",
    "gated_deltanet": "Gated DeltaNet",
    "log_linear_gated_deltanet": "Log-Linear Gated DeltaNet",
    "scalar_gate": "log-linear, scalar gate",
    "gated_delta": "log-linear, gated delta rule",
    "kv_cache": "softmax attention, KV cache",
}
# A hue for each family; the linear parent dashed.
COLOURS = {
    "mamba2": "#8db3d9",
    "log_linear_mamba2": "#1f5fa8",
    "gated_deltanet": "#e8b26f",
    "log_linear_gated_deltanet": "#c45f0a",
    "scalar_gate": "#1f5fa8",
    "gated_delta": "#c45f0a",
    "kv_cache": "#777777",
}


def table(rows):
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines)


def smooth(curve, width=5):
    steps, losses = zip(*curve, strict=True)
    means = [
        statistics.fmean(losses[max(0, i - width) : i + width + 1]) for i in range(len(losses))
    ]
    return steps, means


def best_rates(runs):
    """For each model its runs at the learning rate with the best mean accuracy."""
    best = {}
    for model in dict.fromkeys(run["model"] for run in runs):
        by_rate = {}
        for run in runs:
            if run["model"] == model:
                by_rate.setdefault(run["lr"], []).append(run)
        best[model] = max(
            by_rate.values(), key=lambda group: statistics.fmean(run["accuracy"] for run in group)
        )
    return best


def spread(values):
    text = f"{100 * statistics.fmean(values):.1f}"
    if len(values) > 1:
        text += f" ({100 * min(values):.1f}–{100 * max(values):.1f})"
    return text


def verdict(best):
    lines = []
    for parent, child in (
        ("mamba2", "log_linear_mamba2"),
        ("gated_deltanet", "log_linear_gated_deltanet"),
    ):
        old, new = ([run["accuracy"] for run in best[name]] for name in (parent, child))
        difference = statistics.fmean(new) - statistics.fmean(old)
        if len(old) < 2:
            word = "against its parent: one seed says nothing"
        elif max(old + new) < 0.1:
            word = "and its parent have not begun to recall in these steps"
        elif min(new) > max(old):
            word = "recalls more than its parent with every seed"
        elif max(new) < min(old):
            word = "recalls less than its parent with every seed"
        else:
            word = "and its parent overlap within the spread of the seeds"
        lines.append(f"- {NAMES[child]} {word} ({100 * difference:+.1f} points on average).")
    return "\n".join(lines)


def recall_section(recall, out):
    settings, runs = recall["settings"], recall["runs"]
    best = best_rates(runs)
    pairs = [str(p) for p in settings["pairs"]]
    rows = [["model", "learning rate", *(f"{p} pairs" for p in pairs), "all"]]
    for model, group in best.items():
        rows.append(
            [
                NAMES[model],
                f"{group[0]['lr']:g}",
                *(spread([run["accuracy_by_pairs"][p] for run in group]) for p in pairs),
                spread([run["accuracy"] for run in group]),
            ]
        )
    grid = [["model", "learning rate", *(f"seed {s}" for s in settings["seeds"])]]
    for model in best:
        for rate in settings["learning_rates"]:
            chosen = {
                run["seed"]: run["accuracy"]
                for run in runs
                if run["model"] == model and run["lr"] == rate
            }
            grid.append(
                [NAMES[model], f"{rate:g}", *(f"{100 * chosen[s]:.1f}" for s in settings["seeds"])]
            )

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    width = 0.8 / len(best)
    for i, (model, group) in enumerate(best.items()):
        means = [
            100 * statistics.fmean(run["accuracy_by_pairs"][p] for run in group) for p in pairs
        ]
        low = [
            m - 100 * min(run["accuracy_by_pairs"][p] for run in group)
            for m, p in zip(means, pairs, strict=True)
        ]
        high = [
            100 * max(run["accuracy_by_pairs"][p] for run in group) - m
            for m, p in zip(means, pairs, strict=True)
        ]
        left.bar(
            [x + i * width for x in range(len(pairs))],
            means,
            width,
            label=NAMES[model],
            color=COLOURS[model],
            yerr=[low, high],
            capsize=2,
        )
        for run in group:
            right.plot(
                *smooth(run["curve"]),
                color=COLOURS[model],
                linestyle="-" if model.startswith("log") else "--",
            )
    left.set_xticks([x + 0.4 - width / 2 for x in range(len(pairs))], pairs)
    left.set(xlabel="key-value pairs", ylabel="accuracy (%)", ylim=(0, 101))
    left.legend(fontsize=8)
    right.set(xlabel="step", ylabel="training loss")
    finish(figure, out / "recall.png")
    return f"""## Recall

Multi-query associative recall (Zoology's protocol): {settings["length"]} tokens,
{settings["vocab"]} symbols, {settings["layers"]} layers of width {settings["dim"]} with
{settings["heads"]} heads and a state of {settings["state"]} × {settings["head_dim"]}, batch
{settings["batch"]}, {settings["steps"]} steps with warm-up and cosine decay. Accuracy in %, the
best of the learning rates for each model; mean (lowest–highest) over {len(settings["seeds"])}
seed(s).

{table(rows)}

{verdict(best)}

![recall](recall.png)

All runs (accuracy over all pairs, %):

{table(grid)}
"""


def text_section(text, out):
    figure, axis = plt.subplots(figsize=(6, 4))
    rows = [["model", "bits per byte", "accuracy (%)", "trained for"]]
    settings = text["settings"]
    for model, figures in text["models"].items():
        axis.plot(*smooth(figures["curve"]), label=NAMES[model], color=COLOURS[model])
        rows.append(
            [
                NAMES[model],
                f"{figures['bits_per_byte']:.3f}",
                f"{100 * figures['accuracy']:.1f}",
                f"{settings['steps']} steps of {settings['batch']} × {settings['length']}",
            ]
        )
    axis.set(xlabel="step", ylabel="training loss (nats per byte)")
    axis.legend()
    finish(figure, out / "text.png")
    continuation = text["continuation"].replace("```", "'''")
    return f"""## Text

Byte models ({settings["layers"]} layers of width {settings["dim"]}) of the Python sources of the
virtual environment, evaluated on files that training never sees.

{table(rows)}

![text](text.png)

A continuation by the log-linear model, at temperature 0.7:

```
{continuation.rstrip()}
```
"""


def decode_section(decode, out):
    rows = [["", "context", "state bytes", "time per token (ms)", "floor (ms)"]]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    for name in dict.fromkeys(row["operator"] for row in decode["decode"]):
        chosen = [row for row in decode["decode"] if row["operator"] == name]
        contexts = [row["context"] for row in chosen]
        for axis, key, factor in zip(
            axes, ("state_bytes", "seconds_per_token"), (1e-6, 1e3), strict=True
        ):
            axis.plot(
                contexts,
                [row[key] * factor for row in chosen],
                "o-",
                label=NAMES[name],
                color=COLOURS[name],
            )
        for row in chosen:
            rows.append(
                [
                    NAMES[name],
                    f"{row['context']:,}",
                    f"{int(row['state_bytes']):,}",
                    f"{1e3 * row['seconds_per_token']:.4g}",
                    f"{1e3 * row['floor_seconds']:.4g}",
                ]
            )
    for axis, label in zip(axes, ("state (MB)", "time per token (ms)"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].legend()
    finish(figure, out / "decode.png")
    return f"""## Decoding

One layer, batch {decode["batch"]}, {decode["heads"]} heads of K = {decode["key_size"]} and
V = {decode["value_size"]}, {decode["dtype"]}, {decode["threads"]} threads; the cache holds keys and
values of as many heads of size {decode["value_size"]}. Contexts are powers of two, where all levels
are live: the log-linear operators' worst case. The floor is the state's memory traffic at the copy
rate measured here, {decode["copy_gbytes_per_second"]:.1f} GB/s.

{table(rows)}

![decode](decode.png)
"""


def finish(figure, path):
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def processor():
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def write(results, out):
    gpu = ", models on the GPU" if results["device"] != "cpu" else ""
    parts = [
        "# fenwick: the demonstration\n",
        f"{results['cores']} cores of {processor()}{gpu}; {results['seconds'] / 60:.1f} minutes "
        f"(planned: {results['minutes']:g})."
        + (
            " `--quick`: sizes that show nothing but that every stage works."
            if results["quick"]
            else ""
        )
        + "\n",
    ]
    if results["failed"]:
        parts.append("## Failed\n\n" + "\n".join(f"- {line}" for line in results["failed"]) + "\n")
    if "verify" in results:
        parts.append(f"""## Verification

- Every kernel against the float64 reference on random ragged shapes: {results["verify"]}
  ([table](verify.txt)).
- Other people's data in `tests/golden`: {results["verify_golden"]} ([table](verify_golden.txt)).
""")
    for name, section in (
        ("recall", recall_section),
        ("text", text_section),
        ("decode", decode_section),
    ):
        if name in results:
            parts.append(section(results[name], out))
    if results["commands"]:
        parts.append(
            "## The commands\n\nOne of each stage:\n\n```\n"
            + "\n".join(results["commands"].values())
            + "\n```\n"
        )
    (out / "report.md").write_text("\n".join(parts))
