"""Every parallel layout against one process, in fp32: log-probs, loss, every gradient, and weights after two updates.

Which algorithms and models a layout is tried with says `tests/covering.py`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from covering import (
    FOUR_RANKS,
    TWO_RANKS,
    Case,
    layers_of,
    on_four_ranks,
    on_two_ranks,
    others,
    parallel_of,
    world_of,
)
from layouts import make_samples
from ranks import run_ranks, without_ties
from safetensors.numpy import load_file
from weights import scaled

pytestmark = pytest.mark.timeout(900)  # a fixture runs all layouts


SAMPLES = 10
# Adam divides a gradient by its own size, so that rounding turns the sign of a whole step where a gradient is nearly zero. With
# this epsilon two steps differ by at most 2 lr/EPS = 2 times what the gradients do (1e-8), and a rounding (1e-7) each.
EPS = 1e-3
# One process that does the same in another way.
WAYS = {
    "full_recompute": {"model": {"recompute": "full"}},
    "selective_recompute": {"model": {"recompute": "selective"}},
    "one_sequence_per_micro_batch": {"batch": {"tokens_per_micro_batch": 39}},
    "head_in_chunks": {"model": {"head_chunk_tokens": 5}},
    "all_in_one": {"batch": {"tokens_per_micro_batch": 4096}},
}
ALGORITHMS = {
    "grpo": {"algorithm": {"clip_high": 0.28, "entropy_coefficient": 0.01}},
    "gspo": {"algorithm": {"loss": "gspo", "aggregation": "sequence_mean", "clip_low": 0.01, "clip_high": 0.02}},
    # Every part of the correction, over a vocabulary that is pruned (and, by the samples, truncated too).
    "corrected": {
        "pruning": {"enabled": True, "rho": 0.43},
        "correction": {
            "mode": "clip",
            "level": "geometric",
            "low": 2.0,
            "high": 3.3,
            "veto": 0.002,
            "denominator": "weights",
            "reject": "k3",
            "reject_level": "token",
            "reject_above": 4.0,
        },
    },
    # One update: its own forward is the old policy, and the sum of the weights is known after it.
    "normalized": {
        "correction": {"mode": "truncate", "high": 2.0, "denominator": "weights"},
        "batch": {"updates_per_step": 1},
    },
    # Something is dropped in every way, and the mean is over what stays, which the ranks know together alone.
    "kept": {
        "pruning": {"measure": True, "rho": 0.43},
        "algorithm": {"aggregation": "sequence_mean", "entropy_coefficient": 0.01},
        "correction": {"mode": "mask", "low": 0.6, "high": 8.0, "veto": 0.3},
        "batch": {"updates_per_step": 1},
    },
    "rejected": {
        "correction": {"reject": "k2", "reject_level": "token", "reject_above": 1e-20},
        "optimizer": {"weight_decay": 0.1},
    },
    "weighted": {"correction": {"mode": "truncate", "high": 2.0}, "batch": {"updates_per_step": 1}},
    # Nothing of it needs whole sequences, so that the head computes gradients on the way.
    "pruned": {"pruning": {"enabled": True, "rho": 0.43}, "correction": {"mode": "clip", "low": 0.5, "high": 2.0}},
    # The second update is of the same batch, whose old log-probs, and what replays routes, are from before the first.
    "epochs": {
        "algorithm": {"loss": "sapo", "aggregation": "sequence_sum", "tau_neg": 1.4},
        "routing": {"source": "r2"},
        "batch": {"updates_per_step": 1, "epochs": 2},
        "rollout": {"max_new_tokens": 26},  # of the divisor: gradients as large as those of a mean
    },
    # As it is trained: one update, whose ratios are 1.
    "on_policy": {"batch": {"updates_per_step": 1}},
    # All parts of it; the first two must weigh about the same, and the last refuse nothing, but be measured.
    "vp2o": {
        "vp2o": {
            "enabled": True,
            "neighbors": 3,
            "inactive_neighbors": 2,
            "temperature": 2.0,
            "repulsion": 1.0,
            "repulsion_scale": "relative",
            "orthogonality": 0.1,
            "trust_region": 2.0,
            "probe_tokens": 4096,
        }
    },
    # grpo with a first pipeline stage that has nothing to train, and single frozen experts of either expert-parallel rank.
    "frozen": {
        "algorithm": {"clip_high": 0.28, "entropy_coefficient": 0.01},
        "model": {
            "freeze": [
                "embedding.*",
                "decoder.layers.0.*",
                "*.mlp.router.*",
                "*.linear_qkv.weight",
                "decoder.layers.1.mlp.experts.local_experts.[15].*",
            ]
        },
    },
}
FROZEN = re.compile(r"model\.embed|model\.layers\.(0\.|.*(\.mlp\.gate\.|\.[qkv]_proj\.)|1\.mlp\.experts\.[15]\.)")
"""The same by Hugging Face names."""
MODELS = ("qwen3_moe", "gpt_oss")
LEARNED = ("grpo", "gspo", "corrected", "normalized", "kept", "epochs", "vp2o", "frozen")
TRUNCATED = ("corrected", "pruned", "normalized", "weighted", "kept", "rejected")
"""Of which tokens lie outside of sets."""


def allowed(algorithm: str, layout: str, model: str) -> bool:
    """Experts of gpt-oss are one parameter, and have biases, which are whole on each rank."""
    return model != "gpt_oss" or (algorithm != "frozen" and layout != "etp2_ep2")


def of_experts(algorithm: str, layout: str, model: str) -> bool:
    """VP2O on four ranks where experts are over several."""
    return allowed(algorithm, layout, model) and (algorithm != "vp2o" or "ep" in layout)


def by_turns(cases: list[Case], one: str, other: str) -> list[Case]:
    """Let another algorithm have every second case of one: their gradients are divided by the same sum of weights."""
    of_one = [case for case in cases if case.algorithm == one]
    return [case._replace(algorithm=other) if case in of_one[1::2] else case for case in cases]


TOGETHER = [algorithm for algorithm in LEARNED if algorithm != "normalized"]
CASES = by_turns(on_two_ranks(TOGETHER, MODELS, allowed), "corrected", "normalized")
CASES += on_four_ranks(("vp2o", "grpo"), MODELS, of_experts)
REST = others(CASES, LEARNED, TWO_RANKS, MODELS, allowed) + others(
    CASES, ("grpo", "vp2o"), FOUR_RANKS, MODELS, of_experts
)
ON_ONE = [
    Case(algorithm, way, model)
    for algorithm, model, ways in (
        ("grpo", "qwen3_moe", WAYS),
        ("grpo", "gpt_oss", ("full_recompute", "one_sequence_per_micro_batch")),
        ("gspo", "qwen3_moe", ("head_in_chunks",)),
        ("vp2o", "qwen3_moe", ("full_recompute", "one_sequence_per_micro_batch")),
        ("frozen", "qwen3_moe", ("full_recompute",)),
        ("epochs", "qwen3_moe", ("full_recompute", "one_sequence_per_micro_batch")),
        ("corrected", "qwen3_moe", ("head_in_chunks",)),
        ("normalized", "qwen3_moe", ("head_in_chunks",)),
        ("kept", "qwen3_moe", ("head_in_chunks", "one_sequence_per_micro_batch")),
        ("pruned", "qwen3_moe", ("head_in_chunks",)),
    )
    for way in ways
]
LOOKED_AT = [Case("on_policy", "reference", "gpt_oss")] + [
    Case(algorithm, "reference", "qwen3_moe") for algorithm in (*LEARNED, "rejected", "weighted")
]
"""References of which tests below look at figures."""


@pytest.fixture(scope="module")
def models(tiny_model, tmp_path_factory):
    """(family, layers) -> folder. gpt-oss: sinks, yarn, biases, and windows of 8 in every other layer, which most sequences
    outgrow several times; attention matters in it as in a trained model."""
    found = {}
    for layers in (2, 4):
        found["qwen3_moe", layers] = tiny_model("qwen3_moe", "--layers", str(layers))
        folder = tmp_path_factory.mktemp("models") / "gpt_oss"
        shutil.copytree(tiny_model("gpt_oss", "--layers", str(layers), "--max-position", "131072"), folder)
        found["gpt_oss", layers] = scaled(folder, {"o_proj.weight": 10.0})
    return found


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    """Sections with the keys of all."""
    found: dict[str, Any] = {}
    for part in parts:
        for section, values in part.items():
            found[section] = {**found.get(section, {}), **values} if isinstance(values, dict) else values
    return found


def run(models: dict, samples: dict[bool, list], cases: Iterable[Case], layers: int | None = None, **options: bool):
    """Case -> what its first rank found; those of one number of processes one after the other on the same ones.

    samples: by whether they are truncated. layers: of the models, by default what the layout needs.
    """
    groups: dict[int, list[Case]] = {}
    for case in cases:
        groups.setdefault(world_of(case.layout), []).append(case)
    found: dict[Case, dict] = {}
    for world, group in groups.items():
        runs = []
        for case in group:
            layout = WAYS.get(case.layout, {})
            if world > 1:
                parallel = parallel_of(case.layout, whole_experts=case.model == "gpt_oss")
                layout = {"parallel": parallel, "whole": not case.layout.endswith("_sharded")}
            sections = merged({"optimizer": {"eps": EPS}}, layout, ALGORITHMS[case.algorithm])
            model = str(models[case.model, layers or layers_of(case.layout)])
            runs.append((model, samples[case.algorithm in TRUNCATED], sections))
        results = run_ranks(world, "layouts:run_all", (runs,), timeout=540.0, **options)
        found |= dict(zip(group, results[0], strict=True))
    return found


def compare(name: str, reference: dict, result: dict) -> None:
    assert result["log_probs"].keys() == reference["log_probs"].keys()
    pairs = [(result["log_probs"][key], reference["log_probs"][key]) for key in reference["log_probs"]]
    differences = [0.0 if ours == theirs else abs(ours - theirs) for ours, theirs in pairs]  # -inf: outside the set
    assert max(differences) < 1e-5, f"{name}: log-probs differ by {max(differences)}"
    assert result["tokens"] == reference["tokens"] == len(reference["log_probs"])
    assert result["metrics"].keys() == reference["metrics"].keys()
    assert result["mismatch"].keys() == reference["mismatch"].keys()
    for key, theirs in reference["mismatch"].items():  # quantiles are right to the width of a bin
        bins = 0.02 if key.endswith(("p01", "p99", "p100", "median")) else 1e-4
        ours = result["mismatch"][key]
        assert ours == pytest.approx(theirs, rel=bins, abs=1e-6, nan_ok=True), f"{name}: {key} is {ours}, not {theirs}"
    for key in ("loss/policy", "entropy"):  # means over tokens, of either sign
        ours, theirs = (one["metrics"][key] for one in (result, reference))
        assert abs(ours - theirs) <= 1e-6 * max(1.0, abs(theirs)), f"{name}: {key} is {ours}, one process has {theirs}"
    ours, theirs = (one["metrics"]["update/grad_norm"] for one in (result, reference))
    assert abs(ours - theirs) <= 1e-5 * max(1.0, theirs), f"{name}: gradient norm {ours}, one process has {theirs}"
    assert result["grads"] is None or result["grads"].keys() == reference["grads"].keys()
    for tensor, grad in reference["grads"].items() if result["grads"] else ():
        worst = np.abs(result["grads"][tensor] - grad).max()
        assert worst < 1e-5, f"{name}: gradient of {tensor} differs by {worst}"
    assert max(np.abs(g).max() for g in reference["grads"].values()) > 1e-3, "gradients too small to compare"
    assert result["vp2o"].keys() == reference["vp2o"].keys()
    for key, theirs in reference["vp2o"].items():
        near = 1e-2 if key in ("kl", "ess") else 1e-3  # of the weights after the step, which rounding has moved apart
        assert result["vp2o"][key] == pytest.approx(theirs, rel=near, abs=1e-6), f"{name}: {key}"
    for tensor, weight in reference["weights"].items():
        worst = np.abs(result["weights"][tensor] - weight).max()
        assert worst < 1e-6, f"{name}: after two updates {tensor} differs by {worst}"


def check_sinks(case: Case, reference: dict, result: dict) -> None:
    """Each rank has the sinks of its heads, which every token's gradient reaches; to be right they must be so in their own
    size, which is small."""
    sinks = {name: grad for name, grad in reference["grads"].items() if name.endswith(".self_attn.sinks")}
    assert len(sinks) == layers_of(case.layout)
    for name, grad in sinks.items() if result["grads"] else ():
        worst, size = np.abs(result["grads"][name] - grad).max(), np.abs(grad).max()
        assert size > 1e-6 and worst < 1e-3 * size, f"{case}: {name} of {size} differs by {worst}"


def check_counted(case: Case, reference: dict, result: dict) -> None:
    """Each layout divides by the same count of sequences and of their tokens."""
    counted = reference["metrics"]["loss/counted"]
    assert result["metrics"]["loss/counted"] == pytest.approx(counted, rel=1e-5 if case.algorithm == "kept" else 1e-6)


def check_case(models, references, case: Case, result: dict) -> None:
    """Against one process; what is particular to the algorithm and the model too."""
    layers = layers_of(case.layout)
    reference = references[case.algorithm, case.model, layers]
    compare(str(case), reference, result)
    if case.model == "gpt_oss":
        check_sinks(case, reference, result)
    if case.algorithm in ("kept", "epochs"):
        check_counted(case, reference, result)
    if case.algorithm == "frozen":  # weights stay as they are to the bit; a stage may have nothing but frozen ones
        before = load_file(models[case.model, layers] / "model.safetensors")
        for tensor, weight in result["weights"].items():
            assert np.array_equal(weight, before[tensor]) == bool(FROZEN.match(tensor)), f"{case}: {tensor}"


def draw(models: dict, cases: Iterable[Case]) -> tuple[dict[bool, list], dict[tuple[str, str, int], dict]]:
    """Samples, and what one process makes of them, by algorithm, model and layers, to compare with the cases.

    Those that are truncated are of one seed: a logit within rounding of the safe set's border is in the set of one layout and
    not of another.
    """
    needed = sorted({(case.algorithm, case.model, layers_of(case.layout)) for case in cases})
    truncated = make_samples(7, SAMPLES, 64, kept=True)

    def run_references(samples: dict[bool, list], *, kept: bool, **options: bool) -> dict:
        found = {}
        for layers in (2, 4):
            alone = [Case(a, "reference", m) for a, m, n in needed if n == layers and kept == (a in TRUNCATED)]
            for case, result in run(models, samples, alone, layers, **options).items():
                found[case.algorithm, case.model, layers] = result
        return found

    def attempt(seed: int):
        samples = {True: truncated, False: make_samples(seed, SAMPLES, 64)}
        return samples, run_references(samples, kept=False, refuse_ties=True)

    samples, found = without_ties(attempt)
    return samples, found | run_references(samples, kept=True)


@pytest.fixture(scope="module")
def drawn(models):
    return draw(models, [*CASES, *ON_ONE, *LOOKED_AT])


@pytest.fixture(scope="module")
def samples(drawn):
    return drawn[0]


@pytest.fixture(scope="module")
def references(drawn):
    return drawn[1]


@pytest.fixture(scope="module")
def found(models, samples, references):
    return run(models, samples, CASES + ON_ONE)


@pytest.mark.parametrize("case", CASES + ON_ONE, ids=str)
def test_an_update_is_that_of_one_process(models, references, found, case):
    check_case(models, references, case, found[case])


@pytest.fixture(scope="module")
def rest(models):
    samples, references = draw(models, REST)
    return references, run(models, samples, REST)


@pytest.mark.long
@pytest.mark.parametrize("case", REST, ids=str)
def test_an_update_is_that_of_one_process_in_the_rest_of_the_product(models, rest, case):
    references, found = rest
    check_case(models, references, case, found[case])


def test_micro_batches_of_other_sizes(references, found):
    one = found[Case("grpo", "one_sequence_per_micro_batch", "qwen3_moe")]["micro_batches"]
    assert one > references["grpo", "qwen3_moe", 2]["micro_batches"] > 1
    assert found[Case("grpo", "all_in_one", "qwen3_moe")]["micro_batches"] == 1


def test_windows_of_128_over_split_sequences(tiny_model, tmp_path):
    """Sequences of more than three of the released models' windows: a context-parallel rank's parts of one end inside of
    others' windows."""
    folder = tmp_path / "gpt_oss"
    shutil.copytree(tiny_model("gpt_oss", "--layers", "2", "--window", "128", "--max-position", "131072"), folder)
    model = str(scaled(folder, {"o_proj.weight": 10.0}))
    config = merged(ALGORITHMS["grpo"], {"batch": {"tokens_per_micro_batch": 1024}, "optimizer": {"eps": EPS}})

    def attempt(seed: int):
        samples = make_samples(seed, 3, 64, lengths=(385, 450))
        return samples, run_ranks(1, "layouts:run_layouts", (model, samples, [config]), refuse_ties=True)[0][0]

    samples, reference = without_ties(attempt)
    names = ("cp2", "cp2_all_gather", "tp2_sp")
    layouts = [{**config, "parallel": parallel_of(name, whole_experts=True)} for name in names]
    for name, result in zip(names, run_ranks(2, "layouts:run_layouts", (model, samples, layouts))[0], strict=True):
        compare(name, reference, result)


