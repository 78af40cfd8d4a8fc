"""Every parallel layout against one process, in fp32: log-probs, loss, every gradient, and weights after two updates."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from layouts import make_samples
from ranks import run_ranks, without_ties
from safetensors.numpy import load_file
from weights import scaled

pytestmark = pytest.mark.timeout(900)  # a fixture runs all layouts


SAMPLES = 14
# Adam divides a gradient by its own size, so that rounding turns the sign of a whole step where a gradient is nearly zero. With
# this epsilon two steps differ by at most 2 lr/EPS = 2 times what the gradients do (1e-8), and a rounding (1e-7) each.
EPS = 1e-3
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
EP4 = {"ep4": {"parallel": {"expert": 4}}}
# Biases of experts are whole on each rank: expert-tensor parallelism is refused.
SINKS_TWO_RANKS = TWO_RANKS | {"tp2_sp": {"parallel": {"tensor": 2, "expert_tensor": 1}}}
SINKS_FOUR_RANKS = {
    "tp2_cp2": {"parallel": {"tensor": 2, "expert_tensor": 1, "context": 2}},
    "tp2_cp2_all_gather": {"parallel": {"tensor": 2, "expert_tensor": 1, "context": 2, "cp_comm_type": "all_gather"}},
    "tp2_pp2": {"parallel": {"tensor": 2, "expert_tensor": 1, "pipeline": 2}},
    "pp2_ep2": {"parallel": {"pipeline": 2, "expert": 2}},
}
# As they train: each rank has the reduced gradients of its shard alone.
SHARDED = {"dp2_sharded": {"parallel": {"distributed_optimizer": True}, "whole": False}}
SHARDED_EXPERTS = {"ep2_sharded": {"parallel": {"expert": 2, "distributed_optimizer": True}, "whole": False}}
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
                "decoder.layers.[01].*",
                "*.mlp.router.*",
                "*.linear_qkv.weight",
                "decoder.layers.3.mlp.experts.local_experts.[15].*",
            ]
        },
    },
}
FROZEN = re.compile(r"model\.embed|model\.layers\.([01]\.|.*(\.mlp\.gate\.|\.[qkv]_proj\.)|3\.mlp\.experts\.[15]\.)")
"""The same by Hugging Face names."""


@pytest.fixture(scope="module")
def model(tiny_model):
    return str(tiny_model("qwen3_moe", "--layers", "4"))


@pytest.fixture(scope="module")
def sinks_model(tiny_model, tmp_path_factory):
    """gpt-oss: sinks, yarn, biases, and windows of 8 in layers 1 and 3, which most sequences outgrow several times.

    Attention matters in it as in a trained model.
    """
    folder = tmp_path_factory.mktemp("models") / "gpt_oss"
    shutil.copytree(tiny_model("gpt_oss", "--max-position", "131072"), folder)
    return str(scaled(folder, {"o_proj.weight": 10.0}))


@pytest.fixture(scope="module")
def long_sinks_model(tiny_model, tmp_path_factory):
    """With the released models' windows."""
    folder = tmp_path_factory.mktemp("models") / "gpt_oss"
    shutil.copytree(tiny_model("gpt_oss", "--layers", "2", "--window", "128", "--max-position", "131072"), folder)
    return str(scaled(folder, {"o_proj.weight": 10.0}))


def under(algorithm: str, layouts: dict[str, dict]) -> dict[str, dict]:
    """Layouts of an algorithm, by 'algorithm name'."""
    return {
        f"{algorithm} {name}": {
            **layout,
            **{section: {**layout.get(section, {}), **values} for section, values in ALGORITHMS[algorithm].items()},
        }
        for name, layout in layouts.items()
    }


def with_sinks(model: str, algorithm: str, layouts: dict[str, dict]) -> dict[str, dict]:
    """Layouts of an algorithm for gpt-oss, by 'sinks algorithm name'."""
    configs = under(algorithm, layouts).items()
    return {f"sinks {name}": config | {"model": {**config.get("model", {}), "path": model}} for name, config in configs}


