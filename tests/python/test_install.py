"""The wheel stands alone; an import that cannot work says what to do."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "fenwick_attention"

USE = """
import sys
from pathlib import Path
import torch
import fenwick_attention as fa

site = Path(sys.argv[1])
assert Path(fa.__file__).is_relative_to(site), fa.__file__
assert fa._ops.library_path() == site / "fenwick_attention" / "libfenwick_torch.so"
mapped = {line.split()[-1] for line in open("/proc/self/maps") if "/lib" in line}
assert str(fa._ops.library_path()) in mapped
assert not any("libhwy" in path and not path.startswith(str(site)) for path in mapped), mapped
q, v, g = torch.randn(1, 300, 1, 16), torch.randn(1, 300, 2, 8), -torch.rand(1, 300, 2)
o, state = fa.log_linear_attention(
    q, q, v.requires_grad_(), g, torch.rand(1, 300, 2, fa.num_levels(300)), output_final_state=True
)
o.sum().backward()
layer = fa.LogLinearGatedDeltaNet(hidden_size=32, head_dim=16, num_heads=2)
assert layer(torch.randn(1, 70, 32))[0].isfinite().all()
try:
    import transformers
except ImportError:
    sys.exit()
from fenwick_attention.models import LogLinearMamba2Config, LogLinearMamba2ForCausalLM

config = LogLinearMamba2Config(
    vocab_size=64, hidden_size=32, head_dim=16, state_size=16, num_hidden_layers=1
)
model = LogLinearMamba2ForCausalLM(config).eval()
ids = torch.randint(3, 64, (1, 10))
assert model.generate(ids, max_new_tokens=4, min_new_tokens=4).shape == (1, 14)
print("used")
"""


def python(code: str, *arguments: str, path: Path, cwd: Path, **variables: str):
    """Runs ``code`` outside the source tree, with only ``path`` to find the package in."""
    env = {k: v for k, v in os.environ.items() if k not in ("FENWICK_TORCH_LIBRARY", "PYTHONPATH")}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**env, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1", **variables},
        capture_output=True, text=True, cwd=cwd, timeout=300,
    )  # fmt: skip


def test_one_version_everywhere():
    found = {
        "pyproject.toml": r'^version = "(.+)"',
        "python/fenwick_attention/__init__.py": r'^__version__ = "(.+)"',
        "CMakeLists.txt": r"^project\(fenwick VERSION (\S+)",
    }
    versions = {
        name: re.search(pattern, (ROOT / name).read_text(), re.MULTILINE)[1]
        for name, pattern in found.items()
    }
    assert len(set(versions.values())) == 1, versions


def test_wheel_stands_alone(tmp_path):
    pytest.importorskip("scikit_build_core")
    # The flags of the build beside it, whose objects ccache has.
    options = ["cmake.build-type=RelWithDebInfo", f"build-dir={tmp_path / 'build'}"]
    env = {**os.environ, "CCACHE_NOHASHDIR": "1"}
    done = subprocess.run(
        [
            sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check",
            "--no-build-isolation", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT),
            *(f"--config-settings={option}" for option in options),
        ],
        capture_output=True, text=True, env=env, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-" in wheel.name  # one for every Python
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert (site / "fenwick_attention" / "py.typed").is_file()
    files = {str(p.relative_to(site / "fenwick_attention")) for p in site.rglob("*.py")}
    assert files == {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py")}
    shutil.rmtree(tmp_path / "build")
    used = python(USE, str(site), path=site, cwd=tmp_path)
    assert used.returncode == 0, used.stderr
    assert used.stdout == "used\n"


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (None, "libfenwick_torch.so not found. Install the package with `pip install .`"),
        ("nothing.so", "FENWICK_TORCH_LIBRARY: expected a file, got"),
        ("foreign.so", "rebuild it against this torch with `pip install .`"),
    ],
)
def test_import_without_a_library_says_what_to_do(named, message, tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "a" / "b" / PACKAGE.name)
    (tmp_path / "foreign.so").write_bytes(b"not a library of this torch")
    variables = {} if named is None else {"FENWICK_TORCH_LIBRARY": str(tmp_path / named)}
    done = python("import fenwick_attention", path=tmp_path / "a" / "b", cwd=tmp_path, **variables)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: ") and message in done.stderr


def test_first_result_comes_within_a_second_of_torch(tmp_path):
    code = """
import time, torch
begin = time.process_time()  # what this machine's other users take does not count
import fenwick_attention as fa
q, v, g = torch.randn(1, 300, 1, 64), torch.randn(1, 300, 4, 32), -torch.rand(1, 300, 4)
fa.log_linear_attention(q, q, v, g, torch.rand(1, 300, 4, fa.num_levels(300)))
print(time.process_time() - begin)
"""
    library = os.environ.get("FENWICK_TORCH_LIBRARY")
    variables = {"FENWICK_TORCH_LIBRARY": str(Path(library).resolve())} if library else {}
    done = python(code, path=PACKAGE.parent, cwd=tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    assert 0 < float(done.stdout) < 1


def test_import_with_an_old_torch_says_what_to_do(tmp_path):
    code = "import torch; torch.__version__ = '2.9.1+cpu'; import fenwick_attention"
    done = python(code, path=PACKAGE.parent, cwd=tmp_path)
    assert done.returncode == 1
    assert "expected torch >= 2.10, got 2.9.1+cpu; upgrade torch" in done.stderr