def test_a_single_update_is_on_policy_with_sinks(references):
    """The ratio is 1 and nothing is clipped, exactly."""
    metrics = references["on_policy", "gpt_oss", 2]["metrics"]
    assert (metrics["loss/ratio"], metrics["loss/clip_fraction"], metrics["loss/old_kl"]) == (1.0, 0.0, 0.0)


def test_the_stein_transform_has_something_to_do(references):
    figures = references["vp2o", "qwen3_moe", 2]["vp2o"]
    assert 0.1 < figures["vp2o/repulsion"] / figures["vp2o/attraction"] < 10, (
        "one part of the transform hides the other"
    )
    assert figures["vp2o/shift"] > 1e-3
    plain, transformed = (references[name, "qwen3_moe", 2]["grads"] for name in ("grpo", "vp2o"))
    for tensor in plain:
        changed = np.abs(plain[tensor] - transformed[tensor]).max()
        assert changed > 1e-5 or ".experts." not in tensor, f"{tensor} was not transformed"


def test_some_tokens_are_outside_of_the_safe_set(references):
    """Their log-probs are -inf, in the head too, where the loss is computed token by token."""
    outside = np.mean([value == -np.inf for value in references["pruned", "qwen3_moe", 2]["log_probs"].values()])
    assert 0.01 < outside < 0.5, f"{outside:.2f} of the tokens outside the safe set"


