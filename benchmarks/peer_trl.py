"""TRL's GRPOTrainer on the same model, prompts and token counts, for comparison. Prints one JSON line with seconds per step.

`benchmarks/step.py --peer trl` starts this script. TRL stops a response at the end-of-sequence token, as megatron_rl does. The
reward is the length, so that only generation, forward and backward take time.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts-file", required=True, help="JSON list of prompt texts")
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--micro-batch", type=int, default=0, help="sequences per forward-backward; 0: all")
    args = parser.parse_args()

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(args.threads)
    logging.disable(logging.WARNING)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    prompts = json.loads(Path(args.prompts_file).read_text())
    sequences = args.prompts * args.samples
    micro = args.micro_batch or sequences
    tokens: list[int] = []

    class Steps(TrainerCallback):
        def __init__(self):
            self.seconds: list[float] = []

        def on_step_begin(self, *_, **__):
            self.start = time.perf_counter()

        def on_step_end(self, *_, **__):
            self.seconds.append(time.perf_counter() - self.start)

    def length_reward(completion_ids, **_):
        tokens.append(sum(len(c) for c in completion_ids))
        return [float(len(c)) for c in completion_ids]

    steps = Steps()
    with tempfile.TemporaryDirectory() as out:
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=length_reward,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            callbacks=[steps],
            args=GRPOConfig(
                output_dir=out,
                max_steps=args.steps,
                per_device_train_batch_size=micro,
                gradient_accumulation_steps=sequences // micro,
                num_generations=args.samples,
                max_completion_length=args.new_tokens,
                temperature=1.0,
                beta=0.0,
                learning_rate=args.lr,
                bf16=False,
                use_cpu=not torch.cuda.is_available(),
                gradient_checkpointing=False,
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                dataloader_num_workers=0,
            ),
        )
        trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    # Generation runs inside the first micro-batch of a step, so the step time includes everything.
    print(json.dumps({"step_s": steps.seconds, "completion_tokens": tokens, "peak_gib": peak}))


if __name__ == "__main__":
    main()
