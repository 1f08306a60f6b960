#!/usr/bin/env bash
# Times of a training step of 65,536 tokens, one row of both tables after another. One GPU; stop it whenever you like.
set -euo pipefail
out="$(realpath -m --relative-to=. "${RESULTS:-$(dirname "$0")/../results/mqar}")"
runningtensor mqar sweep speed --jobs "${JOBS:-8}" --out "$out" "$@"  # many compile at once, one is timed
runningtensor mqar report speed --out "$out"
