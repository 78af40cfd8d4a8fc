"""precision.identical in the trainer: the same bits alone, among others and under every layout, and the right gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from covering import Case, others, pairwise, parallel_of
from layouts import make_samples
from ranks import run_ranks, without_ties

from megatron_rl.errors import UserError

pytestmark = pytest.mark.timeout(900)

SAMPLES = 6
ON_ONE: dict[str, dict[str, Any]] = {
    "together": {},
    "alone": {"batch": {"tokens_per_micro_batch": 39}},  # one sequence in a micro-batch
    "full_recompute": {"model": {"recompute": "full"}},
    "selective_recompute": {"model": {"recompute": "selective"}},
}
ON_TWO = ("tp2_sp", "pp2", "cp2", "cp2_all_gather", "ep2")
WAYS = (*list(ON_ONE)[1:], *ON_TWO)
PRECISIONS = ("fp32", "bf16")
FAMILIES = {
    "qwen3_moe": ("qwen3_moe",),
    "gpt_oss": ("gpt_oss", "--max-position", "131072"),
    "olmoe": ("olmoe",),
    "deepseek_v3": ("deepseek_v3",),
    "deepseek_v3 with query latents": ("deepseek_v3", "--q-lora-rank", "24"),
    "mixtral": ("mixtral",),
    "qwen3": ("qwen3",),
    "llama": ("llama",),
}
KINDS = {
    "softmax": ("qwen3_moe", "mixtral"),
    "gpt_oss": ("gpt_oss",),
    "olmoe": ("olmoe",),
    "deepseek": ("deepseek_v3 with query latents", "deepseek_v3"),
    "dense": ("llama", "qwen3"),
}
"""Families whose layers are the same but for a norm or a router's order; they stand for their kind by turns."""
DENSE = KINDS["dense"]


def allowed(precision: str, way: str, family: str) -> bool:
    """DeepSeek's latent is one for all heads: what is gathered is that, and not the heads' keys."""
    return (way != "ep2" or family not in DENSE) and (way != "cp2_all_gather" or not family.startswith("deepseek"))


def by_turns() -> list[Case]:
    """Each pair of a precision, a way, and a kind of families."""
    turns: Counter[str] = Counter()
    cases = []
    for precision, way, kind in pairwise(
        PRECISIONS, WAYS, KINDS, allowed=lambda precision, way, kind: allowed(precision, way, KINDS[kind][0])
    ):
        cases.append(Case(precision, way, KINDS[kind][turns[kind] % len(KINDS[kind])]))
        turns[kind] += 1
    return cases


CASES = by_turns()
REST = others(CASES, PRECISIONS, WAYS, [*FAMILIES], allowed)


def run(models: dict[str, str], samples: dict[str, list], cases: Iterable[Case]) -> dict[Case, dict]:
    """Case (its algorithm is the precision) -> what its first rank found.

    Gradients are not clipped, since their norm is no part of what is compared.
    """
    found: dict[Case, dict] = {}
    for world in (1, 2):
        of_world = [case for case in cases if (case.layout in ON_TWO) == (world == 2)]
        runs = []
        for precision, way, family in of_world:
            parallel = {"parallel": parallel_of(way, whole_experts=True)} if world == 2 else ON_ONE[way]
            settings = {"precision": {"train": precision, "identical": True}, "optimizer": {"clip_grad": 1e9}}
            runs.append((models[family], samples[family], parallel | settings))
        results = run_ranks(world, "layouts:run_all", (runs,), timeout=540.0)[0] if runs else []
        found |= dict(zip(of_world, results, strict=True))
    return found


@pytest.fixture(scope="module")
def models(tiny_model):
    return {family: str(tiny_model(*arguments, "--layers", "2")) for family, arguments in FAMILIES.items()}


@pytest.fixture(scope="module")
def drawn(models):
    """By family: samples in which no two experts tie but for rounding, and what plain layers make of them."""
    plain = {"precision": {"train": "fp32"}, "optimizer": {"clip_grad": 1e9}}

    def attempt(seed: int) -> dict[str, tuple[list, dict]]:
        samples = make_samples(seed, SAMPLES, 512)
        runs = [(model, samples, plain) for model in models.values()]
        results = run_ranks(1, "layouts:run_all", (runs,), refuse_ties=True)[0]
        return {family: (samples, result) for family, result in zip(models, results, strict=True)}

    return without_ties(attempt)


@pytest.fixture(scope="module")
def samples(drawn):
    return {family: samples for family, (samples, _) in drawn.items()}


@pytest.fixture(scope="module")
def found(models, samples):
    together = [Case(precision, "together", family) for precision in PRECISIONS for family in FAMILIES]
    return run(models, samples, together + CASES)


def different(one: dict, other: dict) -> list[float]:
    """Log-probs of one that are not the other's."""
    assert one["log_probs"].keys() == other["log_probs"].keys() and one["log_probs"]
    return [value for key, value in one["log_probs"].items() if value != other["log_probs"][key]]


def check_gradients(found: dict, expected: dict) -> None:
    """Both are sums in fp32 over a hundred tokens and four layers, whose terms are at most as large as the largest.

    Some gradients are themselves as small as that bound: a share that is missing, or comes twice, is a third of any or more.
    """
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        error = found[name] - grad
        assert np.abs(error).max() <= 1e-5 * max(1.0, np.abs(grad).max()), name
        assert np.linalg.norm(error) <= 1e-2 * np.linalg.norm(grad) + 1e-7, name


def check_case(case: Case, together: dict, result: dict) -> None:
    """The same bits; where a pass is computed again, those of gradients too, and in fp32 the same gradients on two ranks."""
    assert different(result, together) == []
    if case.layout.endswith("recompute"):
        for tensor, grad in together["grads"].items():
            assert np.array_equal(result["grads"][tensor], grad), tensor
    if case.layout in ON_TWO and case.algorithm == "fp32":
        check_gradients(result["grads"], together["grads"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_alone_among_others_and_on_two_ranks(found, case):
    check_case(case, found[case._replace(layout="together")], found[case])


@pytest.fixture(scope="module")
def found_of_rest(models, samples):
    return run(models, samples, REST)


@pytest.mark.long
@pytest.mark.parametrize("case", REST, ids=str)
def test_the_rest_of_the_product(found, found_of_rest, case):
    check_case(case, found[case._replace(layout="together")], found_of_rest[case])


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_plain_layers(family, drawn, found):
    _, plain = drawn[family]
    identical = found[Case("fp32", "together", family)]
    for key, value in plain["log_probs"].items():
        assert abs(value - identical["log_probs"][key]) < 1e-5
    check_gradients(identical["grads"], plain["grads"])


def test_more_ranks_than_parts_are_refused():
    from megatron_rl.models.identical_layers import parts_of_rank  # Megatron, which takes seconds

    assert [parts_of_rank(width, 2) for width in (64, 512, 1024)] == [1, 2, 4]
    with pytest.raises(UserError, match=r"parallel\.tensor = 4 .* 64 inputs has 2 parts"):
        parts_of_rank(64, 4)
