"""A head of one number: every family against transformers' classifiers, what its folder says, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import refusing_ties, without_ties
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from weights import classifier

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.config import ParallelConfig
from megatron_rl.config.load import build_config
from megatron_rl.data.sequence import Sequence
from megatron_rl.distributed import parallel
from megatron_rl.errors import UserError
from megatron_rl.models.build import load
from megatron_rl.models.convert import hf_to_megatron, megatron_to_hf
from megatron_rl.models.families import architecture, is_classifier
from megatron_rl.models.hf_folder import read_weights
from megatron_rl.models.parallel_check import read_hf_config
from megatron_rl.trainer.trainer import build_trainer

IN_TRANSFORMERS = ("qwen3_moe", "qwen3", "llama", "mixtral", "deepseek_v3", "gpt_oss")


@pytest.fixture(autouse=True)
def _torn_down():
    yield
    parallel.shutdown()


def values_of(folder: Path, sequences: list[Sequence]) -> list[np.ndarray]:
    """By our trainer, of every position of each sequence's inputs."""
    config = build_config(
        {"model": {"path": str(folder)}, "precision": {"train": "fp32"}, "batch": {"tokens_per_micro_batch": 48}}
    )
    ranks = parallel.initialize(config.parallel, 0)
    trainer = build_trainer(config, ranks, total_updates=None, support=SamplingSupport(), value_head=True)
    found: dict[int, np.ndarray] = {}
    batches = trainer.pack(sequences)
    for batch, values in zip(batches, trainer.compute_values(batches), strict=True):
        assert values is not None
        for row, sample in enumerate(batch.samples):
            found[sample] = values[batch.segments.ids == row].numpy()
    return [found[index] for index in range(len(sequences))]


def random_sequences(vocab: int = 64, seed: int | None = None) -> list[Sequence]:
    rng = np.random.default_rng(seed)
    return [
        Sequence.demonstration(rng.integers(4, vocab, 3).tolist(), rng.integers(4, vocab, n).tolist())
        for n in rng.integers(2, 30, 5)
    ]


@torch.no_grad()
def with_states(body: torch.nn.Module) -> list[tuple[Sequence, torch.Tensor]]:
    """Random sequences, and the last states of transformers' model, in which no two experts tie but for rounding."""

    def attempt(seed: int) -> list[tuple[Sequence, torch.Tensor]]:
        with refusing_ties():
            return [
                (sequence, body(torch.tensor(sequence.tokens[None, :-1].astype(int))).last_hidden_state)
                for sequence in random_sequences(seed=seed)
            ]

    return without_ties(attempt)


@pytest.mark.parametrize("family", IN_TRANSFORMERS)
@torch.no_grad()
def test_values_are_those_of_transformers(family, tiny_model, tmp_path):
    """At every position, not at the last alone, which is what transformers gives."""
    folder = classifier(tiny_model(family), tmp_path / "classifier", seed=int(np.random.default_rng().integers(2**31)))
    theirs = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    assert theirs.config.num_labels == 1
    drawn = with_states(theirs.model)
    for (_, hidden), ours in zip(drawn, values_of(folder, [sequence for sequence, _ in drawn]), strict=True):
        expected = theirs.score(hidden)[0, :, 0].numpy()
        # A sum of 64 products of a normed state (about 1) and weights of 1/8, each rounded.
        assert np.abs(ours - expected).max() < 1e-4 * max(1.0, np.abs(expected).max())
        assert np.abs(ours).max() > 1e-2


def test_olmoe_has_a_head_too(tiny_model, tmp_path):
    """transformers has no such classifier: its own model gives the states."""
    folder = classifier(tiny_model("olmoe"), tmp_path / "classifier", seed=1)
    body = AutoModelForCausalLM.from_pretrained(tiny_model("olmoe"), dtype=torch.float32).model
    score = dict(read_weights(folder))["score.weight"]
    drawn = with_states(body)
    for (_, hidden), ours in zip(drawn, values_of(folder, [sequence for sequence, _ in drawn]), strict=True):
        assert np.abs(ours - (hidden @ score.T)[0, :, 0].numpy()).max() < 1e-4


def test_a_language_model_begins_with_values_of_zero(tiny_model):
    for values in values_of(tiny_model("llama"), random_sequences()):
        assert (values == 0).all()


def test_a_folder_and_a_checkpoint_are_converted_bit_for_bit(tiny_model, tmp_path):
    folder = classifier(tiny_model("qwen3_moe"), tmp_path / "classifier", seed=3)
    config = json.loads((folder / "config.json").read_text()) | {
        "reward_pooling": "mean",
        "reward_step_separator": "\n",
    }
    (folder / "config.json").write_text(json.dumps(config))
    hf_to_megatron(folder, tmp_path / "checkpoint", ParallelConfig())
    megatron_to_hf(tmp_path / "checkpoint", tmp_path / "back", ParallelConfig())
    before, after = dict(read_weights(folder)), dict(read_weights(tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    found = read_hf_config(tmp_path / "back")
    assert is_classifier(found) and architecture(found) == "Qwen3MoeForCausalLM"
    assert found.num_labels == 1 and found.reward_pooling == "mean" and found.reward_step_separator == "\n"


def test_what_is_no_reward_model_is_refused(tiny_model, tmp_path):
    folder = classifier(tiny_model("llama"), tmp_path / "classifier", seed=0)
    settings = {"parallel": ParallelConfig(), "precision": "fp32"}
    with pytest.raises(UserError, match=r"classifier: has a head with one number.*give the folder of a language model"):
        load(folder, **settings)
    config = json.loads((folder / "config.json").read_text())
    labels = {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}
    (folder / "config.json").write_text(json.dumps(config | labels))
    with pytest.raises(UserError, match=r"num_labels = 2: reward models and critics have 1"):
        load(folder, **settings, value_head=True)
