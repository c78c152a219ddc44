#!/usr/bin/env bash
# Formats (or with --check: checks) every tracked C++ and CUDA source with .clang-format, and the
# Python sources with ruff and, in --check, mypy.
set -euo pipefail
cd "$(dirname "$0")/.."
mapfile -t cxx < <(git ls-files '*.h' '*.cc' '*.cu' '*.cuh')
if [[ ${1:-} == --check ]]; then
  clang-format --dry-run --Werror "${cxx[@]}"
  .venv/bin/ruff check --quiet .
  .venv/bin/ruff format --quiet --check .
  .venv/bin/mypy --no-error-summary
  echo "format: ${#cxx[@]} C++ sources and all Python sources are clean"
else
  clang-format -i "${cxx[@]}"
  .venv/bin/ruff check --quiet --fix .
  .venv/bin/ruff format --quiet .
fi
