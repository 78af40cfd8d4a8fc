#!/usr/bin/env bash
# Compression from end to end: the quickstart's model is the teacher. Half of its expert parameters are removed by their
# importance on calibration data. The student then learns from the teacher on its own samples. A table compares all three.
# Everything runs on this machine, without a GPU, in minutes.  SEED=1 examples/compress_quickstart.sh  changes the seed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seed="${SEED:-0}"
name="${NAME:-compress-seed$seed}"

tools/setup.sh
export PATH="$PWD/.venv/bin:$PATH"

rm -rf "runs/$name"
python tools/make_tiny_model.py --preset quickstart "runs/$name/model" --seed "$seed"
seeds=(--seed "$seed" --data.seed "$seed")
share=() # a single GPU is the trainer's and the server's in turn
(($(nvidia-smi --list-gpus 2>/dev/null | wc -l) != 1)) || share=(--rollout.colocate true)

# Converts the newest checkpoint of a run to a Hugging Face folder.
newest() {
  megatron-rl convert "$(find "runs/$name/$1/checkpoints" -maxdepth 1 -name 'step_*' | sort | tail -n 1)" "runs/$name/$2"
}

echo "== the teacher: the quickstart's supervised fine-tuning and GRPO"
megatron-rl sft configs/quickstart_sft.yaml --name "$name/sft" "${seeds[@]}" --model.path "runs/$name/model"
megatron-rl train configs/quickstart.yaml --name "$name/grpo" "${seeds[@]}" --model.path "runs/$name/sft/hf" "${share[@]}"
newest grpo teacher

echo "== the student: half of the expert parameters"
megatron-rl prune configs/compress_prune.yaml --name "$name/prune" "${seeds[@]}" --model.path "runs/$name/teacher"

echo "== on-policy distillation"
megatron-rl train configs/compress_distill.yaml --name "$name/distill" "${seeds[@]}" --model.path "runs/$name/prune/hf" \
  --distillation.teacher "runs/$name/teacher" "${share[@]}"
newest distill student

echo "== score, size and speed of all three"
megatron-rl eval configs/quickstart.yaml --name "$name/scores/teacher" "${seeds[@]}" --model.path "runs/$name/teacher"
megatron-rl eval configs/quickstart.yaml --name "$name/scores/pruned" "${seeds[@]}" --model.path "runs/$name/prune/hf"
megatron-rl eval configs/quickstart.yaml --name "$name/scores/distilled" "${seeds[@]}" --model.path "runs/$name/student"
megatron-rl report "runs/$name/distill"
python examples/compress_table.py "runs/$name"
