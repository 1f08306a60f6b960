#!/usr/bin/env bash
# Models of 50M parameters on the same text, in the same order: DATA=folder runs/pretrain_50m.sh. One GPU; stop it whenever
# you like. DATA is what `runningtensor data prepare` made; the learning rate is chosen on attention, and shared.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${OUT:-pretrained/50m}" models="attention running-tensor gated-deltanet deltanet"
train() {
    runningtensor pretrain small_50m --data "$DATA" --out "$out/$1" --set batch=16 --set compile=true \
        --set validate_every=100 --set save_every=400 "${@:2}"
}
for lr in 1e-4 1e-5; do train "attention-$lr" --model attention --set lr=$lr --set steps=400; done  # beside 400 of 1e-3
for model in $models; do
    train $model --model $model --set lr="${LR:-1e-3}"
    [ -e "$out-models/$model" ] || runningtensor pretrain export "$out/$model" "$out-models/$model"
    runningtensor evaluate "$out-models/$model" --suite recall --texts "$DATA" --dtype bfloat16 --out "$out/$model/recall"
done
vary() { train "running-tensor-$1" --model running-tensor "${@:3}" --set steps="$2"; }
vary linear 800 --set projection=linear --set mlp=1120
vary cumulative 800 --set forget=cumulative
vary linear-cumulative 800 --set projection=linear --set mlp=1120 --set forget=cumulative
vary 128 400 --set heads=4 --set value_dim=128
vary 24 300 --set heads=16 --set key_dims=24,24 --set value_dim=48 --set mlp=1536
for run in "$out"/*/; do  # what docs/tables.py reads
    kept="results/pretrain/50m/$(basename "$run")" && mkdir -p "$kept"
    cp "$run/log.jsonl" "$kept/"
    [ ! -e "$run/recall" ] || cp "$run"/recall/*.json "$kept/recall.json"
done
python docs/tables.py
