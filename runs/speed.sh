#!/usr/bin/env bash
# Times of a training step of 65,536 tokens, one row of both tables after another. One GPU; stop it whenever you like.
set -euo pipefail
out="${RESULTS:+$(realpath -m "$RESULTS")}"  # of where you are
cd "$(dirname "$0")/.."
out="${out:-results/mqar}"
runningtensor mqar sweep speed --jobs "${JOBS:-8}" --out "$out" "$@"  # many compile at once, one is timed
runningtensor mqar report speed --out "$out"
