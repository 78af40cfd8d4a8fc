#!/usr/bin/env bash
# A small gpt-oss (attention sinks, sliding windows, YaRN, experts with biases) learns to call a calculator in Harmony for sums that
# it cannot do: set-up, warm start, GRPO over conversations with the tool. Everything runs on this
# machine, without a GPU, in minutes.  SEED=1 examples/gptoss_quickstart.sh  changes the seed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seed="${SEED:-0}"
name="${NAME:-gptoss-seed$seed}"
seeds=(--seed "$seed" --data.seed "$seed")

tools/setup.sh
export PATH="$PWD/.venv/bin:$PATH"

rm -rf "runs/$name"
python tools/make_tiny_model.py --preset gptoss_quickstart --tokenizer harmony_calls "runs/$name/model" --seed "$seed"

echo "== warm start: supervised fine-tuning on demonstrations, half of which call the calculator"
megatron-rl sft configs/gptoss_quickstart_sft.yaml --name "$name/sft" "${seeds[@]}" --model.path "runs/$name/model"

share=() # a single GPU is the trainer's and the server's in turn
(($(nvidia-smi --list-gpus 2>/dev/null | wc -l) != 1)) || share=(--rollout.colocate true)

echo "== reinforcement learning: GRPO over conversations, rewarded only for right answers"
megatron-rl train configs/gptoss_quickstart.yaml --name "$name/grpo" "${seeds[@]}" \
  --model.path "runs/$name/sft/hf" "${share[@]}"

megatron-rl report "runs/$name/grpo" # prints the scores before and after, and the page
