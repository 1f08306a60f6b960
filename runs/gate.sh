#!/usr/bin/env bash
# What delays the start of RunningTensor, on a small task. 75 minutes on two CPU cores; stop it whenever you like.
set -euo pipefail
out="$(realpath -m --relative-to=. "${RESULTS:-$(dirname "$0")/../results/mqar}")"
runningtensor mqar sweep gate --jobs "${JOBS:-2}" --device cpu --out "$out" "$@"
runningtensor mqar report gate --out "$out"
