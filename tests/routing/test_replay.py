"""Replay is exact: under the parallel layouts below, with recomputation and packing, and for every family of routers.

Random routes, another one for each token and layer, are replayed, so that any wrong slice changes the log-probs. Layouts
are tried with Qwen3-MoE, and with DeepSeek-V3, which has a dense layer, groups, sigmoid scores and an expert bias.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from covering import pairwise, parallel_of
from ranks import fresh_seed, run_ranks
from replays import make_samples, shape_of

from megatron_rl.models.parallel_check import read_hf_config

SOURCES = ("r3", "r2", "pr2", "gated r3")
"""The last one replays the engine's gates too, and gives up the least likely experts."""
ONE_RANK = {
    "reference": {},
    "full_recompute": {"model": {"recompute": "full"}},
    "selective_recompute": {"model": {"recompute": "selective"}},
    "one_sequence_per_micro_batch": {"batch": {"tokens_per_micro_batch": 39}},
}
TWO_RANKS = {
    name: {"parallel": parallel_of(name)}
    for name in ("tp2_sp", "ep2", "pp2", "pp2_interleaved", "cp2", "cp2_all_gather")
}
TWO_RANKS["pp2_recompute"] = {**TWO_RANKS["pp2"], "model": {"recompute": "full"}}
FOUR_RANKS = {name: {"parallel": parallel_of(name)} for name in ("tp2_cp2", "tp2_pp2")}
DEEPSEEK = ("tp2_sp", "ep2", "pp2", "cp2")
PAIRS = pairwise(
    SOURCES,
    TWO_RANKS,
    ("qwen3_moe", "deepseek"),
    allowed=lambda _, layout, model: model != "deepseek" or layout in DEEPSEEK,
)
FAMILIES = ("olmoe", "mixtral", "gpt_oss", "deepseek_v3")
"""Besides Qwen3-MoE: softmax before the top-k, after it, a bias of the router, sigmoid scores with groups and bias."""


def samples_of(model: str, count: int = 12):
    seed = fresh_seed()
    config = read_hf_config(model)
    return make_samples(seed, count, 64, shape_of(config))


def run(
    cases: dict[str, tuple[str, list, dict]], world_size: int, sources: dict[str, list[str]] | None = None
) -> dict[tuple[str, str], dict]:
    """cases: name -> (model, samples, layout); results by name and source. sources: by name, by default all."""
    replayed = [(*case, sources[name] if sources else [*SOURCES]) for name, case in cases.items()]
    results = run_ranks(world_size, "replays:replays", (replayed,), timeout=280.0)[0]
    return {
        (name, source): result
        for name, by_source in zip(cases, results, strict=True)
        for source, result in by_source.items()
    }


@pytest.fixture(scope="module")
def model(tiny_model) -> str:
    return str(tiny_model("qwen3_moe", "--layers", "4"))


@pytest.fixture(scope="module")
def samples(model):
    return samples_of(model)


@pytest.fixture(scope="module")
def deepseek(tiny_model) -> tuple[str, list]:
    model = str(tiny_model("deepseek_v3", "--layers", "4"))
    return model, samples_of(model)


@pytest.fixture(scope="module")
def reference(model, samples, deepseek):
    cases = {name: (model, samples, layout) for name, layout in ONE_RANK.items()}
    return run(cases | {"deepseek": (*deepseek, {})}, 1)


def predictors_of(result: dict) -> dict[int, np.ndarray]:
    merged: dict[int, np.ndarray] = {}
    for part in result.get("predictors", []):
        for layer, weight in part.items():
            assert np.array_equal(merged.setdefault(layer, weight), weight), f"layer {layer} differs between ranks"
    return merged


def tokens_of(sums: dict[str, float]) -> dict[str, float]:
    """Tokens that were counted, by what was counted of them: the slots in which their experts differ add up to all."""
    tokens: dict[str, float] = {}
    for key, value in sums.items():
        kind, last = key.rsplit("/", 1)
        if last.isdigit() or last == "tokens":
            name = kind if last.isdigit() else key
            tokens[name] = tokens.get(name, 0.0) + value
    return tokens


