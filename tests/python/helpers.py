"""Golden files and the error measure."""

import json
from pathlib import Path

import torch

GOLDEN = Path(__file__).parents[1] / "golden"


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """‖out − ref‖ / ‖ref‖ in float64; NaN never passes a comparison with it."""
    out, ref = out.detach().double(), ref.detach().double()
    return float((out - ref).norm() / ref.norm())


def load_golden(name: str) -> tuple[dict[str, torch.Tensor], dict]:
    """Tensors and the `config` of a golden file's metadata."""
    from safetensors import safe_open  # not on every machine with a GPU

    with safe_open(GOLDEN / name, "pt") as f:
        tensors = {k: f.get_tensor(k) for k in f.keys()}
        metadata = f.metadata()
    return tensors, json.loads(metadata.get("config", "{}"))