def run(model, samples, world_size: int, configs: dict[str, dict], *, refuse_ties: bool = False) -> dict[str, dict]:
    """One after the other on the same processes, which take longest to start."""
    layouts = [{"optimizer": {"eps": EPS}, **config} for config in configs.values()]
    arguments = (model, samples, layouts)
    results = run_ranks(world_size, "layouts:run_layouts", arguments, timeout=540.0, refuse_ties=refuse_ties)
    return dict(zip(configs, results[0], strict=True))


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


@pytest.fixture(scope="module")
def truncated():
    """Of one seed: a logit within rounding of the safe set's border is in the set of one layout and not of another."""
    return make_samples(7, SAMPLES, 64, kept=True)


@pytest.fixture(scope="module")
def drawn(model, sinks_model):
    """Samples, and what one process makes of them."""
    both = {name: ONE_RANK[name] for name in ("reference", "head_in_chunks")}
    small = {name: ONE_RANK[name] for name in ("reference", "full_recompute", "one_sequence_per_micro_batch")}
    first = under("grpo", ONE_RANK) | under("gspo", both) | under("vp2o", small)
    first |= under("frozen", {name: ONE_RANK[name] for name in ("reference", "full_recompute")}) | under(
        "epochs", small
    )
    first |= with_sinks(sinks_model, "grpo", small) | with_sinks(sinks_model, "on_policy", {"reference": {}})

    def attempt(seed: int):
        samples = make_samples(seed, SAMPLES, 64)
        return samples, run(model, samples, 1, first, refuse_ties=True)

    return without_ties(attempt)


@pytest.fixture(scope="module")
def samples(drawn):
    return drawn[0]


@pytest.fixture(scope="module")
def one_rank(model, drawn, truncated):
    both = {name: ONE_RANK[name] for name in ("reference", "head_in_chunks")}
    return drawn[1] | run(
        model,
        truncated,
        1,
        under("corrected", both)
        | under("pruned", both)
        | under("normalized", both)
        | under(
            "kept", {name: ONE_RANK[name] for name in ("reference", "head_in_chunks", "one_sequence_per_micro_batch")}
        )
        | under("rejected", {"reference": {}})
        | under("weighted", {"reference": {}}),
    )


@pytest.fixture(scope="module")
def two_ranks(model, sinks_model, samples, truncated):
    split = {name: TWO_RANKS[name] for name in ("cp2", "tp2_sp", "pp2")}
    with_data = split | {"dp2_distributed_optimizer": TWO_RANKS["dp2_distributed_optimizer"]}
    experts = with_data | {name: TWO_RANKS[name] for name in ("ep2", "dp2_replicated_optimizer", "pp2_interleaved")}
    experts |= SHARDED
    frozen = {name: experts[name] for name in ("tp2_sp", "pp2", "ep2", "dp2_sharded")}
    first = under("grpo", TWO_RANKS) | under("gspo", split) | under("vp2o", experts) | under("frozen", frozen)
    first |= under("epochs", split | {name: experts[name] for name in ("ep2", "dp2_distributed_optimizer")})
    first |= with_sinks(sinks_model, "grpo", SINKS_TWO_RANKS)
    return run(model, samples, 2, first) | run(
        model, truncated, 2, under("corrected", with_data) | under("normalized", with_data) | under("kept", with_data)
    )


def compare_all(algorithm: str, one_rank, results) -> None:
    found = {name: result for name, result in results.items() if name.startswith(f"{algorithm} ")}
    assert found
    for name, result in found.items():
        compare(name, one_rank[f"{algorithm} reference"], result)


def test_micro_batches_and_recompute_do_not_change_the_update(one_rank):
    assert one_rank["grpo one_sequence_per_micro_batch"]["micro_batches"] > 1
    assert one_rank["grpo all_in_one"]["micro_batches"] == 1
    compare_all("grpo", one_rank, one_rank)


def test_two_ranks(one_rank, two_ranks):
    compare_all("grpo", one_rank, two_ranks)