def compare(name: str, source: str, reference: dict, result: dict) -> None:
    where = f"{name}, {source}"
    assert result["compared"] > 0
    # Pr2 weights its experts by the prediction where it records, and by the router where it replays.
    assert result["identical"] == (source != "pr2"), f"{where}: replayed log-probs are not those of the recording"
    assert result["log_probs"].keys() == reference["log_probs"].keys()
    worst: dict[int, float] = {}
    for (sample, position), value in reference["log_probs"].items():
        apart = abs(result["log_probs"][sample, position] - value)
        worst[sample] = max(worst.get(sample, 0.0), apart)
    # A wrong slice moves all sequences by 1e-3 and more. Where routers choose, two experts that tie but for rounding may turn
    # over, which moves the sequence of that token.
    far = {sample: apart for sample, apart in worst.items() if apart >= 3e-5}
    assert len(far) <= (source != "r3"), f"{where}: log-probs differ from one process's in sequences {far}"
    assert result["without_route"] == reference["without_route"]
    for ours, theirs in zip(result["sums"], reference["sums"], strict=True):
        assert ours.keys() == theirs.keys(), where
        assert tokens_of(ours) == tokens_of(theirs), where
        for key, value in theirs.items():
            # Two experts that tie but for rounding move a token from one count to the next; a wrong slice moves hundreds. So
            # does one next to the threshold.
            last = key.rsplit("/", 1)[1]
            tolerance = 2.0 if last.isdigit() or last == "given_up" else 1e-3 * max(1.0, abs(value))
            assert abs(ours[key] - value) <= tolerance, f"{where}: {key} is {ours[key]}, one process has {value}"
    assert result["exported"].keys() == reference["exported"].keys()
    for key, value in reference["exported"].items():
        assert np.array_equal(result["exported"][key], value), f"{where}: a push would send another {key}"
    ours, theirs = predictors_of(result), predictors_of(reference)
    assert ours.keys() == theirs.keys()
    for layer, weight in theirs.items():
        off = np.abs(ours[layer] - weight).mean()
        assert off < 2e-5, f"{where}: predictor of layer {layer} differs by {off} on average after learning"


def test_recompute_and_packing(reference):
    for name in ONE_RANK:
        for source in SOURCES:
            compare(name, source, reference["reference", source], reference[name, source])


def check_two_ranks(model, samples, deepseek, reference, rows: list[tuple[str, str, str]]) -> None:
    cases, sources = {}, {}
    for source, layout, family in rows:
        name = f"{family} {layout}"
        cases[name] = (*(deepseek if family == "deepseek" else (model, samples)), TWO_RANKS[layout])
        sources.setdefault(name, []).append(source)
    for (name, source), result in run(cases, 2, sources).items():
        compare(name, source, reference["deepseek" if "deepseek" in name else "reference", source], result)


def test_two_ranks(model, samples, deepseek, reference):
    check_two_ranks(model, samples, deepseek, reference, PAIRS)


@pytest.mark.long
def test_two_ranks_in_the_rest_of_the_product(model, samples, deepseek, reference):
    rest = [(source, layout, "qwen3_moe") for source in SOURCES for layout in TWO_RANKS]
    rest += [(source, layout, "deepseek") for source in SOURCES for layout in DEEPSEEK]
    check_two_ranks(model, samples, deepseek, reference, [row for row in rest if row not in PAIRS])


def test_four_ranks(model, samples, reference):
    cases = {name: (model, samples, layout) for name, layout in FOUR_RANKS.items()}
    for (name, source), result in run(cases, 4, {name: ["r3", "pr2"] for name in cases}).items():
        compare(name, source, reference["reference", source], result)


