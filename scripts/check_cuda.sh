#!/usr/bin/env bash
# Compiles every CUDA file of the core library and of the benchmarks (no torch, no GPU needed) for two
# architectures, fails where ptxas says that it serialised a wgmma pipeline, and runs the plans' host
# tests.
set -euo pipefail
cd "$(dirname "$0")/.."
cmake --preset core -B build/cuda-check -DFENWICK_CUDA=ON "-DCMAKE_CUDA_ARCHITECTURES=80;90a" >/dev/null
cmake --build build/cuda-check 2>&1 | tee build/cuda-check/build.log
if grep -E 'C75(0[89]|1[0-9]|20)' build/cuda-check/build.log; then
  echo "check_cuda: ptxas serialised wgmma or ignored setmaxnreg (see above)" >&2
  exit 1
fi
ctest --test-dir build/cuda-check --output-on-failure --parallel "$(nproc)" -L plan
