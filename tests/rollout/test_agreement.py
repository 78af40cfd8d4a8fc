"""The two sides of one model: the trainer's log-probs against those of SGLang's prefill, and of its sampling."""

from __future__ import annotations

import re
import secrets
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.config import JudgeConfig
from megatron_rl.data.sequence import Sequence
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.errors import UserError
from megatron_rl.models.precision import Machine
from megatron_rl.rewards.judge import Judge, Judgments
from megatron_rl.servers.server import RolloutServer
from megatron_rl.tasks import Prompt
from tests.ranks import nearly_ties, run_ranks
from tests.rollout.conftest import (
    CPU_SERVER,
    Question,
    assert_agree,
    client_of,
    collect,
    key_reference,
    prefill_log_probs,
)
from tests.weights import scaled
from tools.make_tiny_model import Sizes, make_tiny_model


def trainer_log_probs(model: str, asked: list[tuple[str, list[Sequence], SamplingSupport]]) -> list[list]:
    """For each (precision, samples, support): per sample [response_length], from the trainer's scoring pass over packed
    micro-batches. Runs in a process of its own. precision: of the trainer, and switches of that section that are on."""
    from megatron_rl.config.load import build_config
    from megatron_rl.distributed import parallel
    from megatron_rl.trainer.trainer import build_trainer

    trainers, everything = {}, []
    for precision, samples, support in asked:
        if precision not in trainers:
            values = {"model": {"path": model}, "batch": {"tokens_per_micro_batch": 256}}
            train, *switches = precision.split()
            config = build_config(values | {"precision": {"train": train, **dict.fromkeys(switches, True)}})
            ranks = (
                next(iter(trainers.values())).ranks if trainers else parallel.initialize(config.parallel, config.seed)
            )
            trainers[precision] = build_trainer(config, ranks, total_updates=1, support=support)
        trainer = trainers[precision]
        trainer.support = support
        batches = trainer.pack(samples)
        found = {}
        for batch, log_probs in zip(batches, trainer.compute_log_probs(batches), strict=True):
            for row, sample in enumerate(batch.samples):
                found[sample] = log_probs[(batch.segments.ids == row) & batch.mask].float().numpy()
        assert len(batches) > 1
        everything.append([found[i] for i in range(len(samples))])
    return everything


def ask_trainer(folder, *asked: tuple[str, list[Sequence], SamplingSupport]) -> list[list[np.ndarray]]:
    [found] = run_ranks(1, "tests.rollout.test_agreement:trainer_log_probs", (str(folder), asked))
    return found


