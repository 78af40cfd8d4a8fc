"""The recipes for one machine fit it, by the arithmetic of `megatron-rl plan`, and say so with the figures of today."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from models.test_sizes import MODELS

from megatron_rl.agents.programs import rollout_program
from megatron_rl.checks.eval_sets import eval_sets
from megatron_rl.checks.key_rules import MEMORY
from megatron_rl.checks.memory_plan import GB, estimate
from megatron_rl.checks.refusals import refuse
from megatron_rl.config import Config, DataConfig
from megatron_rl.config.load import load_config
from megatron_rl.errors import UserError
from megatron_rl.models.precision import Machine
from megatron_rl.rewards.rewards import names_of
from megatron_rl.rollout.program import SingleTurn
from megatron_rl.tasks import build_task, fitting
from tests.tasks.scripted import ONE_PROCESS
from tools.make_tiny_model import TOKENIZERS

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RECIPES = {
    "olmoe-1b-7b-1x80gb": ("OLMoE-1B-7B", 1, 80),
    "moonlight-16b-a3b-1xh200": ("Moonlight-16B-A3B", 1, 141),
    "qwen3-30b-a3b-8x80gb": ("Qwen3-30B-A3B", 8, 80),
    "gpt-oss-20b-8x80gb": ("gpt-oss-20b", 8, 80),
}
"""Config -> model, GPUs, GB of one."""
ALL = sorted(CONFIGS.glob("*.yaml"))
FAMILIES = {"gpt-oss": "harmony_calls", "gptoss": "harmony_calls", "agentic": "calls"} | dict.fromkeys(
    ("quickstart", "rlhf", "compress"), "numbers"
)
"""Beginning of a recipe's name -> tokenizer of the model that it is for (tools/make_tiny_model.py); of others: text."""
LEARNS = {"sft": "sft", "pretrain": "sft", "prune": "prune", "dpo": "dpo", "reward": "reward"}
"""End of a recipe's name -> the command that it is for; others are trained."""


@pytest.mark.parametrize("name", RECIPES)
def test_it_fits(name):
    model, gpus, memory = RECIPES[name]
    config = load_config(CONFIGS / f"{name}.yaml")
    assert config.name == name
    found = estimate(config, MODELS[model], gpus)
    assert found.fits(memory * GB), f"{found.usage.total / GB:.1f} GB"
    refuse(config, *MEMORY, machine=Machine((9, 0), None, None, "13.0"))
    text = (CONFIGS / f"{name}.yaml").read_text()
    said = re.search(r"weights ([\d.]+), gradients ([\d.]+), optimizer ([\d.]+), total at most ([\d.]+)\.", text)
    kinds = [found.usage.kinds.get(kind, 0) for kind in ("weights", "gradients", "optimizer")]
    for figure, size in zip(said.groups(), kinds, strict=False):
        assert float(figure) == pytest.approx(size / GB, abs=0.06)
    assert float(said[4]) == pytest.approx(found.usage.total / GB, rel=0.03)  # with what is assumed
    host = float(re.search(r"Host memory, GB: optimizer (\d+)", text)[1])
    assert host == pytest.approx(gpus * found.host / GB, abs=0.6)


@pytest.mark.parametrize("name", RECIPES)
def test_the_engines_weights_leave_room_for_a_cache(name):
    """Of as many tokens as it says, within 10 %, which is more than 32 of its longest responses."""
    model, gpus, memory = RECIPES[name]
    config, hf_config = load_config(CONFIGS / f"{name}.yaml"), MODELS[model]
    server = config.rollout.server
    assert config.rollout.colocate and config.sync.transport == "tensor"
    assert server.count * server.tensor == gpus
    weights = estimate(config, hf_config, gpus).push["bytes"]
    room = server.tensor * server.memory_fraction * memory * GB - weights
    if latent := getattr(hf_config, "kv_lora_rank", None):
        a_layer = 2 * (latent + hf_config.qk_rope_head_dim)
    else:
        head = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
        a_layer = 2 * 2 * hf_config.num_key_value_heads * head
    tokens = room / (a_layer * hf_config.num_hidden_layers)
    text = (CONFIGS / f"{name}.yaml").read_text()
    number, unit = re.search(r"([\d.,]+)( million)? tokens \(\d+ kB each\)", text).groups()
    said = float(number.replace(",", "")) * (1e6 if unit else 1)
    assert said == pytest.approx(tokens, rel=0.1)
    assert tokens > 32 * config.rollout.context_length


