#!/usr/bin/env bash
# Runs the tests of the CUDA kernels and of the lanes over a real device under compute-sanitizer: memcheck, then racecheck.
#
#   scripts/test-sanitizer.sh [TEST_BINARY]
#
# The binary is the crate's own (`cargo test --features cuda --lib --no-run` prints its path), built here if none is
# given: a GPU machine without Rust gets one from another machine. API errors that tests ask for (events that are not done,
# pins that are refused) are left out of the report. Racecheck slows kernels down about a hundredfold: minutes.
#
# Tried with CUDA 13.0's on a machine under Firecracker. Under gVisor compute-sanitizer refuses to run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
if [ ! -x "$sanitizer" ]; then
    echo "test-sanitizer: compute-sanitizer not found: it is a part of the CUDA toolkit" >&2
    exit 1
fi
binary=${1:-}
if [ -z "$binary" ]; then
    binary=$(cargo test --features cuda --lib --no-run --message-format=json | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p')
fi
"$sanitizer" --tool memcheck --report-api-errors no --error-exitcode 9 "$binary" cuda
"$sanitizer" --tool racecheck --error-exitcode 9 "$binary" cuda
