#!/usr/bin/env bash
# What RunningTensor's recall at 4,096 tokens depends on, one change at a time. One GPU; stop it whenever you like.
set -euo pipefail
cd "$(dirname "$0")/.."
runningtensor mqar sweep changes --jobs "${JOBS:-4}" "$@"
runningtensor mqar report changes
