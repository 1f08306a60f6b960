#!/usr/bin/env bash
# Models of 50M parameters on the same text, in the same order: DATA=folder runs/pretrain_50m.sh. One GPU; stop it whenever
# you like. DATA is what `runningtensor data prepare` made; the learning rate is chosen on attention, and shared.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${OUT:-pretrained/50m}"
train() { runningtensor pretrain small_50m --data "$DATA" --out "$out/$1" --set batch=16 --set compile=true "${@:2}"; }
for lr in 1e-4 1e-5; do train "attention-$lr" --model attention --set lr=$lr --set steps=400; done  # beside the first 400 of 1e-3
for model in attention running-tensor gated-deltanet deltanet; do
    train $model --model $model --set lr="${LR:-1e-3}"
done
runningtensor pretrain plot "$out"/*/ --out "$out/loss.png"
for model in attention running-tensor gated-deltanet deltanet; do
    [ -e "$out-models/$model" ] || runningtensor pretrain export "$out/$model" "$out-models/$model"
done
runningtensor evaluate "$out-models"/* --suite recall --texts "$DATA" --dtype bfloat16 --out "$out-models-recall"
