"""Draws docs/figures/partition.svg: through which level each query reads each source.

.venv/bin/python docs/figures/partition.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

T = 32


def main() -> None:
    matplotlib.rcParams["svg.hashsalt"] = "fenwick"  # the same file every time
    levels = np.full((T, T), np.nan)
    for t in range(T):
        for s in range(t + 1):
            levels[t, s] = (t ^ s).bit_length()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4.2), width_ratios=[1, 1.15])
    image = left.imshow(levels, cmap="viridis_r", interpolation="nearest")
    left.set(xlabel="source s", ylabel="query t", title="level(t, s) = bit_width(t xor s)")
    figure.colorbar(image, ax=left, label="level", ticks=range(7), shrink=0.85)

    tokens = 2 ** np.arange(8, 21)
    heads, key, value, chunk = 48, 128, 64, 64
    state = [
        heads * 4 * key * value * max(1, (int(n) // chunk).bit_count())
        + 128 * (2 * key + heads * (2 * value + 4))
        for n in tokens - 1  # all bits set: the most live states
    ]
    cache = tokens * heads * 2 * 2 * 64
    right.loglog(tokens, np.array(cache) / 2**20, "o-", color="#b04a3a", label="KV cache (48 × 64)")
    right.loglog(tokens, np.array(state) / 2**20, "o-", color="#30678d", label="Fenwick state")
    right.set(xlabel="tokens of context", ylabel="MiB per layer", title="what decoding must read")
    right.grid(alpha=0.3)
    right.legend()
    figure.tight_layout()
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
