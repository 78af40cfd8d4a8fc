"""The policy's loss with rollout correction and pruning: its value and gradient against loops over tokens."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from ranks import fresh_seed

from megatron_rl.algorithms.correction_choice import DENOMINATORS
from megatron_rl.algorithms.losses import POLICY_LOSSES, LossInputs, LossTerms, PolicyLoss
from megatron_rl.config.load import build_config
from megatron_rl.data.packing import Batch, Layout, pack
from megatron_rl.data.sequence import Sequence
from megatron_rl.metrics.reduce import figures, merge
from megatron_rl.trainer.objective import SFT, HeadOutputs, LogProbs, Policy, Result, Totals


def draw(seed: int, sizes=((2, 5), (3, 7), (1, 4), (2, 6))):
    """A packed batch, the current policy's log-probs as a leaf, and the old policy's.

    Log-probs are multiples of 1/256: fp32 has their sums exactly, and none is next to a bound of these tests. No ratio is
    beyond e^1.5, so that nothing is dropped by chance which is to stay.
    """
    rng = np.random.default_rng(seed)
    steps = lambda values: np.round(256 * values) / 256  # noqa: E731
    noise = lambda scale, count: steps(rng.normal(0, scale, count).clip(-2.5 * scale, 2.5 * scale))  # noqa: E731
    samples = []
    for p, r in sizes:
        sample = Sequence(tokens=rng.integers(1, 50, p + r).astype(np.int32), prompt_length=p)
        sample["loss_mask"] = np.r_[rng.random(r - 1) < 0.8, True]
        sample["rollout_log_probs"] = steps(rng.normal(-2, 0.5, r))
        sample["advantages"] = float(rng.normal())
        samples.append(sample)
    batch = pack(samples, list(range(len(samples))), Layout())
    old = batch["rollout_log_probs"] + torch.tensor(noise(0.4, len(batch.mask)), dtype=torch.float32)
    current = (old + torch.tensor(noise(0.2, len(batch.mask)), dtype=torch.float32)).requires_grad_()
    return batch, current, old


def same_sequence(batch: Batch, token: int) -> torch.Tensor:
    """[T] bool: the counted labels of a token's sequence."""
    return batch.mask & (batch.segments.ids == batch.segments.ids[token])


def apply(config, batch, log_probs, old=None, *, reference=None, entropy=None) -> Result:
    """What the policy's objective makes of a batch with these fields, in an update of this one alone."""
    for name, values in (("old_log_probs", old), ("reference_log_probs", reference)):
        batch.fields.pop(name, None)
        if values is not None:
            batch.fields[name] = values
    objective = Policy(config, Totals(int(batch.mask.sum()), batch.segments.count))
    entropy = torch.zeros_like(log_probs) if entropy is None else entropy
    return objective(batch, HeadOutputs(log_probs, entropy, torch.zeros_like(log_probs)))


def gradient(config, batch, log_probs, old=None) -> torch.Tensor:
    """Of the loss by the log-probs."""
    (grad,) = torch.autograd.grad(apply(config, batch, log_probs, old).loss, log_probs)
    return grad


def sums(result: Result) -> dict[str, torch.Tensor]:
    """Of the metrics, which are means over tokens."""
    return {name: metric.parts[0] for name, metric in result.metrics.items()}


def config_of(correction=None, updates=1, **algorithm):
    return build_config(
        {"algorithm": algorithm, "correction": correction or {}, "batch": {"updates_per_step": updates}}
    )


