"""What an update of a reward model or of DPO descends: the loss written out by hand, on transformers' model, by autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from layouts import make_config
from preference_ranks import DPO, REWARD, learn, make_comparisons
from ranks import fresh_seed
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from weights import classifier

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.config import Config
from megatron_rl.data.sequence import Sequence
from megatron_rl.distributed import parallel
from megatron_rl.tasks.preferences import Comparison
from megatron_rl.trainer.trainer import build_trainer


@pytest.fixture
def trainer_of():
    def make(config: Config, **more):
        ranks = parallel.initialize(config.parallel, 0)
        return build_trainer(config, ranks, total_updates=4, support=SamplingSupport(), **more)

    yield make
    parallel.shutdown()


def seed_of_the_test() -> int:
    return fresh_seed()


def sigmoid_loss(margin: Tensor) -> Tensor:
    return (1 + (-margin).exp()).log()


def pairs(comparison: Comparison) -> Iterator[tuple[int, int]]:
    """(better, worse) responses."""
    scores = comparison.scores
    yield from ((i, j) for i in range(len(scores)) for j in range(len(scores)) if scores[i] > scores[j])


def mean_over_pairs(comparisons: list[Comparison], term: Callable[[Comparison, int, int], Tensor]) -> Tensor:
    """A comparison counts once, however many pairs it has."""
    means = [torch.stack([term(c, *pair) for pair in pairs(c)]).mean() for c in comparisons]
    return torch.stack(means).mean()


def compare(ours: dict[str, np.ndarray], model: torch.nn.Module) -> None:
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert theirs.keys() == ours.keys()
    largest = max(float(grad.abs().max()) for grad in theirs.values())
    assert largest > 1e-3, "gradients too small to compare"
    for name, grad in theirs.items():  # fp32 against fp64: a few thousand roundings, of which most cancel
        worst = np.abs(ours[name] - grad.numpy()).max()
        assert worst < 1e-5 * max(1.0, largest), f"gradient of {name} differs by {worst}, of {largest}"


def reward_by_hand(loss: str, comparisons: list[Comparison], values: Callable[[Sequence], Tensor]) -> Tensor:
    """values: [tokens], behind each token of a sequence. The settings are those of preference_ranks.REWARD."""

    def score(c: Comparison, index: int, mean: bool = False) -> Tensor:
        found = values(c.sequences[index])
        return found[c.sequences[index].prompt_length :].mean() if mean else found[-1]

    if loss == "bradley_terry":
        means = []
        for c in comparisons:
            chosen, rejected = score(c, 0), score(c, 1)
            means.append(sigmoid_loss(chosen - rejected - (c.margin or 0.0)) + 0.1 * (chosen + rejected) ** 2)
        return torch.stack(means).mean()
    if loss == "hinge":
        means = []
        for c in comparisons:
            wanted = 1.0 if c.margin is None else c.margin
            means.append((wanted - (score(c, 0, True) - score(c, 1, True))).clamp(min=0))
        return torch.stack(means).mean()
    if loss == "plackett_luce":
        means = []
        for c in comparisons:
            order = sorted(range(3), key=lambda i, c=c: -c.scores[i])
            ranked = torch.stack([score(c, i, True) for i in order])
            means.append(sum(ranked[place:].logsumexp(0) - ranked[place] for place in range(3)))
        return torch.stack(means).mean()
    if loss == "squared_error":
        return torch.stack([(score(c, 0) - c.scores[0]) ** 2 for c in comparisons]).mean()
    terms = []
    for c in comparisons:
        behind = values(c.sequences[0])[c.sequences[0].prompt_length :]
        for end, label in zip(c.step_ends[0], c.step_labels[0], strict=True):
            terms.append(label * sigmoid_loss(behind[end]) + (1 - label) * sigmoid_loss(-behind[end]))
    return torch.stack(terms).mean()


@pytest.mark.parametrize("loss", REWARD)
def test_a_reward_model_descends_its_loss(loss, trainer_of, tiny_model, tmp_path):
    seed = seed_of_the_test()
    folder = classifier(tiny_model("llama"), tmp_path / "classifier", seed)
    trainer = trainer_of(make_config(str(folder), {}), value_head=True)
    found = learn(trainer, trainer.config, loss, seed, of_reward=True)

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)

    def values(sequence: Sequence) -> Tensor:
        states = model.model(torch.tensor(sequence.tokens[None].astype(int))).last_hidden_state
        return model.score(states)[0, :, 0]

    total = reward_by_hand(loss, make_comparisons(seed, REWARD[loss][0]), values)
    total.backward()
    assert found["metrics"]["preference/loss"] == pytest.approx(float(total.detach()), rel=1e-5, abs=1e-6)
    compare(found["grads"], model)


def dpo_by_hand(
    loss: str,
    comparisons: list[Comparison],
    policy: Callable[[Sequence], Tensor],
    reference: Callable[[Sequence], Tensor],
) -> Tensor:
    """policy, reference: log-probs [response] of a sequence. The settings are those of preference_ranks.DPO."""

    def log_ratio(sequence: Sequence) -> Tensor:
        return (policy(sequence) - reference(sequence).detach()).sum()

    def difference(c: Comparison, better: int, worse: int, *, mean: bool = False) -> Tensor:
        of_each = [log_ratio(c.sequences[i]) / (c.sequences[i].response_length if mean else 1) for i in (better, worse)]
        return of_each[0] - of_each[1]

    if loss == "sigmoid":
        conservative = lambda d: 0.9 * sigmoid_loss(0.1 * d) + 0.1 * sigmoid_loss(-0.1 * d)  # noqa: E731
        best = [c.sequences[int(np.argmax(c.scores))] for c in comparisons]
        sft = -torch.cat([policy(sequence) for sequence in best]).mean()
        return mean_over_pairs(comparisons, lambda *pair: conservative(difference(*pair))) + 0.3 * sft
    if loss == "ipo":
        return mean_over_pairs(comparisons, lambda *pair: (difference(*pair, mean=True) - 1 / (2 * 0.4)) ** 2)
    crossed = []
    longest = max(len(c.sequences[0].tokens) for c in comparisons)
    for one, other in zip(comparisons, [*comparisons[1:], comparisons[0]], strict=True):
        prompt, response = one.sequences[0], other.sequences[0]
        tokens = prompt.tokens[: prompt.prompt_length].tolist()
        answer = response.tokens[response.prompt_length :].tolist()[: longest - len(tokens)]
        crossed.append(log_ratio(Sequence.demonstration(tokens, answer)).detach())
    baseline = torch.stack(crossed).mean().clamp(min=0)
    terms = []
    for c in comparisons:
        above = 0.1 * (log_ratio(c.sequences[0]) - baseline)
        terms.append(1.5 * (1 - torch.sigmoid(above)) if c.scores[0] else 1 - torch.sigmoid(-above))
    return torch.stack(terms).mean()


@pytest.mark.parametrize("loss", DPO)
def test_dpo_descends_its_loss(loss, trainer_of, tiny_model):
    seed = seed_of_the_test()
    folder, other = tiny_model("llama"), tiny_model("llama", "--seed", "1")
    trainer = trainer_of(make_config(str(folder), {}), reference=str(other))
    found = learn(trainer, trainer.config, loss, seed, of_reward=False)

    model, frozen = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float64) for f in (folder, other))

    def log_probs(by: torch.nn.Module) -> Callable[[Sequence], Tensor]:
        def of(sequence: Sequence) -> Tensor:
            logits = by(torch.tensor(sequence.tokens[None].astype(int))).logits[0]
            response = torch.tensor(sequence.tokens[sequence.prompt_length :].astype(int))
            predicting = logits[sequence.prompt_length - 1 : -1].log_softmax(-1)
            return predicting.gather(1, response[:, None])[:, 0]

        return of

    total = dpo_by_hand(loss, make_comparisons(seed, DPO[loss][0]), log_probs(model), log_probs(frozen))
    total.backward()
    assert found["metrics"]["preference/loss"] == pytest.approx(float(total.detach()), rel=1e-5, abs=1e-6)
    compare(found["grads"], model)
