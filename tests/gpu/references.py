"""Makes what the stages compare a GPU with, and what they start from: tiny models, their results on the CPU in fp32, rollouts,
and the warm starts of the stages with an engine.

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
    common = ["--runs_dir", str(work), "--logging.trackers", "[]"]
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


WARM_STARTS: dict[str, tuple[str, str, dict[str, int]]] = {
    "qwen3_moe": ("quickstart_sft", "numbers", {"hidden": 256, "expert_intermediate": 128, "max_position": 512}),
    # 128 wide, as it would be twice the size with 256; twice as wide as its experts it may not be.
    "gpt_oss": (
        "gptoss_quickstart_sft",
        "harmony_calls",
        {"hidden": 128, "expert_intermediate": 256, "max_position": 131_072, "window": 32},
    ),
}
"""Family -> config of its warm start, tokenizer and sizes. An engine on a GPU wants heads of 64; block FP8, widths that 128
divides."""


def make_warm_start(family: str, folder: Path) -> None:
    """The model of the family's quickstart in other widths, fine-tuned as there: a Hugging Face folder in bf16."""
    import torch
    from safetensors.torch import load_file, save_file

    from tools.make_tiny_model import Sizes, make_tiny_model

    config, tokenizer, widths = WARM_STARTS[family]
    work = folder.with_name(f"{folder.name}.work")
    shutil.rmtree(work, ignore_errors=True)
    sizes = Sizes(heads=4, kv_heads=2, head_dim=64, vocab=64, **widths)
    make_tiny_model(family, work / "model", sizes=sizes, tokenizer=tokenizer, vector_noise=0.0)
    cli = [sys.executable, "-m", "megatron_rl.cli", "sft", f"configs/{config}.yaml", "--logging.trackers", "[]"]
    cli += ["--runs_dir", str(work), "--name", "sft", "--model.path", str(work / "model")]
    subprocess.run(cli, cwd=REPOSITORY, check=True, timeout=1500)
    tuned = work / "sft" / "hf"
    for file in tuned.glob("*.safetensors"):  # half the size, and the weights of either precision are the same
        save_file({name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    config_file = tuned / "config.json"
    settings = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(settings | {"dtype": "bfloat16"}, indent=2) + "\n")
    tuned.rename(folder)
    shutil.rmtree(work)


def make_engine(folder: Path) -> None:
    """Models that the stages with an engine start from: folder/qwen3_moe and folder/gpt_oss. What is there stays."""
    for family in WARM_STARTS:
        if not (folder / family / "config.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            make_warm_start(family, folder / family)
        size = sum(path.stat().st_size for path in (folder / family).rglob("*") if path.is_file())
        print(f"references: engine/{family}: {size / 2**20:.1f} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to make; what is there already stays")
    parser.add_argument("--family", action="append", help="this model family alone, and no rollouts; may be repeated")
    options = parser.parse_args()

    import logging

    from megatron_rl.errors import UserError
    from megatron_rl.servers.own_environment import find_python
    from tools.make_tiny_model import FAMILIES

    logging.getLogger("megatron").setLevel(logging.ERROR)
    for family in options.family or FAMILIES:
        folder = options.out / "models" / family
        if not (folder / "reference.pt").is_file():
            make_family(family, folder)
    if not options.family:
        make_engine((options.out / "engine").resolve())
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
