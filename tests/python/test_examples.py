"""The example scripts run and do what they say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]


def run(script: str, *options: str) -> str:
    env = {**os.environ}
    env["PYTHONPATH"] = f"{ROOT / 'python'}{os.pathsep}{env.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *options],
        capture_output=True, text=True, env=env, timeout=300, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_mqar_learns():
    out = run(
        "mqar.py", "--pairs", "2", "--length", "16", "--vocab", "16", "--steps", "300",
        "--batch", "32", "--device", "cpu", "--lr", "1e-2",
    )  # fmt: skip
    accuracy = float(out.split("accuracy ")[1].split()[0])
    assert accuracy > 0.5, out  # chance is 0.125


def test_levels_shows_every_level():
    out = run("levels.py", "--random", "--tokens", "100")
    assert out.count("layer") == 2
    shares = [float(line.split("share ")[1].split()[0]) for line in out.splitlines() if "λ" in line]
    assert len(shares) == 2 * 8  # 100 tokens need 8 levels
    assert abs(sum(shares) - 2) < 0.01