def gap(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """Mean of (log ratio)^2 / 2: the KL to second order, for tokens that nobody sampled."""
    d = np.concatenate(ours) - np.concatenate(theirs)
    return float(np.mean(d**2) / 2)


class WithTokenizer(RolloutServer):
    """A server that speaks OpenAI's API too, as one for others does."""

    def command(self, machine: Machine | None = None) -> list[str]:
        return [word for word in super().command(machine) if word != "--skip-tokenizer-init"]


@pytest.fixture(scope="module")
def with_tokenizer(reference, tmp_path_factory):
    log = tmp_path_factory.mktemp("with_tokenizer") / "log"
    with WithTokenizer(reference.folder, CPU_SERVER, dtype="bf16", context_length=4096, log_path=log) as server:
        yield server


def test_a_served_model_is_a_judge(with_tokenizer, monkeypatch, caplog):
    """A random model has no verdict; with a grammar that leaves it the mark alone it has one. Without its key: one line."""
    response = Trajectory(
        tokens=np.arange(4, dtype=np.int32), prompt_length=2, prompt_id="p", group_id=0, text="fine é"
    )
    prompts = [Prompt("p", "how are you?")]

    def judge(**keys: Any) -> Judge:
        address = f"{with_tokenizer.address}/v1"
        config = JudgeConfig(address=address, model="tiny", retries=0, max_failures=1.0, max_tokens=40)
        return Judge("wise", replace(config, **keys), Judgments(9, None, "wise", 0))

    key = key_reference(with_tokenizer)
    judge(api_key=key).check(prompts)
    assert judge(api_key=key).score([response], prompts) == [None]
    assert re.search(
        r"1 of 1 responses are masked: (its reply was cut off \('length'\)|there is no verdict)", caplog.text
    )
    monkeypatch.setattr(secrets, "token_hex", lambda size: "ab12")
    [score] = judge(api_key=key, options={"regex": "VERDICT ab12: [1-9]"}).score([response], prompts)
    assert score in [mark / 10 for mark in range(1, 10)]
    with pytest.raises(UserError, match=r"rewards\.judges\.wise: http://.* it asks for another key; set the api_key"):
        judge().check(prompts)


@pytest.mark.parametrize(("dtype", "median", "largest"), [("fp32", 1e-5, 1e-5), ("bf16", 0.01, 0.1)])
def test_trainer_agrees_with_prefill(dtype, median, largest, reference, request):
    rng = np.random.default_rng(np.random.SeedSequence().entropy)
    sequences = [rng.integers(3, 512, int(rng.integers(4, 60))).tolist() for _ in range(24)]
    if dtype == "fp32":
        served = prefill_log_probs(client_of(request.getfixturevalue("server")), sequences)
    else:
        served = prefill_log_probs(client_of(request.getfixturevalue("with_tokenizer")), sequences)
    samples = [Sequence.demonstration(sequence[:1], sequence[1:]) for sequence in sequences]
    recipes = [dtype] if dtype == "fp32" else [dtype, "fp8_blockwise", "fp8_tensorwise"]
    trained, *in_fp8 = ask_trainer(reference.folder, *((recipe, samples, SamplingSupport()) for recipe in recipes))
    for recipe, found in zip(recipes[1:], in_fp8, strict=True):
        factor = gap(found, served) / gap(trained, served)
        print(f"{recipe}: {gap(found, served):.2g}, {factor:.0f} times that of {dtype}")
        # e4m3 rounds to 2^-4, bf16 to 2^-9: squares are a thousand apart, as far as products and not routes make them.
        assert factor > 5
    assert sum(map(len, served)) == sum(len(sequence) - 1 for sequence in sequences)
    # In bf16 experts tie everywhere; logits of 0.5 are off by 2^-9 of it and more, and an expert moves a log-prob by 0.02.
    tied = reference.tied(sequences) if dtype == "fp32" else None
    assert_agree(trained, served, median=median, largest=largest, tied=tied)
    assert np.std(np.concatenate(served)) > 0.05, "log-probs too alike for a comparison"


def test_trainer_agrees_with_what_was_sampled_at_a_temperature(server, reference):
    """Log-probs under the tempered distribution, which is the one that the tokens came from."""
    rng = np.random.default_rng(np.random.SeedSequence().entropy)
    prompts = [Question(str(i), rng.integers(3, 512, int(rng.integers(4, 30))).tolist()) for i in range(12)]
    trajectories, _ = collect(
        client_of(server), prompts, SamplingSupport(temperature=0.6), samples_per_prompt=2, max_new_tokens=24
    )
    [ours] = ask_trainer(reference.folder, ("fp32", trajectories, SamplingSupport(temperature=0.6)))
    found, tied = [t["rollout_log_probs"] for t in trajectories], reference.tied(trajectories)
    assert_agree(ours, found, median=1e-5, largest=1e-5, tied=tied)


WINDOW = 128


@pytest.mark.parametrize(("dtype", "median", "largest"), [("fp32", 1e-5, 1e-5), ("bf16", 0.01, 0.1)])
def test_trainer_agrees_on_sinks_windows_and_yarn(dtype, median, largest, tmp_path):
    """gpt-oss with the released models' windows and yarn, on sequences of more than three windows: read and sampled."""
    sizes = Sizes(window=WINDOW, max_position=131072)
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    folder = make_tiny_model("gpt_oss", tmp_path / "model", sizes=sizes, dtype=torch_dtype, vector_noise=0.5)
    # Sinks of exp(5) matter to 128 keys, and attention to what follows.
    scaled(folder, {"sinks": 10.0, "o_proj.weight": 10.0})
    rng = np.random.default_rng(np.random.SeedSequence().entropy)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sequences = []
    while len(sequences) < 10:  # one in a hundred that are so long has experts that nearly tie in fp32
        sequence = rng.integers(3, 512, int(rng.integers(3 * WINDOW + 1, 5 * WINDOW))).tolist()
        if dtype == "bf16" or not nearly_ties(model, sequence):
            sequences.append(sequence)
    prompts = [Question(str(i), sequence) for i, sequence in enumerate(sequences[:4])]
    settings = {"dtype": dtype, "context_length": 2048, "log_path": tmp_path / "log"}
    with RolloutServer(folder, CPU_SERVER, **settings) as server:
        client = client_of(server)
        served = prefill_log_probs(client, sequences)
        trajectories, _ = collect(client, prompts, SamplingSupport(), samples_per_prompt=2, max_new_tokens=160)
    samples = [Sequence.demonstration(sequence[:1], sequence[1:]) for sequence in sequences]
    read, sampled = ask_trainer(folder, (dtype, samples, SamplingSupport()), (dtype, trajectories, SamplingSupport()))
    clear = [False] * len(sequences) if dtype == "fp32" else None
    assert_agree(read, served, median=median, largest=largest, tied=clear)
    found = [t["rollout_log_probs"] for t in trajectories]
    tied = [nearly_ties(model, t.tokens) for t in trajectories] if dtype == "fp32" else None
    assert_agree(sampled, found, median=median, largest=largest, tied=tied)
    scaled(folder, {"sinks": 0.0})
    [without] = ask_trainer(folder, (dtype, samples, SamplingSupport()))
    lost = np.median(np.abs(np.concatenate(without) - np.concatenate(served)))
    print(f"with sinks of 0: median {lost:.2g}")
    assert lost > 2 * median, "the sinks hardly matter here"


def test_fp32_heads_bring_both_sides_together(tmp_path):
    """bf16 on both sides, logits of 16 to 32: rounded on each side for itself they are 0.125 apart, or the same."""
    folder = make_tiny_model("qwen3", tmp_path / "model", sizes=Sizes(layers=1), vector_noise=0.0)
    scaled(folder, {"lm_head.weight": 60.0})
    rng = np.random.default_rng(np.random.SeedSequence().entropy)
    sequences = [rng.integers(3, 512, 60).tolist() for _ in range(40)]
    samples = [Sequence.demonstration(sequence[:1], sequence[1:]) for sequence in sequences]
    served = {}
    for head in (False, True):
        settings = {"dtype": "bf16", "context_length": 512, "log_path": tmp_path / "log", "fp32_lm_head": head}
        with RolloutServer(folder, CPU_SERVER, **settings) as server:
            served[head] = prefill_log_probs(client_of(server), sequences)
    asked = [(recipe, samples, SamplingSupport()) for recipe in ("bf16", "bf16 fp32_lm_head")]
    trained = dict(zip((False, True), ask_trainer(folder, *asked), strict=True))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    largest = model(torch.tensor(sequences[:1])).logits.detach().abs().max()
    print(f"largest logit {largest:.0f}")
    gaps = {(ours, theirs): gap(trained[ours], served[theirs]) for ours in trained for theirs in served}
    print("KL by heads in fp32 (trainer, engine):", {key: f"{value:.2g}" for key, value in gaps.items()})
    assert largest > 16
    assert gaps[True, True] < 0.75 * min(value for heads, value in gaps.items() if heads != (True, True))
