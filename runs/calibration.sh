#!/usr/bin/env bash
# What the paper leaves open, chosen on attention, Gated DeltaNet and DeltaNet alone. One GPU; stop it whenever you like.
set -euo pipefail
out="${RESULTS:+$(realpath -m "$RESULTS")}"  # of where you are
cd "$(dirname "$0")/.."
out="${out:-results/mqar}"
runningtensor mqar sweep calibration --length 1024 --jobs "${JOBS:-8}" --out "$out" --all-runs "$@"
runningtensor mqar report calibration --out "$out"
