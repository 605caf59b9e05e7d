#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs GPU tests under a checker; fails if it finds anything, or was not there.
#
#   tests/gpu/sanitize.sh CHECK [PYTEST_ARGUMENT...]
#
# CHECK is a tool of NVIDIA's compute-sanitizer, which comes with CUDA:
#   memcheck    accesses outside of allocations
#   initcheck   kernels that read what nobody wrote
#   racecheck   races in shared memory
#   synccheck   barriers that not all threads reach
# or of MAX's own allocator:
#   poison      all new memory is NaN, so the tests fail if it is read
# or
#   control     whether the four tools find errors that are there
#
# Without arguments for pytest: tests/gpu/test_gpu.py. For memcheck and initcheck MAX's
# memory pool is off, so that a tensor is an allocation and an overrun cannot hide in
# its neighbour; tests/gpu/test_gpu_replays.py needs the pool: KEEP_POOL=1.
#
# PYTHON and COMPUTE_SANITIZER say which to use, PRINT_LIMIT how many findings are
# shown (20; 0: all), SANITIZER_ARGUMENTS is for the tool (such as
# --kernel-name-exclude=kernel_substring=dispatch).
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-python}
sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
check=${1:?usage: tests/gpu/sanitize.sh CHECK [PYTEST_ARGUMENT...]}
shift
if [ $# -eq 0 ]; then set -- -m gpu tests/gpu/test_gpu.py; fi
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
log=$(mktemp)
trap 'rm -f "$log"' EXIT

fail() {
  echo "sanitize: $check: $*" >&2
  exit 1
}

# Runs "$@" under a tool. Errors of the CUDA API are not reported: MAX's runtime
# probes for features and expects some.
under() {
  local tool=$1
  shift
  local options=(--tool="$tool" --target-processes=all --launch-timeout=0
    --error-exitcode=99 --print-limit="${PRINT_LIMIT:-20}")
  case $tool in
    memcheck) options+=(--leak-check=no --report-api-errors=no) ;;
    # Tests copy whole tensors to the host, with the rows that are undefined.
    initcheck) options+=(--check-api-memory-access=no) ;;
  esac
  if [[ $tool =~ ^(memcheck|initcheck)$ && -z ${KEEP_POOL:-} ]]; then
    export MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE=0
    export MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_ONLY=false
  fi
  # shellcheck disable=SC2086
  "$sanitizer" "${options[@]}" ${SANITIZER_ARGUMENTS:-} "$@"
}

# Whether a tool's last words are there, and say that it found nothing.
summaries() { grep -E '^=+ (ERROR|RACECHECK) SUMMARY: ' "$log"; }
found() { summaries | grep -vE 'SUMMARY: (0 errors|0 hazards .*\(0 errors, 0 warnings\))$'; }

if [ "$check" = control ]; then
  for pair in memcheck:overrun initcheck:unset racecheck:race synccheck:divergence; do
    (under "${pair%:*}" timeout 300 "$python" -c '
import sys
from mojo.run import subprocess_run_mojo
sys.exit(subprocess_run_mojo(["run", *sys.argv[1:]]).returncode)
' tests/mojo/planted.mojo "${pair#*:}") >"$log" 2>&1 || true
    found >/dev/null || { cat "$log"; fail "${pair%:*} did not find the ${pair#*:}"; }
    echo "sanitize: control: ${pair%:*} finds the ${pair#*:}"
  done
  exit 0
fi

status=0
tests=("$python" -m pytest -p no:cacheprovider "$@")
case $check in
  memcheck | initcheck | racecheck | synccheck)
    under "$check" "${tests[@]}" 2>&1 | tee "$log" || status=$? ;;
  poison)
    MODULAR_DEBUG_DEVICE_ALLOCATOR=poison-all "${tests[@]}" -s 2>&1 | tee "$log" || status=$? ;;
  *) fail "no such check" ;;
esac

# compute-sanitizer may end with 0 although its target did not.
result=$(sed -nE 's/^(=+ )?([0-9]+ (passed|failed|skipped|deselected|error).*[0-9]s).*/\2/p' "$log" | tail -1)
[[ $result =~ [0-9]+\ passed && ! $result =~ (failed|error) ]] ||
  fail "the tests did not pass: ${result:-they did not come to their end}"
if [ "$check" != poison ]; then
  summaries >/dev/null || fail "the tool has not said what it found"
  ! found || fail "findings"
fi
[ "$status" -eq 0 ] || fail "ended with $status"
echo "sanitize: $check: nothing found; $result"
