"""precision.identical in the trainer: the same bits alone, among others and under every layout, and the right gradients."""

from __future__ import annotations

import numpy as np
import pytest
from layouts import make_samples
from ranks import run_ranks, without_ties

from megatron_rl.errors import UserError

pytestmark = pytest.mark.timeout(900)

SAMPLES = 8
ON_ONE = {
    "together": {},
    "alone": {"batch": {"tokens_per_micro_batch": 39}},  # one sequence in a micro-batch
    "full_recompute": {"model": {"recompute": "full"}},
    "selective_recompute": {"model": {"recompute": "selective"}},
}
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
DENSE = ("qwen3", "llama")
ON_TWO = {
    "tp2": {"parallel": {"tensor": 2, "expert_tensor": 1}},
    "pp2": {"parallel": {"pipeline": 2}},
    "cp2": {"parallel": {"context": 2}},
    "cp2_all_gather": {"parallel": {"context": 2, "cp_comm_type": "all_gather"}},
    "ep2": {"parallel": {"expert": 2}},
}


def configs(precision: str, layouts: dict[str, dict], *, identical: bool = True) -> dict[str, dict]:
    """The layouts with this precision; gradients are not clipped, since their norm is no part of what is compared."""
    return {
        name: {**layout, "precision": {"train": precision, "identical": identical}, "optimizer": {"clip_grad": 1e9}}
        for name, layout in layouts.items()
    }


def run(model: str, samples: list, world: int, layouts: dict[str, dict], **options: bool) -> dict[str, dict]:
    found = run_ranks(world, "layouts:run_layouts", (model, samples, [*layouts.values()]), timeout=540.0, **options)
    return dict(zip(layouts, found[0], strict=True))


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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_alone_among_others_and_on_two_ranks(family, precision, tiny_model):
    model = str(tiny_model(*FAMILIES[family]))
    samples = make_samples(int(np.random.SeedSequence().entropy % 2**31), SAMPLES, 512)
    one = run(model, samples, 1, configs(precision, ON_ONE))
    assert {name: different(result, one["together"]) for name, result in one.items()} == {name: [] for name in ON_ONE}
    for name in ("full_recompute", "selective_recompute"):  # what is computed again is the same again
        for tensor, grad in one["together"]["grads"].items():
            assert np.array_equal(one[name]["grads"][tensor], grad), (name, tensor)
    layouts = {n: c for n, c in ON_TWO.items() if n != "ep2" or family not in DENSE}
    if family.startswith("deepseek_v3"):  # one latent for all heads: what is gathered is that, and not the heads' keys
        layouts.pop("cp2_all_gather")
    two = run(model, samples, 2, configs(precision, layouts))
    assert {name: different(result, one["together"]) for name, result in two.items()} == {name: [] for name in layouts}
    if precision == "fp32":
        for result in two.values():
            check_gradients(result["grads"], one["together"]["grads"])


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_plain_layers(family, tiny_model):
    model = str(tiny_model(*FAMILIES[family]))

    def attempt(seed: int) -> tuple[dict, dict]:
        samples = make_samples(seed, SAMPLES, 512)
        plain = run(model, samples, 1, configs("fp32", {"plain": {}}, identical=False), refuse_ties=True)["plain"]
        return plain, run(model, samples, 1, configs("fp32", {"identical": {}}))["identical"]

    plain, identical = without_ties(attempt)
    for key, value in plain["log_probs"].items():
        assert abs(value - identical["log_probs"][key]) < 1e-5
    check_gradients(identical["grads"], plain["grads"])


def test_more_ranks_than_parts_are_refused():
    from megatron_rl.models.identical_layers import parts_of_rank  # Megatron, which takes seconds

    assert [parts_of_rank(width, 2) for width in (64, 512, 1024)] == [1, 2, 4]
    with pytest.raises(UserError, match=r"parallel\.tensor = 4 .* 64 inputs is made of 2 parts"):
        parts_of_rank(64, 4)
