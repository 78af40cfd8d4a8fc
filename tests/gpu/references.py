"""Makes what the stages models and training compare a GPU with: tiny models, their results on the CPU in fp32, rollouts.

    python tests/gpu/references.py gpu-bundle/references

Runs on the CPU platform, also where there is a GPU. Rollouts are of the quickstart's model and need SGLang's environment;
without it that part is left out, and says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported: the CPU platform is active without CUDA alone
REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests"), str(REPOSITORY / "tests" / "trainer")]

SAMPLES, VOCABULARY, SEED = 14, 64, 7
STEPS = 6
"""Of the quickstart: recorded, and trained again from the record."""


def make_family(family: str, folder: Path) -> None:
    """The model, and what two updates of it give: log-probs, gradients and weights as whole Hugging Face tensors."""
    import torch
    from layouts import make_config, make_samples, run_layout

    from tools.make_tiny_model import Sizes, make_tiny_model

    # gpt-oss has a window in every other layer, DeepSeek-V3 a dense one first.
    model = make_tiny_model(family, folder / "model", sizes=Sizes(layers=2), seed=SEED)
    samples = make_samples(SEED, SAMPLES, VOCABULARY)
    result = run_layout(make_config(str(model), {}), samples)
    kept = {key: result[key] for key in ("log_probs", "grads", "weights", "metrics")}
    torch.save({"samples": [vars(sample) for sample in samples], **kept}, folder / "reference.pt")
    print(f"references: {family}", flush=True)


def make_training(folder: Path) -> None:
    """The quickstart's warm start, some recorded steps with the real engine, and the same steps from the record."""

    def command(*arguments: str) -> None:
        cli = [sys.executable, "-m", "megatron_rl.cli"]
        subprocess.run([*cli, *arguments], cwd=REPOSITORY, check=True, timeout=1200)

    work = folder / "work"
    tool = [sys.executable, "tools/make_tiny_model.py", "--preset", "quickstart", str(work / "model")]
    subprocess.run(tool, cwd=REPOSITORY, check=True, timeout=120)
    common = ["--runs_dir", str(work), "--logging.tensorboard", "false"]
    command("sft", "configs/quickstart_sft.yaml", *common, "--name", "sft", "--model.path", str(work / "model"))
    rl = ["train", "configs/quickstart.yaml", *common, "--steps", str(STEPS), "--model.path", str(work / "sft" / "hf")]
    rl += ["--eval.prompts", "0", "--rollout.routes", "true", "--optimizer.warmup_steps", "1"]
    command(*rl, "--name", "recorded", "--rollout.record", "true")
    record = str(work / "recorded" / "rollouts")
    command(*rl, "--name", "replayed", "--rollout.load", record)
    shutil.copytree(work / "sft" / "hf", folder / "model")
    shutil.copytree(record, folder / "rollouts")
    shutil.copy(work / "replayed" / "metrics.jsonl", folder)
    shutil.rmtree(work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to make; what is there already stays")
    parser.add_argument("--family", action="append", help="this model family alone, and no rollouts; may be repeated")
    options = parser.parse_args()

    import logging

    from megatron_rl.errors import UserError
    from megatron_rl.rollout.own_environment import find_python
    from tools.make_tiny_model import FAMILIES

    logging.getLogger("megatron").setLevel(logging.ERROR)
    for family in options.family or FAMILIES:
        if not (options.out / family / "reference.pt").is_file():
            make_family(family, options.out / family)
    if not options.family and not (options.out / "training" / "metrics.jsonl").is_file():
        try:
            find_python()
        except UserError as error:
            print(f"references: no rollouts: {error}", file=sys.stderr)
            return
        shutil.rmtree(options.out / "training", ignore_errors=True)
        make_training((options.out / "training").resolve())
    versions = {name: __import__(name).__version__ for name in ("torch", "transformers", "numpy")}
    (options.out / "versions.json").write_text(json.dumps(versions) + "\n")


if __name__ == "__main__":
    main()