def test_every_part_of_the_correction_has_something_to_do(references):
    figures = references["corrected", "qwen3_moe", 2]["mismatch"]
    shares = {key: figures[f"corrected/{key}"] for key in ("vetoed", "rejected", "bounded")}
    assert all(0.01 < share < 0.9 for share in shares.values()), f"{shares}: not every part has something to do"


def test_normalized_weights_of_a_single_update(references):
    """By their mean, which the ranks learn from each other before the update."""
    normalized, weighted = (references[name, "qwen3_moe", 2] for name in ("normalized", "weighted"))
    mean = weighted["mismatch"]["corrected/weight_mean"]
    assert mean > 1.1
    expected = weighted["metrics"]["update/grad_norm"] / mean
    assert normalized["metrics"]["update/grad_norm"] == pytest.approx(expected, rel=1e-4)


def test_what_is_dropped_leaves_the_mean(models, references):
    """Where nothing is kept, nothing moves."""
    kept = references["kept", "qwen3_moe", 2]
    figures = kept["mismatch"]
    assert 0.05 < figures["corrected/vetoed"] < figures["corrected/masked"] < 0.9
    assert 0.1 < kept["metrics"]["loss/counted"] < 0.95
    assert figures["mismatch/kl_safe"] != figures["mismatch/kl"], "no token outside the set that is measured"
    nothing, before = references["rejected", "qwen3_moe", 2], load_file(models["qwen3_moe", 2] / "model.safetensors")
    assert (nothing["metrics"]["update/skipped"], nothing["metrics"]["loss/counted"]) == (1, 0)
    assert all(np.array_equal(weight, before[tensor]) for tensor, weight in nothing["weights"].items())


def test_a_second_epoch_and_a_constant_divisor(references, samples):
    """SAPO's gate of ratios to old log-probs that stay; the divisor is the sequences x rollout.max_new_tokens."""
    reference = references["epochs", "qwen3_moe", 2]
    assert reference["metrics"]["loss/ratio"] != 1.0
    sequences = sum(sample["loss_mask"].any() for sample in samples[False])
    expected = sequences * 26 / reference["tokens"]
    assert reference["metrics"]["loss/counted"] == pytest.approx(expected, rel=1e-6)


def test_gradients_beside_frozen_weights(models, references):
    plain, reference = (references[name, "qwen3_moe", 2] for name in ("grpo", "frozen"))
    check_case(models, references, Case("frozen", "reference", "qwen3_moe"), reference)
    for tensor, grad in plain["grads"].items():  # of the first update
        expected = np.zeros_like(grad) if FROZEN.match(tensor) else grad
        assert np.abs(reference["grads"][tensor] - expected).max() < 1e-6, tensor
