"""Two Gloo processes give the losses of one (DDP, FSDP2); checkpoints change process count."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def losses(processes: int, *options: str) -> dict[int, float]:
    """Loss by step of a short run of the training script."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_SHOW_CPP_STACKTRACES": "0"}
    env["PYTHONPATH"] = f"{ROOT / 'python'}{os.pathsep}{env.get('PYTHONPATH', '')}"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={processes}", str(ROOT / "examples" / "train_distributed.py"),
        "--data", str(ROOT / "examples"), "--hidden-size", "32", "--layers", "1", "--length", "70",
        "--batch", "2", *options,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"^step (\d+) loss ([\d.]+)", done.stdout, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_train_like_one_and_resume(parallel, tmp_path):
    options = ["--parallel", parallel, "--steps", "6"]
    one = losses(1, *options)
    assert sorted(one) == list(range(6))
    saving = [*options, "--checkpoint", str(tmp_path), "--save-every", "3"]
    two = losses(2, *saving[:3], "3", *saving[4:])
    rest = losses(1, *saving)  # goes on with another number of processes
    assert sorted(two) == [0, 1, 2] and sorted(rest) == [3, 4, 5]
    for step, loss in {**two, **rest}.items():
        assert abs(loss - one[step]) <= 2e-4, (step, loss, one[step])
    assert one[5] < one[0]