TASKS = ("gsm8k", "retool", "verifyif")
H200 = 141


def test_every_recipe_of_gpt_oss_speaks_harmony_and_is_on_policy():
    files = [file for file in ALL if file.stem.startswith("gpt-oss")]
    assert len(files) == 7
    for config in map(load_config, files):
        assert config.rollout.program == "agent" and config.agent.dialect == "harmony"
        assert config.algorithm.on_policy and config.data.task != "file"


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("model", "nodes"), [("gpt-oss-20b", 2), ("gpt-oss-120b", 8)])
def test_the_gpt_oss_recipes_fit_the_trainers_nodes(model, nodes, task):
    """On-policy, in Harmony; a conversation of the greatest length fits a micro-batch, and what 120b needs is said."""
    file = CONFIGS / f"{model}-{task}.yaml"
    config = load_config(file)
    found = estimate(config, MODELS[model], 8 * nodes)
    assert config.name == file.stem and found.fits(H200 * GB)
    if said := re.search(r"64 GPUs .* needs ([\d.]+) GB,", file.read_text()):
        assert float(said[1]) == pytest.approx(found.usage.total / GB, rel=0.03)
    assert bool(said) == (model == "gpt-oss-120b")
    assert config.rollout.program == "agent" and config.agent.dialect == "harmony"
    assert config.batch.updates_per_step == 1 and config.correction.mode == "none"
    assert config.rollout.context_length <= config.batch.tokens_per_micro_batch * config.parallel.context


def test_the_retool_recipe_is_the_articles():
    """Prompts of 8k, responses of 16k, the interpreter, and mean@30 over the 30 problems of an AIME."""
    config = load_config(CONFIGS / "gpt-oss-20b-retool.yaml")
    assert (config.rollout.max_new_tokens, config.rollout.context_length) == (16 * 1024, 24 * 1024)
    assert config.agent.tools == ["python"] and config.agent.max_turns > 1
    assert (config.eval.prompts, config.eval.samples) == (30, 30)


@pytest.mark.parametrize("kind", ["reward", "dpo", "ppo"])
def test_the_recipes_of_preferences_fit_one_node(kind):
    """Trainer of 8 GPUs of 80 GB: PPO with its critic, reference and reward model, which are of the policy's size."""
    file = CONFIGS / f"olmoe-1b-7b-{kind}.yaml"
    config = load_config(file, ["--model.path", "policy", "--critic.path", "policy"])
    models = {name: replace(model, path="policy") for name, model in config.rewards.models.items()}
    found = estimate(replace(config, rewards=replace(config.rewards, models=models)), MODELS["OLMoE-1B-7B"], 8)
    assert config.name == file.stem and found.fits(80 * GB)
    said = re.search(r"at most\s#?\s*([\d.]+) GB each", file.read_text())
    assert float(said[1]) == pytest.approx(found.usage.total / GB, rel=0.03)
    companions = {"critic", "reference", "reward_models"}
    assert (companions & {kind for kind, size in found.usage.kinds.items() if size}) == (
        companions if kind == "ppo" else set()
    )
    assert config.rollout.context_length <= config.batch.tokens_per_micro_batch


@cache
def tokenizer_of(recipe: str):
    kind = next((kind for name, kind in FAMILIES.items() if recipe.startswith(name)), "text")
    return TOKENIZERS[kind](4096)


def kind_of(recipe: str) -> str:
    return LEARNS.get(re.split("[-_]", recipe)[-1], "train")


