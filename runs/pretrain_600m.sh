#!/usr/bin/env bash
# The paper's pretraining, on this machine's GPUs: MODEL=attention runs/pretrain_600m.sh. Stop it whenever you like.
set -euo pipefail
cd "$(dirname "$0")/.."
data="${DATA:-data/fineweb-edu-100BT}"
[ -e "$data/meta.json" ] || runningtensor data prepare HuggingFaceFW/fineweb-edu "$data" --config sample-100BT
model="${MODEL:-running-tensor}"
torchrun --standalone --nproc-per-node "${GPUS:-gpu}" -m runningtensor pretrain paper_600m --data "$data" \
    --out "${OUT:-pretrained/600m-$model}" --model "$model" --set compile=true "$@"
