"""Reward models that the trainer's processes score by: the same rewards on every parallel layout, and transformers'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_ranks, without_ties
from scorer_ranks import make_trajectories
from transformers import AutoModelForSequenceClassification
from weights import classifier

LAYOUTS = {
    "tp2": {"parallel": {"tensor": 2}},
    "pp2": {"parallel": {"pipeline": 2}},
    "cp2": {"parallel": {"context": 2}},
    "ep2": {"parallel": {"expert": 2}},
}


@pytest.fixture(scope="module")
def found(tiny_model, tmp_path_factory):
    """(expected, layout -> reward of each trajectory by its id)."""
    head = int(np.random.SeedSequence().entropy % 2**31)
    print(f"head of seed {head}")
    model = str(tiny_model("qwen3_moe", "--layers", "2"))
    folder = str(classifier(Path(model), tmp_path_factory.mktemp("models") / "classifier", head))
    seed, [alone] = without_ties(
        lambda seed: (seed, run_ranks(1, "scorer_ranks:score", (model, folder, seed, [{}]), refuse_ties=True))
    )
    split = run_ranks(2, "scorer_ranks:score", (model, folder, seed, list(LAYOUTS.values())))
    assert split[0] == split[1]
    return expected(folder, seed), {"alone": alone[0]} | dict(zip(LAYOUTS, split[0], strict=True))


def expected(folder: str, seed: int) -> dict[str, float]:
    """Twice what transformers' classifier says behind the last token of its own, normalized; 0 of what is not judged."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    model.config.pad_token_id = 63_000  # nothing is padding
    scores = {}
    for t in make_trajectories(seed):
        if not t.masked and not t.truncated:
            end = t.prompt_length + int(np.flatnonzero(t["loss_mask"])[-1]) + 1
            with torch.no_grad():
                scores[t.prompt_id] = model(torch.tensor([t.tokens[:end].tolist()])).logits.item()
    values = np.array(list(scores.values()))
    normalized = {number: 2 * (score - values.mean()) / values.std() for number, score in scores.items()}
    return {t.prompt_id: normalized.get(t.prompt_id, 0.0) for t in make_trajectories(seed)}


@pytest.mark.parametrize("layout", ["alone", *LAYOUTS])
def test_rewards_are_those_of_transformers(found, layout):
    wanted, rewards = found[0], found[1][layout]
    assert rewards.keys() == wanted.keys() and sum(map(bool, wanted.values())) == len(wanted) - 2
    assert rewards == pytest.approx(wanted, abs=1e-4)
