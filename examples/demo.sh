#!/usr/bin/env bash
# Plans a small GPT-2 for four processes, proves the plan equal to the model, trains it, and proves
# a second plan. `make demo` calls this with the virtual environment first in PATH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

model=examples/gpt2_bytes/config.json
out=runs/demo
shape=(--cluster 4xcpu --devices 4 --batch 8 --seq 128 --dtype fp32 --optimizer adamw)

show() {
    printf '\n$ %s\n' "$*"
    "$@"
}

rm -rf "$out"
show parloom plan "$model" "${shape[@]}" --out "$out/best"
show parloom verify "$out/best/plan.json"
show parloom run "$out/best/plan.json" -- examples/train_bytes.py \
    --out "$out/best" --batch 8 --seq 128 --target 2.9

show parloom plan "$model" "${shape[@]}" --method megatron --out "$out/megatron"
show parloom verify "$out/megatron/plan.json"

printf '\nDone in %d s.\n' "$SECONDS"
for file in plan.json program.py train.jsonl checkpoint; do
    test -e "$out/best/$file" || { echo "missing: $out/best/$file" >&2; exit 1; }
done
cat <<END
  plan        $out/best/plan.json          (tensor parallel: $out/megatron/plan.json)
  source      $out/best/program.py
  log         $out/best/train.jsonl
  checkpoint  $out/best/checkpoint
END
