"""Predictors in the real trainer: they learn a drift, touch nothing else, and survive a checkpoint."""

from __future__ import annotations

import statistics

import learning
import numpy as np
import pytest
from ranks import run_ranks


@pytest.fixture(scope="module")
def model(tiny_model) -> str:
    return str(tiny_model("qwen3_moe", "--layers", "2"))


@pytest.fixture(scope="module")
def found(model, tmp_path_factory) -> dict:
    seed = int(np.random.SeedSequence().entropy % 2**31)
    print(f"seed {seed}")
    folder = tmp_path_factory.mktemp("checkpoints")
    return run_ranks(1, "learning:everything", (model, seed, str(folder)))[0]


def test_predictors_learn_a_drift_that_goes_on(found):
    """Routers that move the same way with every update: Pr2's routes stay near them, those of R2 are left behind.

    With eight updates the best constant bias lies in their middle: experts are lost over distances of 2 updates on
    average instead of 3.5, and KL, their square, is 5.5 instead of 17.5.
    """

    def late(name: str, metric: str) -> float:
        return statistics.fmean(line[f"routing/{metric}"] for line in found["drift"][name][-4:])

    for learned in ("kl", "delta"):
        lost, kept = 1 - late("r2", "agreement"), 1 - late(learned, "agreement")
        assert kept < 0.92 * lost, f"experts that differ: {kept:.4f} with predictors, {lost:.4f} without"
        lost, kept = (1 - late(name, "update_8/agreement") for name in ("r2", learned))
        assert kept < 0.7 * lost, f"at the last update: {kept:.4f} with predictors, {lost:.4f} without"
        assert late(learned, "kl") < 0.6 * late("r2", "kl")
        assert late(learned, "kl") < 0.6 * late(learned, "kl_unpredicted")
        assert 1 - late(learned, "agreement_unpredicted") > (1 - late(learned, "agreement")) / 0.92
        assert late(learned, "staleness") < 0.8 * late("r2", "staleness")
    # As shipped a predictor reaches no further than one update, of which 11.5 instead of 17.5 would be left.
    left = {name: f"{late(name, 'kl') / late(name, 'kl_unpredicted'):.2f}" for name in ("shipped", "kl", "delta")}
    print(f"route KL as a share of what it were without predictors: {left}")
    assert late("shipped", "kl") < 0.85 * late("shipped", "kl_unpredicted")
    assert late("shipped", "agreement") > late("shipped", "agreement_unpredicted")
    for name in ("r2", "kl"):
        assert found["drift"][name][0]["routing/update_1/agreement"] == 1.0


def test_with_a_zero_predictor_pr2_is_r2_bit_for_bit(found):
    """All four updates of a rollout batch recorded by zero predictors, which learn meanwhile and disturb nothing."""
    recorded, predicted = found["trained"]["r2"], found["trained"]["pr2"]
    for ours, theirs in zip(predicted["log_probs"], recorded["log_probs"], strict=True):
        assert np.array_equal(ours, theirs)
    of_predictors = ("/kl_unpredicted", "/agreement_unpredicted", "/predictors_skipped")
    same = [{k: v for k, v in sums.items() if not any(n in k for n in of_predictors)} for sums in predicted["sums"]]
    assert same == recorded["sums"]
    for sums in predicted["sums"]:  # what would have been chosen without predictors is what was chosen
        for key, count in sums.items():
            if "/agreement_unpredicted/" in key:
                assert count == sums[key.replace("agreement_unpredicted", "agreement")], key
    assert predicted["weights"].keys() == recorded["weights"].keys(), "a predictor is no part of the exported policy"
    for name, weight in recorded["weights"].items():
        assert np.array_equal(predicted["weights"][name], weight), name
    assert all(np.abs(weight).max() > 1e-4 for weight in predicted["predictors"].values()), "they have not learned"
    assert not recorded["predictors"]


def test_a_predictor_forgets_and_never_steps_on_nothing(found):
    steps = found["steps"]
    for name in ("infinite", "nothing"):
        done, after = steps[name]
        assert not done and all(np.array_equal(after[layer], weight) for layer, weight in steps["before"].items())
    done, after = steps["zero"]
    for layer, weight in steps["before"].items():
        np.testing.assert_allclose(after[layer], (1 - 0.15) * weight, rtol=1e-5)
    assert done


def test_gradients_of_a_replayed_pass(found):
    gradients = found["gradients"]
    for layer, norms in gradients["router"].items():
        replayed = learning.EXPERTS[layer]
        others = set(range(8)) - set(replayed)
        assert min(norms[e] for e in replayed) > 1e-6, "no gradient at the router scores of the replayed experts"
        assert max(norms[e] for e in others) == 0.0, "softmax over the top-k: no other expert has any"
    assert gradients["predictor_grads"] == [None, None] and not gradients["predictors_moved"]
    assert gradients["in_optimizer"] == 0


def test_checkpoints_have_the_predictors(model, found):
    run = found["checkpoint"]
    for layer, weight in run["saved"].items():
        assert np.array_equal(run["loaded"][layer], weight) and weight.any()
        assert np.array_equal(run["straight"][0][layer], run["resumed"][0][layer])
        assert not np.array_equal(run["straight"][0][layer], weight)
    for name, weight in run["straight"][1].items():
        assert np.array_equal(weight, run["resumed"][1][name]), name
    assert not any(weight.any() for weight in run["weights_alone"].values()), "another run's predictors"
    assert all(np.array_equal(weight, run["saved"][layer]) for layer, weight in run["weights_and_predictors"].items())
    saved, loaded, predictors = run["changed"]
    assert all(np.array_equal(saved[name], loaded[name]) for name in saved)
    assert predictors and not any(weight.any() for weight in predictors.values())
    layouts = [{"parallel": {"pipeline": 2}}, {"parallel": {"tensor": 2}}]
    for elsewhere in run_ranks(2, "learning:load_under", (model, run["path"], layouts))[0]:
        assert elsewhere["updates"] == (4, 4)
        for part, moments in zip(elsewhere["predictors"], elsewhere["moments"], strict=True):
            assert part.keys() == moments.keys() and part
            for layer, weight in part.items():
                assert np.array_equal(run["saved"][layer], weight) and moments[layer].any()
