"""Every parallel layout against one process, in fp32: log-probs, loss, every gradient, and weights after two updates."""

from __future__ import annotations

import numpy as np
import pytest
from layouts import make_samples
from ranks import run_ranks

SAMPLES = 14
BASE: dict = {}
TWO_RANKS = {
    "tp2_sp": {"parallel": {"tensor": 2}},
    "ep2": {"parallel": {"expert": 2}},
    "pp2": {"parallel": {"pipeline": 2}},
    "pp2_interleaved": {"parallel": {"pipeline": 2, "virtual_pipeline": 2}},
    "cp2": {"parallel": {"context": 2}},
    "cp2_all_gather": {"parallel": {"context": 2, "cp_comm_type": "all_gather"}},
    "dp2_distributed_optimizer": {"parallel": {"distributed_optimizer": True}},
    "dp2_replicated_optimizer": {"parallel": {"distributed_optimizer": False}},
}
FOUR_RANKS = {
    "etp2_ep2": {"parallel": {"tensor": 2, "expert": 2, "expert_tensor": 2}},
    "tp2_ep2": {"parallel": {"tensor": 2, "expert": 2, "expert_tensor": 1}},
    "tp2_pp2": {"parallel": {"tensor": 2, "pipeline": 2}},
}
ONE_RANK = {
    "reference": {},
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
            "normalize": True,
            "reject": "k3",
            "reject_level": "token",
            "reject_above": 4.0,
        },
    },
}


@pytest.fixture(scope="module")
def model(tiny_model):
    return str(tiny_model("qwen3_moe", "--layers", "4"))


@pytest.fixture(scope="module")
def samples():
    seed = int(np.random.SeedSequence().entropy % 2**32)
    print(f"samples of seed {seed}")
    return make_samples(seed, SAMPLES, 64)


def run(model, samples, world_size: int, layouts: dict[str, dict], algorithm: str) -> dict[str, dict]:
    configs = [{**layout, **ALGORITHMS[algorithm]} for layout in layouts.values()]
    results = run_ranks(
        world_size,
        "layouts:run_layouts",
        (model, samples, configs),
        timeout=280.0,
    )
    return dict(zip(layouts, results[0], strict=True))


def compare(name: str, reference: dict, result: dict) -> None:
    assert result["scored"].keys() == reference["scored"].keys()
    pairs = [(result["scored"][key], reference["scored"][key]) for key in reference["scored"]]
    differences = [0.0 if ours == theirs else abs(ours - theirs) for ours, theirs in pairs]  # -inf: outside the set
    assert max(differences) < 1e-5, f"{name}: log-probs differ by {max(differences)}"
    tokens = reference["metrics"]["tokens"]
    assert result["metrics"]["tokens"] == tokens
    assert result["panel"].keys() == reference["panel"].keys()
    for key, theirs in reference["panel"].items():  # quantiles are right to the width of a bin
        bins = 0.02 if key.endswith(("p01", "p99", "p100", "median")) else 1e-4
        ours = result["panel"][key]
        assert ours == pytest.approx(theirs, rel=bins, abs=1e-6, nan_ok=True), f"{name}: {key} is {ours}, not {theirs}"
    for key in ("loss/policy", "entropy"):  # sums over tokens of either sign: what is rounded is their mean
        ours, theirs = (one["metrics"][key] / tokens for one in (result, reference))
        assert abs(ours - theirs) <= 1e-6 * max(1.0, abs(theirs)), f"{name}: {key} is {ours}, one process has {theirs}"
    ours, theirs = (one["metrics"]["update/grad_norm"] for one in (result, reference))
    assert abs(ours - theirs) <= 1e-5 * max(1.0, theirs), f"{name}: gradient norm {ours}, one process has {theirs}"
    assert result["grads"].keys() == reference["grads"].keys()
    for tensor, grad in reference["grads"].items():
        worst = np.abs(result["grads"][tensor] - grad).max()
        assert worst < 1e-5, f"{name}: gradient of {tensor} differs by {worst}"
    assert max(np.abs(g).max() for g in reference["grads"].values()) > 1e-3, "gradients too small to compare"
    for tensor, weight in reference["weights"].items():
        worst = np.abs(result["weights"][tensor] - weight).mean()
        assert worst < 2e-5, f"{name}: after two updates {tensor} differs by {worst} on average"


@pytest.fixture(scope="module")
def truncated():
    """Of one seed: a logit within rounding of the safe set's border is in the set of one layout and not of another."""
    return make_samples(7, SAMPLES, 64, kept=True)


@pytest.fixture(scope="module")
def reference(model, samples, truncated):
    results = run(model, samples, 1, ONE_RANK, "grpo")
    for algorithm, those in (("gspo", samples), ("corrected", truncated)):
        chunks = {algorithm: {}, f"{algorithm}_head_in_chunks": {"model": {"head_chunk_tokens": 5}}}
        results |= run(model, those, 1, chunks, algorithm)
    return results


def test_micro_batches_and_recompute_do_not_change_the_update(reference):
    assert reference["one_sequence_per_micro_batch"]["micro_batches"] > reference["all_in_one"]["micro_batches"] == 1
    for name in ONE_RANK:
        compare(name, reference["reference"], reference[name])


def test_two_ranks(model, samples, reference):
    for name, result in run(model, samples, 2, TWO_RANKS, "grpo").items():
        compare(name, reference["reference"], result)


def test_four_ranks(model, samples, reference):
    for name, result in run(model, samples, 4, FOUR_RANKS, "grpo").items():
        compare(name, reference["reference"], result)


def test_sequence_ratios_over_split_sequences(model, samples, reference):
    """GSPO needs sums over whole sequences, which context parallelism and the head's chunks cut."""
    compare("gspo_head_in_chunks", reference["gspo"], reference["gspo_head_in_chunks"])
    layouts = {name: TWO_RANKS[name] for name in ("cp2", "tp2_sp", "pp2")}
    for name, result in run(model, samples, 2, layouts, "gspo").items():
        compare(name, reference["gspo"], result)


def test_corrected_and_pruned_over_split_sequences_and_vocabularies(model, truncated, reference):
    """Sequence ratios and the veto over context-parallel ranks, safe and kept sets over tensor-parallel ones."""
    whole = reference["corrected"]
    outside = np.mean([value == -np.inf for value in whole["scored"].values()])
    assert 0.01 < outside < 0.5, f"{outside:.2f} of the tokens outside the safe set"
    shares = {key: whole["panel"][f"corrected/{key}"] for key in ("vetoed", "rejected", "bounded")}
    assert all(0.01 < share < 0.9 for share in shares.values()), f"{shares}: not every part has something to do"
    compare("corrected_head_in_chunks", whole, reference["corrected_head_in_chunks"])
    layouts = {name: TWO_RANKS[name] for name in ("cp2", "tp2_sp", "pp2", "dp2_distributed_optimizer")}
    for name, result in run(model, truncated, 2, layouts, "corrected").items():
        compare(name, whole, result)
