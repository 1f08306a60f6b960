#!/usr/bin/env bash
# The paper's second table: the layer without its parts. One GPU, or with --ray many; stop it whenever you like.
set -euo pipefail
out="$(realpath -m --relative-to=. "${RESULTS:-$(dirname "$0")/../results/mqar}")"
runningtensor mqar sweep table2 --jobs "${JOBS:-8}" --out "$out" "$@"
runningtensor mqar report table2 --out "$out"
