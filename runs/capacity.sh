#!/usr/bin/env bash
# Zoology's own mix of short sequences, tested far beyond it: recall against the size of the state, orders 2, 3 and 4.
set -euo pipefail
out="$(realpath -m --relative-to=. "${RESULTS:-$(dirname "$0")/../results/mqar}")"
runningtensor mqar sweep capacity --jobs "${JOBS:-8}" --out "$out" "$@"
runningtensor mqar report capacity --out "$out"
