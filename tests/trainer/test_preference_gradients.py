"""What an update of a reward model or of DPO descends: the gradient of the loss by transformers' model and autograd."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from layouts import make_config
from preference_ranks import DPO, REWARD, learn, make_comparisons
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from weights import classifier

from megatron_rl.algorithms import preference
from megatron_rl.config import Config
from megatron_rl.data.sequence import Sequence
from megatron_rl.dpo import LOG_PROBS, dpo_loss, mismatched, whole_response
from megatron_rl.reward import places, reward_loss
from megatron_rl.rollout.sampling import SamplingSupport
from megatron_rl.trainer import parallel
from megatron_rl.trainer.trainer import build_trainer
from megatron_rl.trainer.units import Table


@pytest.fixture
def trainer_of():
    def make(config: Config, **more):
        ranks = parallel.initialize(config.parallel, 0)
        return build_trainer(config, ranks, total_updates=4, support=SamplingSupport(), **more)

    yield make
    parallel.shutdown()


def sums_by(outputs, table: Table) -> torch.Tensor:
    """Sum over each unit's labels of outputs(sequence), [labels]; [units] fp64."""
    units = len(table.groups)
    found = torch.zeros(units, dtype=torch.float64)
    for sequence in table.sequences:
        number = torch.from_numpy(sequence["unit"]).long()
        inside = number >= 0
        found = found.index_add(0, number[inside], outputs(sequence)[inside])
    return found


def labels_of(table: Table) -> torch.Tensor:
    ones = lambda sequence: torch.ones(sequence.response_length, dtype=torch.float64)  # noqa: E731
    return sums_by(ones, table)


def inputs_of(sequence: Sequence) -> torch.Tensor:
    return torch.tensor(sequence.tokens[None, :-1].astype(int))


def compare(ours: dict[str, np.ndarray], model: torch.nn.Module) -> None:
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert theirs.keys() == ours.keys()
    largest = max(float(grad.abs().max()) for grad in theirs.values())
    assert largest > 1e-3, "gradients too small to compare"
    for name, grad in theirs.items():  # fp32 against fp64: a few thousand roundings, of which most cancel
        worst = np.abs(ours[name] - grad.numpy()).max()
        assert worst < 1e-5 * max(1.0, largest), f"gradient of {name} differs by {worst}, of {largest}"


@pytest.mark.parametrize("loss", REWARD)
def test_a_reward_model_descends_its_loss(loss, trainer_of, tiny_model, tmp_path):
    seed = int(np.random.SeedSequence().entropy % 2**31)
    folder = classifier(tiny_model("llama"), tmp_path / "classifier", seed)
    trainer = trainer_of(make_config(str(folder), {}), value_head=True)
    found = learn(trainer, trainer.config, loss, seed, of_reward=True)

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    kind, keys = REWARD[loss]
    settings = replace(trainer.config.reward_model, **keys)
    table = Table.of(make_comparisons(seed, kind), partial(places, pooling=settings.pooling))

    def values(sequence: Sequence) -> torch.Tensor:
        states = model.score(model.model(inputs_of(sequence)).last_hidden_state)[0, :, 0]
        return states[sequence.prompt_length - 1 :]

    total, _ = reward_loss(settings, table, {"values": sums_by(values, table), "labels": labels_of(table)})
    total.backward()
    assert found["metrics"]["preference/loss"] == pytest.approx(float(total.detach()), rel=1e-5)
    compare(found["grads"], model)


@pytest.mark.parametrize("loss", DPO)
def test_dpo_descends_its_loss(loss, trainer_of, tiny_model):
    seed = int(np.random.SeedSequence().entropy % 2**31)
    folder, other = tiny_model("llama"), tiny_model("llama", "--seed", "1")
    trainer = trainer_of(make_config(str(folder), {}), reference=str(other))
    found = learn(trainer, trainer.config, loss, seed, of_reward=False)

    model, frozen = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float64) for f in (folder, other))
    kind, keys = DPO[loss]
    settings = replace(trainer.config.dpo, **keys)
    comparisons = make_comparisons(seed, kind)
    table = Table.of(comparisons, whole_response)

    def log_probs(by: torch.nn.Module, sequence: Sequence) -> torch.Tensor:
        response = torch.tensor(sequence.tokens[sequence.prompt_length :].astype(int))
        logits = by(inputs_of(sequence)).logits[0, sequence.prompt_length - 1 :]
        return logits.log_softmax(-1).gather(1, response[:, None])[:, 0]

    with torch.no_grad():
        reference, baseline = sums_by(partial(log_probs, frozen), table), None
        if settings.loss == "kto":
            crossed = Table.of(mismatched(comparisons), whole_response)
            both = (sums_by(partial(log_probs, by), crossed) for by in (model, frozen))
            baseline = preference.kto_baseline(*both)
    sums = {LOG_PROBS: sums_by(partial(log_probs, model), table), "labels": labels_of(table)}
    total, _ = dpo_loss(settings, table, reference, baseline, sums)
    total.backward()
    assert found["metrics"]["preference/loss"] == pytest.approx(float(total.detach()), rel=1e-5)
    compare(found["grads"], model)