def rows_for(data: DataConfig, folder: Path, recipe: str) -> str:
    """A file with as many columns as the recipe may want of a row."""
    numbers = "3 1 2 <" if recipe.startswith("rlhf") else "How many are three and four?"
    row = {data.prompt_key: numbers, "reward_model": {"ground_truth": "7"}, "answer": "#### 7", "response": "7"}
    row |= {"chosen": "1", "rejected": "2"} if kind_of(recipe) in ("dpo", "reward") else {}
    if recipe == "pretrain":
        row = {data.text_key: "Three and four are seven."}
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({**row, data.prompt_key: f"{numbers} {i}"}) + "\n" for i in range(30)))
    return str(file)


def made(config: Config, folder: Path, recipe: str, kind: str) -> tuple[SingleTurn, list]:
    """The program that a recipe names, as a run makes it, and the prompts of its task, from a file of ours."""
    path = rows_for(config.data, folder, recipe) if config.data.task == "file" else None
    data, program = replace(config.data, path=path, eval_path=None), rollout_program(config.rollout.program)
    task = build_task(
        data,
        demonstrations=kind in ("sft", "prune"),
        preferences=kind in ("reward", "dpo"),
        more_parts=program.parts,
        later_parts=names_of(config.rewards) if kind == "train" else [],
    )
    return program(config, tokenizer_of(recipe), task, ONE_PROCESS), task.prompts("train")


@pytest.mark.parametrize("file", ALL, ids=lambda file: file.stem)
def test_what_a_recipe_asks_can_be_asked(file, tmp_path):
    """A prompt becomes tokens that leave room for a response, by the program and the dialect that it names."""
    config, kind, rng = load_config(file), kind_of(file.stem), random.Random(file.stem)
    form, prompts = made(config, tmp_path, file.stem, kind)
    try:
        prompt = prompts[rng.randrange(len(prompts))]
        if prompt.document:
            assert len(form.document(prompt.text).tokens) > 1
            return
        encoded = form.encode(prompt)
        assert len(encoded.tokens) > 1
        if form.tokenizer is tokenizer_of(""):
            assert prompt.text in form.tokenizer.decode(encoded.tokens)
        if kind in ("sft", "prune"):
            assert form.demonstration(encoded, rng)["loss_mask"].any()
        elif kind in ("dpo", "reward"):
            assert not form.comparison(encoded, rng).problem(config.rollout.context_length)
        else:
            assert fitting([prompt], form, config.rollout.context_length, config.rollout.max_new_tokens)
    finally:
        form.close()


SETS = {file: sets for file in ALL if (sets := load_config(file).eval.sets)}
JUDGED = {one.task: (file, name) for file, sets in SETS.items() for name, one in sets.items()}
"""A set of each task, whose verifier is asked."""


@pytest.mark.parametrize("file", SETS, ids=lambda file: file.stem)
def test_the_evaluation_sets_of_a_recipe_can_be_asked(file, tmp_path):
    """Each set that it names, with rows in the form of the public ones."""
    config, rows = load_config(file), tmp_path / "set.jsonl"
    asked = [{"problem": f"{i} and {i}?", "answer": str(2 * i)} for i in range(3)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in (*asked, {"question": "3 and 4?", "answer": "#### 7"})))
    assert all("/" in one.path and one.task and "eval_split" in one.options for one in config.eval.sets.values())
    sets = {name: replace(one, path=str(rows)) for name, one in config.eval.sets.items()}
    config = replace(config, eval=replace(config.eval, sets=sets))
    form, _ = made(config, tmp_path, file.stem, "train")
    for one in eval_sets(config.data, config.eval, config.rollout, config.rewards, "train", form):
        assert len(one.prompts) == 4 and one.samples == config.eval.samples
        if (file, one.name) in JUDGED.values():
            right = one.program.task.score(one.prompts[3:], ["So it is \\boxed{7}\n#### 7"])
            assert right[0]["correct"] == 1.0
    assert not load_config(file, ["--eval.sets", "{}"]).eval.sets


def test_a_recipe_of_another_family_is_seen(tmp_path):
    """A model with channels, asked as one without them, is what the test above refuses."""
    config = load_config(CONFIGS / "olmoe-1b-7b.yaml")
    form, prompts = made(config, tmp_path, "gpt-oss-as-olmoe", "train")
    with pytest.raises(UserError, match=r"^config: rollout.program: .*agent.dialect: harmony"):
        form.encode(prompts[0])
