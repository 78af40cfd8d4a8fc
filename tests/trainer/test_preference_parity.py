"""Reward models and DPO on every parallel layout against one process, in fp32: loss, every gradient, and weights at the end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from preference_ranks import DPO, REWARD
from ranks import run_ranks, without_ties
from test_parity import EPS, TWO_RANKS
from weights import classifier

pytestmark = pytest.mark.timeout(900)  # a fixture runs all layouts


LAYOUTS = {
    name: TWO_RANKS[name] for name in ("tp2_sp", "pp2", "pp2_interleaved", "ep2", "cp2", "dp2_distributed_optimizer")
}
FOUR = {"tp2_cp2": {"parallel": {"tensor": 2, "context": 2}}, "pp2_ep2": {"parallel": {"pipeline": 2, "expert": 2}}}
ONE = {"reference": {}, "large_micro_batches": {"batch": {"tokens_per_micro_batch": 4096}}}


@pytest.fixture(scope="module")
def found(tiny_model, tmp_path_factory):
    models = [str(tiny_model("qwen3_moe", "--layers", "4", *more)) for more in ((), ("--seed", "1"))]
    # With a head from the start: behind one of zeros nothing else has a gradient.
    head = int(np.random.SeedSequence().entropy % 2**31)
    print(f"head of seed {head}")
    models.append(str(classifier(Path(models[0]), tmp_path_factory.mktemp("models") / "classifier", head)))

    def run(seed: int, world_size: int, layouts: dict[str, dict]) -> dict[str, dict]:
        arguments = (models, [{"optimizer": {"eps": EPS}, **layout} for layout in layouts.values()], seed)
        alone = world_size == 1
        ranks = run_ranks(world_size, "preference_ranks:run_layouts", arguments, timeout=540.0, refuse_ties=alone)
        return dict(zip(layouts, ranks[0], strict=True))

    seed, results = without_ties(lambda seed: (seed, run(seed, 1, ONE)))
    return results | run(seed, 2, LAYOUTS) | run(seed, 4, FOUR)


@pytest.mark.parametrize("loss", [*REWARD, *DPO])
def test_a_loss_and_its_gradients_are_those_of_one_process(found, loss):
    reference = found["reference"][loss]
    assert reference["micro_batches"] > 1 and found["large_micro_batches"][loss]["micro_batches"] == 1
    assert max(np.abs(g).max() for g in reference["grads"].values()) > 1e-3, "gradients too small to compare"
    for layout, results in found.items():
        result = results[loss]
        assert result["metrics"].keys() == reference["metrics"].keys()
        for name, theirs in reference["metrics"].items():
            # Of 60 steps: where rounding turns two around, or moves one to the next bin, these jump by 0.002 and 0.03.
            rough = {"preference/auc": 0.01, "preference/calibration_error": 0.07} if loss == "cross_entropy" else {}
            near = pytest.approx(theirs, rel=1e-5, abs=rough.get(name, 1e-5))
            assert result["metrics"][name] == near, f"{layout}: {name} is {result['metrics'][name]}, not {theirs}"
        assert result["norm"] == pytest.approx(reference["norm"], rel=1e-5)
        assert result["grads"].keys() == reference["grads"].keys()
        for tensor, grad in reference["grads"].items():
            worst = np.abs(result["grads"][tensor] - grad).max()
            assert worst < 1e-5, f"{layout}: gradient of {tensor} differs by {worst}"


@pytest.mark.parametrize("weights", ["reward weights", "policy weights"])
def test_weights_after_all_updates_are_those_of_one_process(found, weights):
    for layout, results in found.items():
        for tensor, theirs in found["reference"][weights].items():
            worst = np.abs(results[weights][tensor] - theirs).max()
            assert worst < 1e-5, f"{layout}: {tensor} differs by {worst}"
