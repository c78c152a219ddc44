#!/usr/bin/env bash
# Builds, tests, checks and measures on this machine's NVIDIA GPU; needs nvcc, cmake and ninja, but
# no network and no root. Libraries that are not installed are taken from Debian packages in .deb/
# (fetch them where there is a network: scripts/gpu.sh --fetch).
#
#   scripts/gpu.sh OUT [PART ...]     PART: build test sanitize torch bench (default: all)
#
# Logs and figures are left in the folder OUT; a failing part does not stop the next ones.
# BUILD_DIR names another build folder; JOBS the number of compilers; TARGETS what is built; TORCH=ON
# builds for torch without running its part.
set -uo pipefail
cd "$(dirname "$0")/.."

packages=(libhwy1 libhwy-dev nlohmann-json3-dev googletest libgtest-dev libgmock-dev libcli11-dev
  libbenchmark-dev libbenchmark1debian)
if [[ ${1:-} == --fetch ]]; then
  mkdir -p .deb && cd .deb && exec apt-get download "${packages[@]}"
fi
out=${1:?usage: scripts/gpu.sh OUT [build|test|sanitize|torch|bench ...]}
shift
parts=("$@")
((${#parts[@]})) || parts=(build test sanitize torch bench)
mkdir -p "$out"
out=$(cd "$out" && pwd)
build=${BUILD_DIR:-build/gpu}
jobs=${JOBS:-$(nproc)}
python=${PYTHON:-python3}
failed=()

wants() { [[ " ${parts[*]} " == *" $1 "* ]]; }
# run NAME COMMAND...: the output goes to OUT/NAME.log, its end to the terminal.
run() {
  local name=$1 start=$SECONDS
  shift
  if "$@" >"$out/$name.log" 2>&1; then
    echo "gpu: $name: ok ($((SECONDS - start)) s)"
  else
    failed+=("$name")
    echo "gpu: $name: FAILED ($((SECONDS - start)) s)"
    grep -E 'error|Error|FAILED|Failure|ERROR' "$out/$name.log" | head -40
    tail -25 "$out/$name.log"
  fi
}

nvidia-smi --query-gpu=name,compute_cap,driver_version,memory.total --format=csv,noheader |
  tee "$out/device.txt"
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
[[ $capability == 90 ]] && capability=90a

# configure BUILD OPTION...
configure() {
  local build=$1
  shift
  local options=(-DFENWICK_CUDA=ON "-DCMAKE_CUDA_ARCHITECTURES=$capability" "$@"
    "-DPython3_EXECUTABLE=$(command -v "$python")")
  if [[ ! -e /usr/include/hwy/highway.h ]]; then
    local root=$PWD/$build/packages
    mkdir -p "$root"
    for package in .deb/*.deb; do dpkg -x "$package" "$root" || return; done
    options+=("-DFENWICK_HWY_ROOT=$root/usr" "-DCMAKE_PREFIX_PATH=$root/usr")
  fi
  cmake -S . -B "$build" -G Ninja "${options[@]}"
}

if wants build; then
  wants torch && TORCH=ON
  run configure configure "$build" "-DFENWICK_TORCH=${TORCH:-OFF}"
  run build ninja -C "$build" -j "$jobs" -k 0 ${TARGETS:-}
fi

if wants test; then
  [[ -x $build/bin/cuda_plan_test ]] && run plan_test "$build/bin/cuda_plan_test"
  run general_test "$build/bin/cuda_general_test"
  if [[ $capability == 90a ]]; then
    run hopper_test "$build/bin/cuda_hopper_test"
    run hopper_check "$build/bin/hopper_scalar_gate" check
  fi
  run property_test "$build/bin/property_test" "--gtest_filter=${FILTER:-*Cuda*}"
fi

if wants sanitize; then
  for tool in memcheck racecheck; do
    run "$tool" timeout 240 compute-sanitizer --tool "$tool" --error-exitcode 9 \
      "$build/bin/cuda_general_test"
  done
  if [[ $capability == 90a ]]; then
    run hopper_memcheck timeout 240 compute-sanitizer --tool memcheck --error-exitcode 9 \
      "$build/bin/cuda_hopper_test" '--gtest_filter=*Plain:*Packed'
    # Kernels whose barriers racecheck understands.
    run racecheck_configure configure "$build/racecheck" -DFENWICK_TORCH=OFF -DFENWICK_RACECHECK=ON
    run racecheck_build ninja -C "$build/racecheck" -j "$jobs" cuda_hopper_test
    run hopper_racecheck timeout 240 compute-sanitizer --tool racecheck --error-exitcode 9 \
      "$build/racecheck/bin/cuda_hopper_test" '--gtest_filter=*Plain:*Packed'
  fi
fi

if wants torch; then
  run torch env "FENWICK_TORCH_LIBRARY=$PWD/$build/lib/libfenwick_torch.so" \
    "$python" -m pytest -q tests/torch tests/python/test_cuda_graphs.py
  run models "$build/bin/models_test" '--gtest_filter=*OnCuda*'
fi

if wants bench; then
  [[ -x $build/bin/cuda_bench ]] && run bench "$build/bin/cuda_bench"
  [[ $capability == 90a ]] && run hopper_time "$build/bin/hopper_scalar_gate" time
  cat "$out"/bench.log "$out"/hopper_time.log 2>/dev/null
fi

((${#failed[@]} == 0)) || {
  echo "gpu: failed: ${failed[*]}"
  exit 1
}
