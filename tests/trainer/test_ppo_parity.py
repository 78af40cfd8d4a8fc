"""PPO and its kin on every parallel layout against one process, in fp32; advantages and values against fp64 oracles."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from covering import SPLITS, layers_of, parallel_of
from ppo_ranks import CASES, OF_STEPS, OF_TOKENS, WHOLE, make_config, make_trajectories
from ranks import fresh_seed, run_ranks, without_ties
from transformers import AutoModelForSequenceClassification
from weights import classifier

from megatron_rl.config import AlgorithmConfig
from megatron_rl.config.plan import share_of
from megatron_rl.data.trajectory import Trajectory

pytestmark = pytest.mark.timeout(900)  # a fixture runs all layouts


EPS = 1e-3
"""As in test_parity.py: steps of Adam differ by what gradients do."""
OF_ONE = {"reference": {}, "large micro-batches": {"batch": {"tokens_per_micro_batch": 4096}}, "deep reference": {}}
REFERENCES = {2: "reference", 4: "deep reference"}
"""By layers of the models."""
SHORT, LONG = "short", "long"
RUNS: dict[tuple[int, str], list[tuple[str, str]]] = {
    (1, SHORT): [(case, "reference") for case in CASES] + [("gae", name) for name in OF_ONE if name != "reference"],
    (2, SHORT): [("gae", layouts[0]) for layouts in SPLITS.values()]
    + [("reinforce_plus_plus_baseline", "cp2"), ("grpo", "pp2"), ("together", "ep2")],
    (2, LONG): [("reinforce_plus_plus_baseline", "tp2_sp"), ("grpo", "dp2_distributed_optimizer")],
    (4, LONG): [("gae", "tp2_cp2"), ("gae", "pp2_ep2")],
}
"""By number of processes and suite."""
WITH_OTHERS = ("reference", "cp2", "dp2_distributed_optimizer")
"""Layouts with all advantages that there are beside that of the case."""


def marked(runs: Iterable[tuple[str, str]]) -> list:
    """Runs as parameters of a test."""
    long = {run for (_, suite), of_suite in RUNS.items() for run in of_suite if suite == LONG}
    return [pytest.param(run, id=" ".join(run), marks=[pytest.mark.long] * (run in long)) for run in runs]


ALL = marked(run for runs in RUNS.values() for run in runs)
COMPARED = marked(
    run for runs in RUNS.values() for run in runs if run[1] not in REFERENCES.values() and run[0] != "together"
)


@pytest.fixture(scope="module")
def models(tiny_model, tmp_path_factory):
    """By layers: policy, reference, and the classifier that the critic starts as, with a head from the start: behind one of
    zeros nothing else has a gradient."""
    seed = fresh_seed()
    found = {}
    for layers in REFERENCES:
        both = [str(tiny_model("qwen3_moe", "--layers", str(layers), *more)) for more in ((), ("--seed", "1"))]
        out = tmp_path_factory.mktemp("models") / "classifier"
        found[layers] = [*both, str(classifier(Path(both[1]), out, seed))]
    return found


def layers_under(layout: str) -> int:
    return 4 if layout == "deep reference" else layers_of(layout)


def on_ranks(models: dict[int, list[str]], seed: int, group: tuple[int, str]) -> list[list[dict]]:
    """group: a key of RUNS."""
    world_size, _ = group
    layouts = []
    for case, name in RUNS[group]:
        layout = OF_ONE[name] if world_size == 1 else {"parallel": parallel_of(name)}
        layouts.append((models[layers_under(name)], case, {"optimizer": {"eps": EPS}, **layout}, name in WITH_OTHERS))
    arguments = (layouts, seed)
    return run_ranks(world_size, "ppo_ranks:run_layouts", arguments, timeout=540.0, refuse_ties=world_size == 1)


@pytest.fixture(scope="module")
def drawn(models):
    """Seed of the trajectories, and what one process makes of them."""
    return without_ties(lambda seed: (seed, on_ranks(models, seed, (1, SHORT))))


@pytest.fixture(scope="module")
def seed(drawn):
    return drawn[0]


class Found(dict):
    """(case, layout) -> what its first rank found; a group of RUNS together, when one of them is asked for."""

    def __init__(self, models: dict[int, list[str]], seed: int, alone: list[list[dict]]) -> None:
        super().__init__()
        self._models, self._seed = models, seed
        self._keep((1, SHORT), alone)

    def __missing__(self, run: tuple[str, str]) -> dict:
        group = next(group for group, runs in RUNS.items() if run in runs)
        self._keep(group, on_ranks(self._models, self._seed, group))
        return self[run]

    def _keep(self, group: tuple[int, str], ranks: list[list[dict]]) -> None:
        runs = RUNS[group]
        self |= zip(runs, ranks[0], strict=True)
        for rank in ranks:
            for (case, name), result in zip(runs, rank, strict=True):
                others = case == "gae" and name in WITH_OTHERS
                assert ("refused" in result) == others, "a process did not learn of what another one refuses"


@pytest.fixture(scope="module")
def found(drawn, models):
    return Found(models, *drawn)


def near(ours: Any, theirs: Any, what: str, bound: float = 1e-5) -> None:
    """The same up to rounding, which is of the size of the largest one, or of 1."""
    assert np.shape(ours) == np.shape(theirs), what
    theirs = np.asarray(theirs)
    same = np.asarray(ours) == theirs  # infinities too
    worst = np.abs(np.where(same, 0.0, ours) - np.where(same, 0.0, theirs)).max(initial=0.0)
    assert worst < bound * max(1.0, np.abs(theirs[np.isfinite(theirs)]).max(initial=0.0)), f"{what} differs by {worst}"


def reference_of(found: dict, run: tuple[str, str]) -> dict[str, Any]:
    return found[run[0], REFERENCES[layers_under(run[1])]]


# -- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", COMPARED)
def test_values_advantages_and_returns_are_those_of_one_process(found, run):
    reference, result = reference_of(found, run)["advantages"], found[run]["advantages"]
    assert result.keys() == (reference.keys() if run[1] in WITH_OTHERS else {"case"})
    for name, ours in result.items():
        theirs = reference[name]
        assert ours.keys() == theirs.keys()
        for key, of_all in theirs.items():
            assert ours[key].keys() == of_all.keys()
            for number, values in of_all.items():
                near(ours[key][number], values, f"{name}: {key} of {number}")


@pytest.mark.parametrize("run", COMPARED)
def test_losses_and_gradients_are_those_of_one_process(found, run):
    reference, result = reference_of(found, run), found[run]
    assert reference["micro_batches"] > 1 and (run[1] != "large micro-batches" or result["micro_batches"] == 1)
    assert result["metrics"].keys() == reference["metrics"].keys()
    for name, theirs in reference["metrics"].items():
        if name.startswith("routing/"):
            continue  # they count tokens whose experts changed, of which rounding may decide one
        near(result["metrics"][name], theirs, name, 2e-5)
    assert result["coefficient"] == pytest.approx(reference["coefficient"], rel=1e-5)
    for learner, updates in reference["grads"].items():
        assert len(updates) == len(result["grads"][learner]) == (learner == "policy" or run[0] == "gae")
        for ours, theirs in zip(result["grads"][learner], updates, strict=True):
            assert ours.keys() == theirs.keys()
            assert max(np.abs(g).max() for g in theirs.values()) > 1e-3, "gradients too small to compare"
            for tensor, grad in theirs.items():
                near(ours[tensor], grad, f"gradient of the {learner}'s {tensor}")


@pytest.mark.parametrize("run", COMPARED)
def test_weights_after_a_step_are_those_of_one_process(found, run):
    reference, result = reference_of(found, run)["weights"], found[run]["weights"]
    assert result.keys() == reference.keys() == ({"policy", "critic"} if run[0] == "gae" else {"policy"})
    for learner, weights in reference.items():
        for tensor, theirs in weights.items():
            near(result[learner][tensor], theirs, f"the {learner}'s {tensor}")


def test_what_was_compared_has_something_to_do(found):
    metrics = found["gae", "reference"]["metrics"]
    assert 0.02 < metrics["critic/clip_fraction"] < 0.98 and metrics["kl/reference"] > 0.02
    assert metrics["critic/grad_norm"] > 0.1 and metrics["critic/explained_variance"] < 1
    # By as much as it may move in 16 responses of a horizon of 160: a fifth of a tenth.
    assert metrics["kl/coefficient"] == 0.1
    assert found["gae", "reference"]["coefficient"] == pytest.approx(0.1 * 1.02, rel=1e-9)


@pytest.mark.parametrize("layout", ["reference", "ep2"])
def test_with_vp2o_replayed_routes_and_a_pruned_vocabulary(found, layout):
    metrics = found["together", layout]["metrics"]
    assert {"critic/loss", "critic/value", "kl/reference", "vp2o/attraction", "loss/policy"} <= metrics.keys()
    assert all(math.isfinite(value) for value in metrics.values()), metrics
    assert metrics["update/skipped"] == metrics["critic/skipped"] == 0
    old = np.concatenate([*found["together", layout]["advantages"]["case"]["old_log_probs"].values()])
    assert 0.01 < np.isinf(old).mean() < 0.9, "nothing is pruned, or everything"


# -- oracles ----------------------------------------------------------------------------------------------------------


def over_group(algorithm: AlgorithmConfig, rewards: list[float], index: int) -> float:
    """The advantage of one response among those to a prompt, by definition."""
    mean, mine = sum(rewards) / len(rewards), rewards[index]
    match algorithm.advantage:
        case "grpo":
            return (mine - mean) / math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
        case "dr_grpo" | "reinforce_plus_plus_baseline":
            return mine - mean
        case "rloo":
            others = rewards[:index] + rewards[index + 1 :]
            return mine - sum(others) / len(others)
        case "tilt":
            weights = [math.exp(r / algorithm.tilt_temperature) for r in rewards]
            return len(rewards) * weights[index] / sum(weights)
        case _:
            return mine


def expected(
    algorithm: AlgorithmConfig,
    trajectories: list[Trajectory],
    found: dict[str, dict[int, np.ndarray]],
    process: float | None = None,
) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
    """(advantages, returns) of each trajectory's counted tokens, by their definitions, in fp64.

    process: weight of rewards at the ends of steps.
    """
    kl = algorithm.kl.coefficient if algorithm.kl.placement == "reward" else 0.0
    of_tokens: dict[int, list[float]] = {}
    steps = {int(t.prompt_id): [i for i, counts in enumerate(t["loss_mask"]) if counts] for t in trajectories}
    for number, places in steps.items():
        of_tokens[number] = []
        for i in places:
            reward, old = 0.0, float(found["old_log_probs"][number][i]) if "old_log_probs" in found else -math.inf
            if math.isfinite(old):
                reward -= algorithm.entropy_reward * old
                if kl:
                    reward -= kl * (old - float(found["reference_log_probs"][number][i]))
            of_tokens[number].append(reward)
    scores = {int(t.prompt_id): {i: float(s) for i, s in enumerate(t["step_scores"]) if s == s} for t in trajectories}
    whole = algorithm.advantage in ("grpo", "dr_grpo", "rloo", "tilt")
    final: dict[tuple[int, int], float] = {}
    sample = 0
    samples = []
    for t in trajectories:
        sample += not t.part
        samples.append(sample)
    groups: dict[int, list[tuple[int, float]]] = {}
    for t, number in zip(trajectories, samples, strict=True):
        if not t.masked and not t.part:
            shaped = sum(of_tokens[int(t.prompt_id)]) if whole else 0.0
            outcome = t.reward - process * t.reward_parts["prm"] if process else t.reward
            groups.setdefault(t.group_id, []).append((number, outcome + shaped))
    for members in groups.values():
        for index, (number, _) in enumerate(members):
            final[number] = over_group(algorithm, [reward for _, reward in members], index)
    advantages: dict[int, list[float]] = {}
    returns: dict[int, list[float]] = {}
    for t, number in zip(trajectories, samples, strict=True):
        key = int(t.prompt_id)
        places, reward = steps[key], final.get(number, 0.0)
        if whole:
            advantages[key] = [reward] * len(places)
            if process:
                everything = [
                    s for o in trajectories if o.group_id == t.group_id for s in scores[int(o.prompt_id)].values()
                ]
                mean = sum(everything) / max(1, len(everything))
                deviation = math.sqrt(sum((s - mean) ** 2 for s in everything) / max(1, len(everything)))
                scale = deviation if algorithm.advantage == "grpo" else 1.0
                even = deviation < 1e-9  # all steps are worth the same
                advantages[key] = [
                    reward
                    + process * (0 if even else sum((s - mean) / scale for end, s in scores[key].items() if end >= i))
                    for i in places
                ]
            continue
        rewards = [r + (process or 0.0) * scores[key].get(i, 0.0) for i, r in zip(places, of_tokens[key], strict=True)]
        goes_on = algorithm.advantage == "gae" and algorithm.bootstrap_truncated and t.finish_reason == "length"
        if goes_on:  # nobody knows how good it would have been, but how long it is
            reward = t.reward_parts["overlong"]
        if rewards:
            rewards[-1] += reward
        values, lam = [0.0] * (len(places) + 1), 1.0
        if "values" in found:
            values = [float(found["values"][key][i]) for i in places]
            values.append(float(found["last"][key][0]) if goes_on else 0.0)
            lam = algorithm.lam
        gamma = algorithm.gamma
        advantages[key] = [
            sum(
                (gamma * lam) ** (later - now) * (rewards[later] + gamma * values[later + 1] - values[later])
                for later in range(now, len(places))
            )
            for now in range(len(places))
        ]
        returns[key] = [advantage + value for advantage, value in zip(advantages[key], values, strict=False)]
    if algorithm.whiten if algorithm.whiten is not None else not whole:
        everything = [value for each in advantages.values() for value in each]
        mean = sum(everything) / len(everything)
        deviation = math.sqrt(sum((value - mean) ** 2 for value in everything) / len(everything))
        advantages = {key: [(value - mean) / deviation for value in each] for key, each in advantages.items()}
    if (limit := algorithm.advantage_clip) is not None:
        advantages = {key: [min(max(value, -limit), limit) for value in each] for key, each in advantages.items()}
    return advantages, returns


def algorithm_of(case: str) -> AlgorithmConfig:
    return make_config("", CASES[case]).algorithm


ALGORITHMS = {
    "gae": OF_TOKENS | {"few": OF_TOKENS["gae, whitened"]},
    "reinforce_plus_plus_baseline": {},
    "grpo": WHOLE,
    "together": {},
}


@pytest.mark.parametrize("run", ALL)
def test_advantages_are_those_of_their_definition(found, seed, run):
    case = run[0]
    algorithms = ALGORITHMS[case] if run[1] in WITH_OTHERS else {}
    if algorithms:
        algorithms = algorithms | {
            f"process: {n}": a for n, a in OF_STEPS.items() if n.endswith("grpo") == (case == "grpo")
        }
    for name, algorithm in (algorithms | {"case": algorithm_of(case)}).items():
        trajectories = make_trajectories(seed, parts=case != "grpo")
        if name == "few":
            trajectories = [t for t in trajectories if not t.part][3:9:5]
        made = found[run]["advantages"][name]
        of_steps = name.startswith("process: ") or (name == "case" and "rewards" in CASES[case])
        advantages, returns = expected(algorithm, trajectories, made, 0.7 if of_steps else None)
        assert made["advantages"].keys() == advantages.keys()
        for t in trajectories:
            number, mask = int(t.prompt_id), t["loss_mask"]
            near(made["advantages"][number][mask], advantages[number], f"{name}: advantages of {number}")
            if algorithm.advantage == "gae":
                near(made["returns"][number][mask], returns[number], f"{name}: returns of {number}")
                assert not made["returns"][number][~mask].any()


@pytest.mark.parametrize("run", ALL)
def test_metrics_of_advantages_are_those_of_all_tokens_that_count(found, seed, run):
    """Figures of all ranks and both updates, in fp64; after the limit, of which it is known how many it has changed."""
    trajectories, algorithm = make_trajectories(seed, parts=run[0] != "grpo"), algorithm_of(run[0])
    made, metrics = found[run]["advantages"]["case"], found[run]["metrics"]
    values = np.concatenate([made["advantages"][int(t.prompt_id)][t["loss_mask"]] for t in trajectories]).astype(float)
    expected = {"mean": values.mean(), "std": values.std(), "min": values.min(), "max": values.max()}
    for name, value in expected.items():
        assert metrics[f"advantage/{name}"] == pytest.approx(value, rel=1e-6, abs=1e-6), name
    limit = algorithm.advantage_clip
    if limit is None:
        assert "advantage/clipped" not in metrics
    else:
        at_limit = np.isclose(np.abs(values), limit, rtol=1e-6).mean()
        assert 0 < metrics["advantage/clipped"] == pytest.approx(at_limit, rel=1e-9)


def test_parts_of_a_sample_have_no_single_reward_to_add_to(found):
    for layout in WITH_OTHERS:
        refused = found["gae", layout]["refused"]
        assert "is several sequences; set placement: loss, or advantage: reinforce_plus_plus" in refused
        assert "\n" not in refused, layout


def test_the_critic_is_what_transformers_makes_of_its_folder(found, models, seed):
    """Values of the states before each token and behind the last, and the gradient of the first update's loss."""
    *_, folder = models[2]
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    made = found["gae", "reference"]["advantages"]["case"]
    trajectories = make_trajectories(seed)
    losses, tokens = [], 0
    for index, t in enumerate(trajectories):
        number, mask = int(t.prompt_id), torch.from_numpy(t["loss_mask"])
        values = model.score(model.model(torch.from_numpy(t.tokens)[None].long()).last_hidden_state)[0, :, 0]
        before, last = values[t.prompt_length - 1 : -1], values[-1]
        near(made["values"][number], before.detach(), f"values of {number}")
        near(made["last"][number][0], last.detach(), f"the value behind {number}")
        if index in share_of(len(trajectories), 0, 2):
            returns = torch.from_numpy(made["returns"][number]).double()
            losses.append((before - returns)[mask].square().sum() / 2)
            tokens += int(mask.sum())
    (torch.stack(losses).sum() / tokens).backward()
    [first] = found["gae", "reference"]["grads"]["critic"]
    compared = 0
    for name, parameter in model.named_parameters():
        if name in first and parameter.grad is not None:
            near(first[name], parameter.grad.numpy(), f"gradient of {name}")
            compared += 1
    assert compared > 20 and "score.weight" in first
