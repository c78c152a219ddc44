#!/usr/bin/env bash
# The demonstration: verify, train, generate and measure on this machine; results in out/demo.
# FENWICK_DEMO_MINUTES (default 8) is the time it is planned for on 2 cores; --quick runs every
# stage at a size that shows nothing but that it works.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${FENWICK_DEMO_PYTHON:-.venv/bin/python}" scripts/demo.py "$@"
