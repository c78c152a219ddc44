"""Every Python example in the documentation runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_examples_run(page):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    if not blocks:
        pytest.skip("no Python examples on this page")
    if any("fenwick_attention.models" in b for b in blocks):
        pytest.importorskip("transformers")
    exec(compile("\n".join(blocks), str(page), "exec"), {})
