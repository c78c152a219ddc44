"""Tests of ``torch.ops.fenwick``. The library is the one that ``FENWICK_TORCH_LIBRARY`` names, or the
one in ``build/lib``."""

import os
import random
import sys
from pathlib import Path

import pytest

# The tensors are small: torch's threads would wait for each other longer than they work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

sys.path[:0] = [str(Path(__file__).parents[2] / "python"), str(Path(__file__).parent)]

from fenwick_attention import _ops  # noqa: E402

_ops.load()


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Fresh inputs in every run; a failing test shows the seed."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    torch.manual_seed(seed)
