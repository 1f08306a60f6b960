#!/usr/bin/env bash
# The paper's first table: 3 lengths, 3 learning rates, 3 seeds. One GPU, or with --ray many; stop it whenever you like.
set -euo pipefail
out="$(realpath -m --relative-to=. "${RESULTS:-$(dirname "$0")/../results/mqar}")"
runningtensor mqar sweep table1 --jobs "${JOBS:-8}" --out "$out" "$@"
runningtensor mqar report table1 --out "$out"
