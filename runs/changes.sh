#!/usr/bin/env bash
# What recall at 4,096 tokens depends on, one change at a time. One GPU; stop it whenever you like.
set -euo pipefail
out="$(realpath -m --relative-to=. "${RESULTS:-$(dirname "$0")/../results/mqar}")"
runningtensor mqar sweep changes --jobs "${JOBS:-8}" --out "$out" "$@"
runningtensor mqar report changes --out "$out"
