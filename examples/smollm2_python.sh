#!/usr/bin/env bash
# SmolLM2-135M-Instruct learns to solve word problems like GSM8K's with a Python interpreter: a few demonstrations, GRPO over
# conversations (rewarded only for right answers), twelve of its conversations, and the score of the untrained model without
# the interpreter.
# SEED=1 examples/smollm2_python.sh  changes the seed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seed="${SEED:-0}"
name="${NAME:-smollm2-python-seed$seed}"
run="runs/$name"
seeds=(--seed "$seed" --data.seed "$seed")

tools/setup.sh
export PATH="$PWD/.venv/bin:$PATH"

rm -rf "$run"
python tools/upcycle.py "$run/model"

echo "== problems of two operations on numbers up to 99; test problems have the same wording and other numbers"
python - "$run" "$seed" <<'PY'
import json, pathlib, random, sys

STORIES = {
    "{name} has {a} apples and buys {b} boxes of {c} apples. How many apples does {name} have now?": "{a} + {b} * {c}",
    "A shop sells {a} books a day. How many has it sold in {b} days, if {c} of them come back?": "{a} * {b} - {c}",
    "{name} earns ${a} an hour for {b} hours and pays ${c} for food. How many dollars are left?": "{a} * {b} - {c}",
    "There are {b} rows of {a} chairs and {c} more chairs at the wall. How many chairs are there?": "{a} * {b} + {c}",
    "{name} reads {a} pages each morning and {b} each evening. How many pages is that in {c} days?": "({a} + {b}) * {c}",
}
folder, seed = pathlib.Path(sys.argv[1]), sys.argv[2]
for split, count in {"demonstrations": 64, "train": 400, "test": 32}.items():
    rng, rows = random.Random(f"{split}/{seed}"), []
    for _ in range(count):
        story, formula = rng.choice([*STORIES.items()])
        values = dict(name=rng.choice(["Ana", "Ben", "Carl", "Dina"]), **{key: rng.randint(11, 99) for key in "abc"})
        code = formula.format(**values)
        answer = str(eval(code))
        call = {"function": {"name": "python", "arguments": {"code": f"print({code})"}}}
        conversation = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": answer},
            {"role": "assistant", "content": f"The answer is {answer}."},
        ]
        row = {"prompt": story.format(**values), "answer": answer}
        rows.append(row | ({"response": conversation} if split == "demonstrations" else {}))
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
PY

echo "== warm start: supervised fine-tuning on a few demonstrations"
megatron-rl sft configs/smollm2_python_sft.yaml --name "$name/sft" "${seeds[@]}" --model.path "$run/model" \
  --data.path "$run/demonstrations.jsonl"

share=() # a single GPU is the trainer's and the server's in turn
(($(nvidia-smi --list-gpus 2>/dev/null | wc -l) != 1)) || share=(--rollout.colocate true)
data=(--data.path "$run/train.jsonl" --data.eval_path "$run/test.jsonl")

echo "== reinforcement learning: GRPO over conversations with the interpreter"
megatron-rl train configs/smollm2_python.yaml --name "$name/grpo" "${seeds[@]}" "${data[@]}" \
  --model.path "$run/sft/hf" "${share[@]}"

echo "== twelve held-out problems, before and after"
python - "$run/grpo/evals" <<'PY'
import json, pathlib, sys

files = sorted(pathlib.Path(sys.argv[1]).glob("step_*.jsonl"))
before, after = ([row for row in map(json.loads, file.open()) if not row["greedy"]] for file in (files[0], files[-1]))
for first, last in list(zip(before, after))[:: len(before) // 12][:12]:
    print(first["prompt"].split("<|im_start|>user\n")[1].split("<|im_end|>")[0])
    for row in (first, last):
        said = [turn["text"].split("<|im_end|>")[0].replace("<|im_start|>user", "") for turn in row["turns"]]
        print(f"    {row['reward']:.0f}", *(" ".join(text.split()) for text in said), sep="  ")
PY

echo "== the untrained model on the same problems, without the interpreter"
megatron-rl eval configs/smollm2_python.yaml --name "$name/without-tool" "${seeds[@]}" "${data[@]}" \
  --model.path "$run/model" --agent.tools '[]'
megatron-rl report "$run/grpo" # prints the scores before and after, and the page