@pytest.fixture(scope="module")
def four_ranks(model, sinks_model, samples):
    both = {name: FOUR_RANKS[name] for name in ("etp2_ep2", "tp2_ep2")}
    configs = under("grpo", FOUR_RANKS) | under("vp2o", both | EP4 | SHARDED_EXPERTS)
    return run(model, samples, 4, configs | with_sinks(sinks_model, "grpo", SINKS_FOUR_RANKS))


def test_four_ranks(one_rank, four_ranks):
    compare_all("grpo", one_rank, four_ranks)


def test_sinks_and_windows_over_split_heads_and_sequences(one_rank, two_ranks, four_ranks):
    """gpt-oss: each rank has the sinks of its heads, which every token's gradient reaches."""
    grads = one_rank["sinks grpo reference"]["grads"]
    sinks = {name: grad for name, grad in grads.items() if name.endswith(".self_attn.sinks")}
    assert len(sinks) == 4
    for results in (one_rank, two_ranks, four_ranks):
        compare_all("sinks grpo", one_rank, results)
        found = {name: result["grads"] for name, result in results.items() if name.startswith("sinks grpo ")}
        for layout, grads in ((name, grads) for name, grads in found.items() if grads):
            for name, grad in sinks.items():  # which are small: to be right they must be so in their own size
                worst, size = np.abs(grads[name] - grad).max(), np.abs(grad).max()
                assert size > 1e-6 and worst < 1e-3 * size, f"{layout}: {name} of {size} differs by {worst}"


def test_windows_of_128_over_split_sequences(long_sinks_model):
    """Sequences of more than three windows: a context-parallel rank's parts of one end inside of others' windows."""
    two = ("cp2", "cp2_all_gather", "tp2_sp")
    budget = {"batch": {"tokens_per_micro_batch": 1024, "updates_per_step": 2}}
    configs = {name: SINKS_TWO_RANKS[name] | ALGORITHMS["grpo"] | budget for name in two}
    one = {"reference": ALGORITHMS["grpo"] | budget}

    def attempt(seed: int):
        samples = make_samples(seed, 3, 64, lengths=(385, 450))
        return samples, run(long_sinks_model, samples, 1, one, refuse_ties=True)["reference"]

    samples, reference = without_ties(attempt)
    for name, result in run(long_sinks_model, samples, 2, configs).items():
        compare(name, reference, result)


def test_a_single_update_is_on_policy_with_sinks(one_rank):
    """The ratio is 1 and nothing is clipped, exactly."""
    metrics = one_rank["sinks on_policy reference"]["metrics"]
    assert (metrics["loss/ratio"], metrics["loss/clip_fraction"], metrics["loss/old_kl"]) == (1.0, 0.0, 0.0)


def test_stein_transform_over_split_experts(one_rank, two_ranks, four_ranks):
    """Experts over expert-parallel ranks, in slices over expert-tensor-parallel ones, copied over data-parallel ones."""
    figures = one_rank["vp2o reference"]["vp2o"]
    assert 0.1 < figures["vp2o/repulsion"] / figures["vp2o/attraction"] < 10, (
        "one part of the transform hides the other"
    )
    assert figures["vp2o/shift"] > 1e-3
    plain, transformed = (one_rank[f"{name} reference"]["grads"] for name in ("grpo", "vp2o"))
    for tensor in plain:
        changed = np.abs(plain[tensor] - transformed[tensor]).max()
        assert changed > 1e-5 or ".experts." not in tensor, f"{tensor} was not transformed"
    for results in (one_rank, two_ranks, four_ranks):
        compare_all("vp2o", one_rank, results)


def test_sequence_ratios_over_split_sequences(one_rank, two_ranks):
    """GSPO needs sums over whole sequences, which context parallelism and the head's chunks cut."""
    compare_all("gspo", one_rank, one_rank)
    compare_all("gspo", one_rank, two_ranks)


def test_pruned_tokens_in_the_heads_chunks(one_rank):
    """Token by token the loss is computed inside the head, with log-probs of -inf."""
    whole = one_rank["pruned reference"]
    outside = np.mean([value == -np.inf for value in whole["log_probs"].values()])
    assert 0.01 < outside < 0.5, f"{outside:.2f} of the tokens outside the safe set"
    compare_all("pruned", one_rank, one_rank)


