#!/usr/bin/env bash
# A Mixture-of-Experts model learns to sort numbers by GRPO: set-up, warm start, reinforcement learning, report.
# Everything runs on this machine, without a GPU, in minutes.  SEED=1 examples/quickstart.sh  changes the seed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seed="${SEED:-0}"
name="${NAME:-quickstart-seed$seed}"

tools/setup.sh
export PATH="$PWD/.venv/bin:$PATH"

rm -rf "runs/$name"
python tools/make_tiny_model.py --preset quickstart "runs/$name/model" --seed "$seed"

echo "== warm start: supervised fine-tuning on demonstrations, half of which are wrong"
megatron-rl sft configs/quickstart_sft.yaml --name "$name/sft" --seed "$seed" --data.seed "$seed" \
  --model.path "runs/$name/model"

share=() # a single GPU is the trainer's and the server's in turn
(($(nvidia-smi --list-gpus 2>/dev/null | wc -l) != 1)) || share=(--rollout.colocate true)

echo "== reinforcement learning: GRPO with a verifier"
megatron-rl train configs/quickstart.yaml --name "$name/grpo" --seed "$seed" --data.seed "$seed" \
  --model.path "runs/$name/sft/hf" "${share[@]}"

megatron-rl report "runs/$name/grpo" # prints the scores before and after, and the page
