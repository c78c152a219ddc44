#!/usr/bin/env python3
"""Writes the Python package's API pages, docs/api/*.md, from signatures and docstrings.

Run it after changing a docstring (`make format` does not); tests/python/test_docs.py fails while a
page is not current.
"""

import inspect
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "api"
NOTE = "<!-- Made by scripts/api_docs.py from the docstrings; change those. -->"
WIDTH = 96

# Page -> title, module whose docstring introduces it, objects as "module:name".
PAGES: dict[str, tuple[str, str, list[str]]] = {
    "functions": (
        "Functions",
        "functional",
        [
            "functional:log_linear_attention",
            "functional:log_linear_gated_delta_rule",
            "functional:log_linear_attention_step",
            "functional:log_linear_gated_delta_rule_step",
            "functional:chunk_log_linear_attn",
            "functional:l2_norm",
            "functional:num_levels",
        ],
    ),
    "states": ("States and caches", "state", ["state:LogLinearState", "cache:Cache"]),
    "layers": (
        "Layers",
        "layers",
        [
            "layers.log_linear_mamba2:LogLinearMamba2",
            "layers.log_linear_gated_deltanet:LogLinearGatedDeltaNet",
        ],
    ),
    "models": (
        "Hugging Face models",
        "models",
        [
            f"models.{module}:LogLinear{kind}{suffix}"
            for kind in ("Mamba2", "GatedDeltaNet")
            for module, suffix in (
                ("configuration", "Config"),
                ("modeling", "ForCausalLM"),
                ("modeling", "Model"),
            )
        ],
    ),
}


def markdown(docstring: str | None) -> str:
    """A Google-style docstring: roles become code, sections headings, their entries a list."""
    text = re.sub(r":\w+:`~?\.?([^`]+)`", r"`\1`", inspect.cleandoc(docstring or ""))
    text = text.replace("``", "`")
    lines: list[str] = []
    section, entry = False, None
    for line in text.splitlines():
        if re.fullmatch(r"(Args|Returns|Raises|Attributes):", line):
            lines += [f"**{line.rstrip(':')}**", ""]
            section = True
        elif section and (found := re.fullmatch(r"    (\w+): (.*)", line)):
            entry = found
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        elif section and line.startswith("    "):
            lines.append("  " * bool(entry) + line.strip())
        else:
            section, entry = section and not line, None
            lines.append(line)
    return "\n".join(lines).strip()


def signature(name: str, function: Any) -> str:
    """`name(a: int, *, b: int = 1) -> int`, one parameter a line where that is too long."""
    parsed = inspect.signature(function)
    words = []
    for p in parsed.parameters.values():
        if p.name in ("self", "cls"):
            continue
        if p.kind is p.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        # Annotations are strings here (`from __future__ import annotations`).
        word = f"{'**' if p.kind is p.VAR_KEYWORD else ''}{p.name}: {p.annotation}"
        words.append(word if p.default is p.empty else f"{word} = {p.default!r}")
    end = ")" if inspect.isclass(function) else f") -> {parsed.return_annotation}"
    line = f"{name}({', '.join(words)}{end}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {word}," for word in words), end])


def section(title: str, call: str | None, docstring: str | None, level: int) -> list[str]:
    parts = [f"{'#' * level} {title}"]
    if call is not None:
        parts.append(f"```python\n{call}\n```")
    parts.append(markdown(docstring))
    return parts


def methods(cls: type) -> list[tuple[str, Any]]:
    """Public methods and properties of a class and its bases in this package, in their order."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("fenwick_attention"):
            found |= {
                n: inspect.getattr_static(cls, n)
                for n, member in vars(base).items()
                if not n.startswith("_")
                and (inspect.isfunction(member) or isinstance(member, (property, classmethod)))
                and getattr(cls, n).__doc__ is not None
            }
    return list(found.items())


def document(path: str) -> list[str]:
    """One function, or one class with its methods."""
    module_name, name = path.split(":")
    module = sys.modules[f"fenwick_attention.{module_name}"]
    thing = getattr(module, name)
    parts = section(name, signature(name, thing), thing.__doc__, 2)
    source = Path(inspect.getsourcefile(thing)).relative_to(ROOT)
    parts.append(f"Source: [{source}](../../{source})")
    if not inspect.isclass(thing):
        return parts
    for method, member in methods(thing):
        if isinstance(member, property):
            parts += section(f"{name}.{method}", None, member.__doc__, 3)
        else:
            function = getattr(thing, method)
            parts += section(f"{name}.{method}", signature(method, function), function.__doc__, 3)
    return parts


def pages() -> dict[str, str]:
    """File name -> contents."""
    sys.path.insert(0, str(ROOT / "python"))
    import fenwick_attention.models

    package = fenwick_attention
    result = {}
    index = ["# The Python package", NOTE, markdown(package.__doc__)]
    for page, (title, module, paths) in PAGES.items():
        introduction = markdown(sys.modules[f"fenwick_attention.{module}"].__doc__)
        parts = [f"# {title}", NOTE, introduction]
        for path in paths:
            parts += document(path)
        result[f"{page}.md"] = "\n\n".join(filter(None, parts)) + "\n"
        names = ", ".join(f"`{path.split(':')[1]}`" for path in paths)
        index.append(f"- [{title}]({page}.md): {names}")
    result["README.md"] = "\n\n".join(index[:3]) + "\n\n" + "\n".join(index[3:]) + "\n"
    return result


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, contents in pages().items():
        (FOLDER / name).write_text(contents)
