#!/usr/bin/env bash
# The paper's second table: the layer without its parts. One GPU, or with --ray many; stop it whenever you like.
set -euo pipefail
cd "$(dirname "$0")/.."
runningtensor mqar sweep table2 --jobs "${JOBS:-4}" "$@"
runningtensor mqar sweep speed --jobs 1  # alone on the GPU, for the times of a step
runningtensor mqar report table2
