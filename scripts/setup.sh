#!/usr/bin/env bash
# Installs all that the project needs: Debian packages and a virtual environment in .venv.
# Idempotent: when everything is in place it returns within a second. Runs as root or with sudo;
# with neither, one line names the missing packages.
set -euo pipefail
cd "$(dirname "$0")/.."

# The one list of system dependencies.
packages=(
  g++ cmake ninja-build ccache pkg-config git
  libhwy-dev          # SIMD with run-time dispatch
  nlohmann-json3-dev  # configuration and checkpoint headers
  libcli11-dev        # command line
  libgtest-dev libgmock-dev libbenchmark-dev
  clang-format
  python3 python3-venv python3-dev
)

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f '${Status}' "$package" 2>/dev/null || true)
  [[ $status == *"install ok installed"* ]] || missing+=("$package")
done
if ((${#missing[@]})); then
  if [[ $(id -u) -eq 0 ]]; then
    sudo=()
  elif command -v sudo >/dev/null; then
    sudo=(sudo)
  else
    echo "setup: missing Debian packages, and neither root nor sudo to install them: ${missing[*]}" >&2
    exit 1
  fi
  echo "setup: installing ${missing[*]}"
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -qq
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    "${missing[@]}" >/dev/null
fi

# FENWICK_PYTHON picks the interpreter (3.10 to 3.13); FENWICK_TORCH=system keeps the torch that it
# already has, e.g. a CUDA build, instead of installing the pinned one.
python=${FENWICK_PYTHON:-python3}
stamp=.venv/.requirements
wanted=$(cat requirements.txt; echo "${FENWICK_TORCH:-pinned}")
if [[ ! -x .venv/bin/python || $(cat "$stamp" 2>/dev/null) != "$wanted" ]]; then
  echo "setup: virtual environment .venv (torch and the rest of requirements.txt)"
  if [[ ${FENWICK_TORCH:-pinned} == system ]]; then
    "$python" -m venv --system-site-packages .venv
    grep -v '^torch==' requirements.txt | .venv/bin/pip install --quiet -r /dev/stdin
  else
    "$python" -m venv .venv
    .venv/bin/pip install --quiet --disable-pip-version-check -r requirements.txt
  fi
  echo "$wanted" >"$stamp"
fi
