#!/usr/bin/env bash
# A Mixture-of-Experts model learns to call a calculator for sums that it cannot do: set-up, warm start, GRPO over conversations
# with the tool, scores with and without the tool. Everything runs on this machine, without a GPU, in minutes.
# SEED=1 examples/agentic_quickstart.sh  changes the seed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seed="${SEED:-0}"
name="${NAME:-agentic-seed$seed}"
seeds=(--seed "$seed" --data.seed "$seed")

tools/setup.sh
export PATH="$PWD/.venv/bin:$PATH"

rm -rf "runs/$name"
python tools/make_tiny_model.py --preset quickstart --tokenizer calls "runs/$name/model" --seed "$seed"

echo "== warm start: supervised fine-tuning on demonstrations, three in ten of which call the calculator"
megatron-rl sft configs/agentic_quickstart_sft.yaml --name "$name/sft" "${seeds[@]}" --model.path "runs/$name/model"

share=() # a single GPU is the trainer's and the server's in turn
(($(nvidia-smi --list-gpus 2>/dev/null | wc -l) != 1)) || share=(--rollout.colocate true)

echo "== reinforcement learning: GRPO over conversations, rewarded only for right answers"
megatron-rl train configs/agentic_quickstart.yaml --name "$name/grpo" "${seeds[@]}" \
  --model.path "runs/$name/sft/hf" "${share[@]}"
megatron-rl convert "runs/$name/grpo/checkpoints/step_000040" "runs/$name/grpo/hf"

echo "== the same prompts without the tool, before and after"
for model in sft grpo; do
  megatron-rl eval configs/agentic_quickstart.yaml --name "$name/$model-without-tool" "${seeds[@]}" \
    --model.path "runs/$name/$model/hf" --agent.tools '[]' --eval.greedy false
done

megatron-rl report "runs/$name/grpo" # prints the scores before and after, and the page