def test_what_is_pushed_for_predictors_is_what_routes(model, reference):
    """By the names under which the served model has them (`megatron_rl_models`)."""
    exported = reference["reference", "r3"]["exported"]
    assert list(exported) == [f"model.layers.{layer}.mlp.gate.predictor.weight" for layer in range(4)]
    for layer, weight in enumerate(exported.values()):
        planted = 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(layer))
        assert np.array_equal(weight, planted.numpy())


def test_the_measured_sums_are_those_of_the_tokens(samples, reference):
    """Random routes agree with a router by chance alone, recorded ones fully; every counted token is counted once."""
    counted = sum(int(s["loss_mask"].sum()) for s in samples)
    rollout, recorded = (reference["reference", source]["sums"] for source in ("r3", "r2"))
    for layer in range(4):
        assert recorded[0][f"routing/layer_{layer:02}/agreement/0"] == counted
        assert recorded[0][f"routing/layer_{layer:02}/kl"] == 0.0
        tokens = [rollout[0][f"routing/layer_{layer:02}/agreement/{slot}"] for slot in range(3)]
        have = sum(int((s["loss_mask"] & (s.routes[s.prompt_length - 1 :, 0, 0] != 255)).sum()) for s in samples)
        assert sum(tokens) == have < counted
        assert tokens[0] < 0.2 * have  # 1 in 28 by chance, with two of eight experts
        cached = sum(min(9, int(s["loss_mask"].sum())) for s in samples)
        assert recorded[0][f"routing/layer_{layer:02}/kl/tokens"] == cached
    missing = sum(int((s.routes[:, 0, 0] == 255).sum()) for s in samples)
    assert reference["reference", "r3"]["without_route"] == missing > 0


def check_weights(family: str, config, logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Weights of replayed experts: the current scores over the replayed set, by each family's own formula in fp64."""
    logits = logits.double()
    if family == "gpt_oss":
        expected = logits.gather(1, ids).softmax(-1)
    elif family == "deepseek_v3":
        scores = logits.sigmoid().gather(1, ids)  # its expert bias chooses and does not weight
        expected = config.routed_scaling_factor * scores / scores.sum(-1, keepdim=True)
    else:
        scores = logits.softmax(-1).gather(1, ids)
        renormalized = family == "mixtral" or config.norm_topk_prob
        expected = scores / scores.sum(-1, keepdim=True) if renormalized else scores
    assert (weights != 0).sum() == ids.numel()
    torch.testing.assert_close(weights.gather(1, ids).double(), expected, rtol=1e-5, atol=1e-7, msg=family)


def test_families(tiny_model):
    cases = {}
    for family in FAMILIES:
        model = str(tiny_model(family))
        samples = samples_of(model, 6)
        cases[family] = (model, samples, {})
        cases[f"{family} recomputed"] = (model, samples, {"model": {"recompute": "full"}})
    results = run(cases, 1)
    for (name, source), result in results.items():
        compare(name, source, results[name.removesuffix(" recomputed"), source], result)
    for family in FAMILIES:
        random, *others = (results[family, source]["log_probs"] for source in SOURCES)
        check_weights(family, read_hf_config(cases[family][0]), **results[family, "r3"]["weights"])
        for other in others:
            moved = np.mean([abs(random[key] - other[key]) for key in random])
            assert moved > 1e-5, f"{family}: random routes change log-probs by {moved}"


def test_gates_move_log_probs_and_some_experts_are_given_up(reference):
    plain, gated = (reference["reference", source] for source in ("r3", "gated r3"))
    moved = np.mean([abs(value - gated["log_probs"][key]) for key, value in plain["log_probs"].items()])
    assert moved > 1e-5, f"gates of 0 to 1 each change log-probs by {moved}"
    for layer in range(4):
        name = f"routing/layer_{layer:02}/given_up"
        assert 0 < gated["sums"][0][name] < gated["sums"][0][f"{name}/tokens"]
        assert name not in plain["sums"][0]
