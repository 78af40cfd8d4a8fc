#!/usr/bin/env bash
# A real pretrained language model, SmolLM2-135M-Instruct, learns by GRPO to answer sums: set-up, data, training, twenty answers.
# Everything runs on this machine, without a GPU and without a model hub, in minutes.
#   SEED=1 examples/smollm2.sh      another seed
#   EXPERTS=4 examples/smollm2.sh   the same model upcycled to a Mixture-of-Experts, two experts active
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seed="${SEED:-0}"
experts="${EXPERTS:-0}"
name="${NAME:-smollm2-experts$experts-seed$seed}"
run="runs/$name"

tools/setup.sh
export PATH="$PWD/.venv/bin:$PATH"

rm -rf "$run"
upcycle=()
((experts == 0)) || upcycle=(--experts "$experts" --topk 2 --seed "$seed")
python tools/upcycle.py "$run/model" "${upcycle[@]}"

echo "== sums up to nine; four in ten pairs of numbers are held out, in both orders"
python examples/digit_sums.py "$run"

share=() # a single GPU is the trainer's and the server's in turn
(($(nvidia-smi --list-gpus 2>/dev/null | wc -l) != 1)) || share=(--rollout.colocate true)

megatron-rl train configs/smollm2.yaml --name "$name/grpo" --seed "$seed" --data.seed "$seed" --model.path "$run/model" \
  --data.path "$run/train.jsonl" --data.eval_path "$run/test.jsonl" "${share[@]}"

echo "== twenty held-out answers, before and after"
python - "$run/grpo/evals" <<'PY'
import json, pathlib, sys

files = sorted(pathlib.Path(sys.argv[1]).glob("step_*.jsonl"))
before, after = ([row for row in map(json.loads, file.open()) if not row["greedy"]] for file in (files[0], files[-1]))
for first, last in list(zip(before, after))[:: len(before) // 20][:20]:
    question = first["prompt"].split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
    print(f"{question:48}  {first['response'][:50]!r:54}  {last['response'][:50]!r}")
PY
megatron-rl report "$run/grpo" # prints the scores before and after, and the page
