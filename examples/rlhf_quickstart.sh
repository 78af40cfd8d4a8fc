#!/usr/bin/env bash
# RLHF from end to end: supervised fine-tuning, preferences between the model's own responses, a reward model, PPO with a critic
# against it, DPO on the same preferences, and one report on all runs. The true score (are the numbers sorted?) is never used
# for training. Everything runs on this machine, without a GPU, in minutes.  SEED=1 examples/rlhf_quickstart.sh  changes the seed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seed="${SEED:-0}"
name="${NAME:-rlhf-seed$seed}"

tools/setup.sh
export PATH="$PWD/.venv/bin:$PATH"

rm -rf "runs/$name"
python tools/make_tiny_model.py --preset quickstart "runs/$name/model" --seed "$seed"
policy=(--seed "$seed" --model.path "runs/$name/sft/hf")
share=() # a single GPU is the trainer's and the server's in turn
(($(nvidia-smi --list-gpus 2>/dev/null | wc -l) != 1)) || share=(--rollout.colocate true)

echo "== warm start: supervised fine-tuning on demonstrations, half of which are wrong"
megatron-rl sft configs/quickstart_sft.yaml --name "$name/sft" --seed "$seed" --data.seed "$seed" \
  --model.path "runs/$name/model"

echo "== preferences: the right one of two responses to a prompt"
megatron-rl rollout configs/quickstart.yaml --name "$name/candidates" "${policy[@]}" --data.seed "$seed" \
  --batch.prompts_per_step 2048
python tools/make_preferences.py "runs/$name/candidates/rollouts/step_000000.jsonl" "runs/$name/preferences.jsonl" \
  --by reward/correct --seed "$seed"

echo "== a reward model"
megatron-rl reward configs/rlhf_reward.yaml --name "$name/reward" "${policy[@]}" --data.path "runs/$name/preferences.jsonl"

echo "== PPO with a critic, against the reward model"
megatron-rl train configs/rlhf_ppo.yaml --name "$name/ppo" "${policy[@]}" --data.seed "$seed" \
  --rewards.models.preferred.path "runs/$name/reward/hf" --critic.path "runs/$name/reward/hf" "${share[@]}"

echo "== DPO on the same preferences"
megatron-rl dpo configs/rlhf_dpo.yaml --name "$name/dpo" "${policy[@]}" --data.path "runs/$name/preferences.jsonl"

echo "== true score and reward model's score of all three policies, on the same held-out prompts"
checkpoint=$(find "runs/$name/ppo/checkpoints" -maxdepth 1 -name 'step_*' | sort | tail -n 1)
rm -rf "runs/$name/ppo/hf"
megatron-rl convert "$checkpoint" "runs/$name/ppo/hf"
for one in sft ppo dpo; do
  megatron-rl eval configs/rlhf_ppo.yaml --name "$name/scores/$one" --seed "$seed" --data.seed "$seed" \
    --model.path "runs/$name/$one/hf" --rewards.models.preferred.path "runs/$name/reward/hf"
done
megatron-rl report "runs/$name/"{sft,reward,ppo,dpo}
megatron-rl report "runs/$name/scores/"{sft,ppo,dpo}
