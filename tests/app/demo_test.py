"""scripts/demo.py: a stage that fails fails the demonstration, and the report says so."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/demo.py"


def demo(*arguments):
    command = [sys.executable, SCRIPT, "--quick", *arguments]
    return subprocess.run(command, capture_output=True, timeout=120)


def test_failed_stages_are_reported(tmp_path):
    result = demo("--out", tmp_path / "out", "--program", "/bin/false")
    assert result.returncode == 1
    report = (tmp_path / "out/report.md").read_text()
    for stage in ("verify", "recall", "text", "decode"):
        assert f"- {stage}: " in report


def test_a_missing_program_is_named(tmp_path):
    result = demo("--out", tmp_path / "out", "--program", tmp_path / "nothing")
    assert result.returncode == 2
    assert str(tmp_path / "nothing") in result.stderr.decode()