def test_corrected_and_pruned_over_split_sequences_and_vocabularies(one_rank, two_ranks):
    """Sequence ratios and the veto over context-parallel ranks, safe and kept sets over tensor-parallel ones."""
    figures = one_rank["corrected reference"]["mismatch"]
    shares = {key: figures[f"corrected/{key}"] for key in ("vetoed", "rejected", "bounded")}
    assert all(0.01 < share < 0.9 for share in shares.values()), f"{shares}: not every part has something to do"
    compare_all("corrected", one_rank, one_rank)
    compare_all("corrected", one_rank, two_ranks)


def test_normalized_weights_of_a_single_update(one_rank, two_ranks):
    """By their mean, which the ranks learn from each other before the update."""
    normalized, weighted = one_rank["normalized reference"], one_rank["weighted reference"]
    mean = weighted["mismatch"]["corrected/weight_mean"]
    assert mean > 1.1
    expected = weighted["metrics"]["update/grad_norm"] / mean
    assert normalized["metrics"]["update/grad_norm"] == pytest.approx(expected, rel=1e-4)
    compare_all("normalized", one_rank, one_rank)
    compare_all("normalized", one_rank, two_ranks)


def test_what_is_dropped_leaves_the_mean(model, one_rank, two_ranks):
    """Each layout divides by the same count of sequences and of their tokens that are kept; where none is, nothing moves."""
    kept = one_rank["kept reference"]
    figures = kept["mismatch"]
    assert 0.05 < figures["corrected/vetoed"] < figures["corrected/masked"] < 0.9
    assert 0.1 < kept["metrics"]["loss/counted"] < 0.95
    assert figures["mismatch/kl_safe"] != figures["mismatch/kl"], "no token outside the set that is measured"
    for results in (one_rank, two_ranks):
        compare_all("kept", one_rank, results)
        for name, result in results.items():
            if name.startswith("kept "):
                assert result["metrics"]["loss/counted"] == pytest.approx(kept["metrics"]["loss/counted"], rel=1e-5), (
                    name
                )
    nothing, before = one_rank["rejected reference"], load_file(Path(model) / "model.safetensors")
    assert (nothing["metrics"]["update/skipped"], nothing["metrics"]["loss/counted"]) == (1, 0)
    assert all(np.array_equal(weight, before[tensor]) for tensor, weight in nothing["weights"].items())


def test_a_second_epoch_and_a_constant_divisor(one_rank, two_ranks, samples):
    """SAPO's gate of ratios to old log-probs that stay; the divisor is the sequences x rollout.max_new_tokens."""
    reference = one_rank["epochs reference"]
    assert reference["metrics"]["loss/ratio"] != 1.0
    sequences = sum(sample["loss_mask"].any() for sample in samples)
    expected = sequences * 26 / reference["tokens"]
    assert reference["metrics"]["loss/counted"] == pytest.approx(expected, rel=1e-6)
    for results in (one_rank, two_ranks):
        compare_all("epochs", one_rank, results)
        for name, result in results.items():
            if name.startswith("epochs "):
                counted = reference["metrics"]["loss/counted"]
                assert result["metrics"]["loss/counted"] == pytest.approx(counted, rel=1e-6), name


def test_frozen_weights(model, one_rank, two_ranks):
    """They stay as they are to the bit, all others move as in one process; a stage may have nothing but frozen ones."""
    before = load_file(Path(model) / "model.safetensors")
    plain, reference = (one_rank[f"{name} reference"] for name in ("grpo", "frozen"))
    for results in (one_rank, two_ranks):
        compare_all("frozen", one_rank, results)
        for name, result in results.items():
            for tensor, weight in result["weights"].items() if name.startswith("frozen ") else ():
                assert np.array_equal(weight, before[tensor]) == bool(FROZEN.match(tensor)), f"{name}: {tensor}"
    for tensor, grad in plain["grads"].items():  # of the first update
        expected = np.zeros_like(grad) if FROZEN.match(tensor) else grad
        assert np.abs(reference["grads"][tensor] - expected).max() < 1e-6, tensor
