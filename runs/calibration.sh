#!/usr/bin/env bash
# What the paper leaves open, chosen on attention, Gated DeltaNet and DeltaNet alone. One GPU; stop it whenever you like.
set -euo pipefail
out="$(realpath -m --relative-to=. "${RESULTS:-$(dirname "$0")/../results/mqar}")"
runningtensor mqar sweep calibration --length 1024 --jobs "${JOBS:-8}" --out "$out" --all-runs "$@"
runningtensor mqar report calibration --out "$out"
