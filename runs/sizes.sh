#!/usr/bin/env bash
# Recall against the size of the state, for orders 2, 3 and 4. Two and a half hours on two CPU cores; stop it at any time.
set -euo pipefail
out="$(realpath -m --relative-to=. "${RESULTS:-$(dirname "$0")/../results/mqar}")"
runningtensor mqar sweep sizes --jobs "${JOBS:-2}" --device cpu --out "$out" "$@"
runningtensor mqar report sizes --out "$out"
