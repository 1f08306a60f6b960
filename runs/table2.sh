#!/usr/bin/env bash
# The paper's second table: the layer without its parts. One GPU, or with --ray many; stop it whenever you like.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${RESULTS:-results/mqar}"
runningtensor mqar sweep table2 --jobs "${JOBS:-4}" --out "$out" "$@"
runningtensor mqar sweep speed --jobs 1 --out "$out"  # alone on the GPU, for the times of a step
runningtensor mqar report table2 --out "$out"
