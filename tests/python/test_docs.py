"""Every Python example in the documentation runs; the API pages are those of the docstrings."""

import importlib.util
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


def test_api_pages_are_current():
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("api_docs", ROOT / "scripts" / "api_docs.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    pages = script.pages()
    assert pages.keys() == {path.name for path in script.FOLDER.iterdir()}
    for name, page in pages.items():
        assert (script.FOLDER / name).read_text() == page, f"run scripts/api_docs.py: {name}"


def test_everything_public_has_a_docstring_and_a_page():
    pytest.importorskip("transformers")
    import fenwick_attention
    from fenwick_attention import models

    text = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    for module in (fenwick_attention, models):
        for name in module.__all__:
            assert f"## {name}\n" in text, name


def test_links_between_pages_lead_somewhere():
    for page in [*PAGES, *sorted((ROOT / "docs" / "api").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