@pytest.mark.parametrize("loss", ["ppo", "reinforce"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_on_policy_the_gradient_is_minus_weight_times_advantage(loss, level):
    batch, current, _ = draw(fresh_seed())
    correction = {"mode": "truncate", "level": level, "high": 1.3, "veto": 0.4}
    config = config_of(correction, loss=loss)
    assert not Policy(config).per_token and not Policy(config).needs
    grad = gradient(config, batch, current)
    d = (current.detach() - batch["rollout_log_probs"]).double()
    for t in range(len(d)):
        if not batch.mask[t]:
            assert grad[t] == 0
            continue
        own = same_sequence(batch, t)
        log_ratio = {"token": d[t], "sequence": d[own].sum(), "geometric": d[own].mean()}[level]
        weight = 0.0 if (d[own].exp() < 0.4).any() else min(math.exp(log_ratio), 1.3)
        assert float(grad[t]) == pytest.approx(-weight * float(batch["advantages"][t]), rel=1e-5, abs=1e-7)


def test_decoupled_and_bypass_are_two_ratios_and_one():
    """Decoupled: old / engine as a weight, current / old in the clip. Bypass: current / engine in the clip."""
    batch, current, old = draw(fresh_seed())
    wide = {"clip_low": 0.99, "clip_high": 1e6}  # nothing is clipped: both are the whole ratio then
    decoupled = gradient(config_of({"mode": "clip", "high": 1e6}, 2, **wide), batch, current, old)
    bypass = gradient(config_of({"bypass": True}, 2, **wide), batch, current)
    torch.testing.assert_close(decoupled, bypass, rtol=1e-4, atol=1e-6)
    ratio = torch.exp(current.detach() - batch["rollout_log_probs"])
    expected = torch.where(batch.mask, -ratio * batch["advantages"], 0.0)
    torch.testing.assert_close(bypass, expected, rtol=1e-4, atol=1e-6)
    # With a clip they differ: it acts on drift alone, or on mismatch and drift. Of one token, which has mismatch and no drift,
    # that is so for certain.
    token = (batch["advantages"].abs() * batch.mask).argmax()
    with torch.no_grad():
        current[token] = batch["rollout_log_probs"][token] + batch["advantages"][token].sign()
        old[token] = current[token]
    decoupled = gradient(config_of({"mode": "clip", "high": 1e6}, 2), batch, current, old)
    bypass = gradient(config_of({"bypass": True}, 2), batch, current)
    assert (decoupled - bypass).abs().max() > 1e-3


CORRECTIONS = [
    {},
    {"mode": "mask", "low": 0.7, "high": 1.6},
    {"mode": "mask", "level": "sequence", "high": 1.7},
    {"mode": "mask", "level": "geometric", "low": 0.95},
    {"mode": "truncate", "high": 1.3, "veto": 0.45},
    {"mode": "clip", "level": "sequence", "low": 0.3, "reject": "k3", "reject_level": "token", "reject_above": 0.07},
    {"reject": "abs_log_ratio", "reject_level": "geometric", "reject_above": 0.31},
]
KL, ENTROPY = 0.1, 0.01


def weights_by_hand(d: list[float], gone: list[bool], correction: dict) -> tuple[list[float], list[bool], bool]:
    """Of one sequence with log-ratios d, some of them lost by now: weights, tokens rejected, whether it was dropped whole."""
    level, mode = correction.get("level", "token"), correction.get("mode", "none")
    low, high = correction.get("low", 0.0), correction.get("high", math.inf)
    statistic = {"k3": lambda x: math.exp(x) - 1 - x, "abs_log_ratio": abs}.get(correction.get("reject", ""))
    divergences = [statistic(x) if statistic else 0.0 for x in d]
    above = correction.get("reject_above", math.inf)
    by_token = correction.get("reject_level") == "token"
    rejected = [(x if by_token else sum(divergences) / len(d)) > above for x in divergences]
    dropped = any(math.exp(x) < correction.get("veto", 0.0) for x in d) or (not by_token and any(rejected))
    found = []
    for t, own in enumerate(d):
        r = math.exp({"token": own, "sequence": sum(d), "geometric": sum(d) / len(d)}[level])
        bounded = {"none": 1.0, "truncate": min(r, high), "clip": min(max(r, low), high)}
        weight = r * (low <= r <= high) if mode == "mask" else bounded[mode]
        found.append(weight * (r > 0) * (own > -math.inf) * (not gone[t] and not rejected[t] and not dropped))
    return found, rejected, dropped


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum"])
@pytest.mark.parametrize("denominator", [None, *DENOMINATORS])
def test_the_gradient_is_the_mean_over_the_stated_tokens(denominator, aggregation):
    """Of one update in two micro-batches, in fp64: policy, KL and entropy. Log-ratios are multiples of 1/256, exact in fp32."""
    seed = fresh_seed()
    choice = {} if denominator is None else {"denominator": denominator}
    for number, (correction, updates) in enumerate(product(CORRECTIONS, (1, 2))):
        algorithm = {"loss": "reinforce", "aggregation": aggregation, "entropy_coefficient": ENTROPY}
        algorithm["kl"] = {"coefficient": KL, "estimator": "k2"}
        sections = {"algorithm": algorithm, "batch": {"updates_per_step": updates}, "pruning": {"enabled": True}}
        longest = {"rollout": {"max_new_tokens": 11}}
        policy = Policy(build_config({**sections, **longest, "correction": correction | choice}))
        rng, parts = np.random.default_rng([seed, number]), []
        for _ in range(2):
            batch, current, old = draw(int(rng.integers(2**32)), [(1, int(n)) for n in rng.integers(2, 8, 3)])
            fields = {"rollout_log_probs": batch["rollout_log_probs"], "old_log_probs": old}
            fields |= {"reference_log_probs": old + 0.1, "current": current.detach()}
            fields = {name: (256 * values).round() / 256 for name, values in fields.items()}
            for name in ("old_log_probs", "current"):
                fields[name][torch.tensor(rng.random(len(old)) < 0.06)] = -torch.inf
            current = fields.pop("current").requires_grad_()
            batch.fields |= fields
            parts.append((batch, current, torch.zeros_like(current, requires_grad=True)))
        totals = Totals(
            sum(int(batch.mask.sum()) for batch, *_ in parts), sum(batch.segments.count for batch, *_ in parts)
        )
        policy = policy.for_update(totals)
        none = torch.zeros(())
        results = [policy(batch, HeadOutputs(log_probs, entropy, none)) for batch, log_probs, entropy in parts]
        divisor = sum(result.counted for result in results)
        found = [torch.autograd.grad(r.loss, part[1:]) for r, part in zip(results, parts, strict=True)]

        numerators: list[tuple[list[float], list[float]]] = []
        value = expected_divisor = 0.0
        for batch, current, _ in parts:
            now = current.tolist()
            then = batch["old_log_probs"].tolist() if updates == 2 else now
            engine, reference = batch["rollout_log_probs"].tolist(), batch["reference_log_probs"].tolist()
            advantages = batch["advantages"].tolist()
            of_log_probs, of_entropy = [0.0] * len(now), [0.0] * len(now)
            for sequence in range(batch.segments.count):
                own = (batch.mask & (batch.segments.ids == sequence)).nonzero()[:, 0].tolist()
                d = [then[t] - engine[t] for t in own]
                weights, rejected, dropped = weights_by_hand(d, [now[t] == -math.inf for t in own], correction)
                counts = {
                    "sampled": [1.0] * len(own),
                    "kept_sequences": [float(not dropped)] * len(own),
                    "kept_tokens": [float(w != 0) for w in weights],
                    "weights": weights,
                }[denominator or "kept_tokens"]
                # weights: their sum, each token weighing as much as its sequence's aggregation gives it.
                length = sum(counts) if denominator != "weights" else len(own)
                share = 1 / length if aggregation == "sequence_mean" and length else 1.0
                if aggregation == "sequence_sum" and own:  # a constant for each sequence that was not dropped whole
                    expected_divisor += 11 * (denominator == "sampled" or not dropped)
                for t, weight, count, out in zip(own, weights, counts, rejected, strict=True):
                    stays = count * (not out and not dropped) * share
                    expected_divisor += count * share * (aggregation != "sequence_sum")
                    if weight:
                        value -= weight * share * advantages[t] * now[t]
                    of_log_probs[t] -= weight * share * advantages[t]
                    if now[t] > -math.inf and then[t] > -math.inf:
                        of_log_probs[t] += KL * stays * (now[t] - reference[t])
                    of_entropy[t] -= ENTROPY * stays
            numerators.append((of_log_probs, of_entropy))
        divide = expected_divisor or 1.0  # where nothing is kept there is no gradient either
        scale = totals.tokens / totals.sequences if aggregation == "sequence_mean" else 1.0
        assert float(divisor) == pytest.approx(expected_divisor * scale, rel=1e-6)
        for gradients, expected in zip(found, numerators, strict=True):
            for ours, theirs in zip(gradients, expected, strict=True):
                expected_mean = torch.tensor(theirs, dtype=torch.float64) / divide
                torch.testing.assert_close(ours.double() / scale / divide, expected_mean, rtol=1e-5, atol=1e-8)
        figure = figures(merge([result.metrics for result in results]))
        assert figure["loss/policy"] == pytest.approx(value / divide, rel=1e-4, abs=1e-5)
        assert figure["loss/counted"] == pytest.approx(float(divisor) / totals.tokens, rel=1e-6)
        if policy.per_token:  # the head asks for the tokens of a chunk alone
            for (batch, log_probs, entropy), (whole, _) in zip(parts, found, strict=True):
                for rows in torch.arange(len(log_probs)).split(8):
                    part = log_probs.detach()[rows].requires_grad_()
                    loss = policy(batch.take(rows), HeadOutputs(part, entropy.detach()[rows], none)).loss
                    torch.testing.assert_close(torch.autograd.grad(loss, part)[0], whole[rows])


CASES = [(loss, bypass, "now") for loss in POLICY_LOSSES for bypass in (False, True)]
CASES += [(loss, False, "then") for loss in POLICY_LOSSES]  # with bypass there is no then


@pytest.mark.parametrize(("loss", "bypass", "where"), CASES)
def test_a_token_outside_the_safe_set_has_ratio_zero(loss, where, bypass):
    batch, current, old = draw(fresh_seed())
    config = config_of({"bypass": bypass}, 2, loss=loss, kl={"coefficient": 0.1}, entropy_coefficient=0.01)
    token = int(batch.mask.nonzero()[3])
    whole = same_sequence(batch, token)
    pruned = current.detach().clone()
    if where == "now":
        pruned[token] = -torch.inf
    else:
        old = old.clone()
        old[token] = -torch.inf
    pruned.requires_grad_()
    entropy = torch.ones_like(pruned)
    result = apply(config, batch, pruned, old, reference=current.detach() - 0.1, entropy=entropy)
    (grad,) = torch.autograd.grad(result.loss, pruned)
    assert torch.isfinite(result.loss) and torch.isfinite(grad).all()
    assert all(torch.isfinite(value) for value in sums(result).values())
    assert grad[token] == 0 and result.tokens["weights"][token] == 0
    gone = whole if loss == "gspo" else torch.arange(len(grad)) == token  # GSPO's ratio is the sequence's
    assert ((result.tokens["weights"] == 0) == (gone | ~batch.mask)).all()


@pytest.mark.parametrize("mode", ["truncate", "mask", "clip"])
def test_a_ratio_of_zero_is_zero_in_every_mode(mode):
    batch, current, _ = draw(3)
    pruned = current.detach().clone()
    token = int(batch.mask.nonzero()[2])
    pruned[token] = -torch.inf
    whole = same_sequence(batch, token)
    for level in ("token", "sequence", "geometric"):
        correction = {"mode": mode, "level": level, "high": 1e9} | ({} if mode == "truncate" else {"low": 1e-9})
        found = apply(config_of(correction), batch, pruned.clone()).tokens["weights"]
        gone = torch.arange(len(pruned)) == token if level == "token" else whole
        assert ((found == 0) == (gone | ~batch.mask)).all()


def test_drift_out_of_the_safe_set_is_no_mismatch():
    """The veto compares old and engine; what the current policy has pruned since loses its term, not its response."""
    batch, current, old = draw(4)
    old = batch["rollout_log_probs"].clone()
    token = int(batch.mask.nonzero()[1])
    pruned = current.detach().clone()
    pruned[token] = -torch.inf
    found = apply(config_of({"veto": 1e-4}, 2), batch, pruned, old).tokens
    assert not found["vetoed"].any()
    assert ((found["weights"] == 0) == (~batch.mask | (torch.arange(len(old)) == token))).all()


@pytest.mark.parametrize(
    "correction", [{"veto": 1e-4}, {"reject": "abs_log_ratio", "reject_above": 2.0, "reject_level": "token"}]
)
def test_what_is_dropped_has_no_kl_and_no_entropy_either(correction):
    """A token that the trainer finds impossible has a KL to the reference that would outweigh the whole update."""
    batch, current, _ = draw(fresh_seed())
    token = int(batch.mask.nonzero()[2])
    with torch.no_grad():
        current[token] = batch["rollout_log_probs"][token] - 14
    gone = same_sequence(batch, token) if "veto" in correction else torch.arange(len(current)) == token
    entropy = torch.ones_like(current, requires_grad=True)
    config = config_of(correction, kl={"coefficient": 0.1, "estimator": "k3"}, entropy_coefficient=0.01)
    result = apply(config, batch, current, reference=batch["rollout_log_probs"].clone(), entropy=entropy)
    of_log_probs, of_entropy = torch.autograd.grad(result.loss, (current, entropy))
    assert (of_log_probs[gone] == 0).all() and (of_entropy[gone] == 0).all()
    stays = batch.mask & ~gone
    assert (of_log_probs[stays] != 0).all() and (of_entropy[stays] < 0).all()
    assert float(sums(result)["kl/reference"]) > 1e5, "the metric shows it"


@pytest.mark.parametrize(
    ("updates", "bypass", "denominator", "kl"), list(product((1, 2), (False, True), DENOMINATORS, (0.0, 0.1)))
)
def test_what_is_computed_before_the_updates(updates, bypass, denominator, kl):
    """Old log-probs where the ratio starts from them, and the reference's with a KL; for no denominator a pass of its own.
    Nothing else is looked at: the batch has no other field."""
    correction = {"bypass": bypass, "denominator": denominator} | ({} if bypass else {"mode": "truncate", "high": 2.0})
    config = config_of(correction, updates, kl={"coefficient": kl})
    from_old = updates == 2 and not bypass
    needed = {"old_log_probs": from_old, "reference_log_probs": kl > 0}
    expected = {name for name, of_config in needed.items() if of_config}
    assert Policy(config).needs == expected and Policy(config).ratio_from_old == from_old
    batch, current, old = draw(fresh_seed())
    computed = {"old_log_probs": old, "reference_log_probs": old - 0.1}
    batch.fields |= {name: computed[name] for name in expected}
    totals = Totals(int(batch.mask.sum()), batch.segments.count)
    objective = Policy(config).for_update(totals)
    result = objective(batch, HeadOutputs(current, torch.zeros_like(current), torch.zeros_like(current)))
    assert torch.isfinite(result.loss) and ("kl/reference" in result.metrics) == (kl > 0)
    assert torch.equal(result.tokens["old_log_probs"], old if from_old else current.detach())


@pytest.mark.parametrize("lacks", ["old_log_probs", "reference_log_probs"])
def test_a_batch_without_a_field_that_the_loss_needs(lacks):
    config = config_of({}, 2, kl={"coefficient": 0.1})
    batch, current, old = draw(fresh_seed())
    fields = {"old_log_probs": old, "reference_log_probs": old}
    del fields[lacks]
    batch.fields |= fields
    with pytest.raises(ValueError, match=f"no {lacks}, .*algorithm.loss = ppo.*compute_fields"):
        Policy(config)(batch, HeadOutputs(current, torch.zeros_like(current), torch.zeros_like(current)))


EVERYTHING = {
    "correction": {"mode": "truncate", "level": "sequence", "high": 2.0, "veto": 1e-3, "denominator": "weights"}
    | {"reject": "k3", "reject_level": "token", "reject_above": 3.0},
    "algorithm": {"kl": {"coefficient": 0.1}, "entropy_coefficient": 0.01, "aggregation": "sequence_mean"},
}


@pytest.mark.parametrize("name", [*POLICY_LOSSES, "sft", "log_probs"])
@pytest.mark.parametrize("updates", [1, 2])
def test_an_objective_touches_neither_batch_nor_outputs(name, updates):
    """Two calls on the same things give the same bits, and leave every bit as it was."""
    batch, current, old = draw(fresh_seed())
    batch.fields |= {"old_log_probs": old, "reference_log_probs": old - 0.1}
    outputs = HeadOutputs(current, *(torch.rand_like(current) for _ in range(5)))
    objective = {"sft": SFT(label_smoothing=0.1), "log_probs": LogProbs()}.get(name)
    if objective is None:
        algorithm = {**EVERYTHING["algorithm"], "loss": name}
        objective = Policy(config_of(EVERYTHING["correction"], updates, **algorithm))
        objective = objective.for_update(Totals(int(batch.mask.sum()), 4))

    def content() -> dict[str, torch.Tensor]:
        found = {f"field {name}": values for name, values in batch.fields.items()}
        found |= {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
        return found | {"ids": batch.segments.ids} | outputs._asdict()

    members = {name: id(value) for name, value in vars(batch).items()}
    before, bits = content(), {name: value.detach().clone() for name, value in content().items()}
    first, second = objective(batch, outputs), objective(batch, outputs)
    assert {name: id(value) for name, value in vars(batch).items()} == members
    after = content()
    assert after.keys() == before.keys() and all(after[name] is value for name, value in before.items())
    assert all(torch.equal(after[name].detach(), value) for name, value in bits.items())
    assert torch.equal(first.loss.detach(), second.loss.detach())
    assert first.tokens.keys() == second.tokens.keys() and first.metrics.keys() == second.metrics.keys()
    assert all(torch.equal(value, second.tokens[name]) for name, value in first.tokens.items())
    for name, metric in first.metrics.items():
        assert all(map(torch.equal, metric.parts, second.metrics[name].parts)), name
    if first.loss.requires_grad:
        gradients = [torch.autograd.grad(result.loss, current)[0] for result in (first, second)]
        assert torch.equal(*gradients) and gradients[0].any()


def squares(inputs: LossInputs) -> LossTerms:
    """A loss from outside: each token's log-prob is pulled to its sequence's advantage."""
    terms = (inputs.log_probs - inputs.advantages).square()
    return LossTerms(torch.where(inputs.mask, terms, 0.0), torch.zeros_like(inputs.mask))


@pytest.mark.parametrize("per_token", [True, False])
def test_a_loss_from_outside_is_a_value(per_token, monkeypatch):
    monkeypatch.setitem(POLICY_LOSSES, "ppo", PolicyLoss(squares, per_token=per_token))
    batch, current, _ = draw(fresh_seed())
    config = config_of({"mode": "clip", "low": 0.5, "high": 2.0}, loss="ppo")
    assert Policy(config).per_token == per_token
    weights = torch.exp(current.detach() - batch["rollout_log_probs"]).clamp(0.5, 2.0)
    expected = torch.where(batch.mask, 2 * weights * (current.detach() - batch["advantages"]), 0.0)
    torch.testing.assert_close(gradient(config, batch, current), expected, rtol=1e-5, atol=1e-6)
