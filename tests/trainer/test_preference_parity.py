"""Reward models and DPO on every parallel layout against one process, in fp32: loss, every gradient, and weights at the end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from covering import SPLITS, layers_of, parallel_of
from preference_ranks import DPO, REWARD
from ranks import fresh_seed, run_ranks, without_ties
from weights import classifier

pytestmark = pytest.mark.timeout(900)  # a fixture runs all layouts


EPS = 1e-3
"""As in test_parity.py: steps of Adam differ by what gradients do."""
KINDS = {"reward": [*REWARD], "policy": [*DPO]}
SHORT = [(SPLITS[split][0], "reward") for split in ("TP", "PP", "CP")]
SHORT += [(SPLITS[split][0], "policy") for split in ("TP", "VPP", "EP", "DP")]
REST = [(layouts[0], kind) for layouts in SPLITS.values() for kind in KINDS if (layouts[0], kind) not in SHORT]
FOUR = [("tp2_cp2", "reward"), ("pp2_ep2", "policy")]
ON_RANKS = [(2, SHORT), (2, REST), (4, FOUR)]
"""Numbers of processes, and what runs on them. The short suite has the first row alone: a score is pooled, a vocabulary is
split, a stage is chosen, pairs are shared."""
LARGE = [("large_micro_batches", kind) for kind in KINDS]
COMPARED = [*SHORT, *REST, *FOUR, *LARGE]


class Found(dict):
    """(layout, kind, layers of its model) -> what its first rank found; of one process by the layout "reference". Those of a
    row of ON_RANKS run together, when one of them is asked for."""

    def __init__(self, models: dict[int, list[str]]) -> None:
        super().__init__()
        self._models = models
        references = [("reference", kind, layers) for layers in (2, 4) for kind in KINDS]
        self._seed, results = without_ties(
            lambda seed: (seed, self._run(seed, 1, [*references, *map(of_model, LARGE)], refuse_ties=True))
        )
        self |= results

    def __missing__(self, run: tuple[str, str, int]) -> dict:
        world_size, runs = next((size, runs) for size, runs in ON_RANKS if run[:2] in runs)
        self |= self._run(self._seed, world_size, [*map(of_model, runs)])
        return self[run]

    def _run(self, seed: int, world_size: int, runs: list[tuple[str, str, int]], **options: bool) -> dict:
        arguments = []
        for layout, kind, layers in runs:
            overrides = {"parallel": parallel_of(layout)} if world_size > 1 else {}
            if layout == "large_micro_batches":
                overrides = {"batch": {"tokens_per_micro_batch": 4096}}
            arguments.append((kind == "reward", *self._models[layers], {"optimizer": {"eps": EPS}, **overrides}))
        ranks = run_ranks(world_size, "preference_ranks:run_layouts", (arguments, seed), timeout=540.0, **options)
        return dict(zip(runs, ranks[0], strict=True))


def of_model(run: tuple[str, str]) -> tuple[str, str, int]:
    return (*run, layers_of(run[0]))


@pytest.fixture(scope="module")
def found(tiny_model, tmp_path_factory):
    # With a head from the start: behind one of zeros nothing else has a gradient.
    head = fresh_seed()
    models = {}
    for layers in (2, 4):
        both = [str(tiny_model("qwen3_moe", "--layers", str(layers), *more)) for more in ((), ("--seed", "1"))]
        out = tmp_path_factory.mktemp("models") / "classifier"
        models[layers] = [*both, str(classifier(Path(both[0]), out, head))]
    return Found(models)


def marked(runs: list[tuple[str, str]]) -> list:
    """Layouts, and a kind or a loss, as parameters of a test."""
    kinds = {loss: kind for kind, losses in KINDS.items() for loss in (kind, *losses)}
    long = {*REST, *FOUR}
    return [
        pytest.param(*run, id="-".join(run), marks=[pytest.mark.long] * ((run[0], kinds[run[1]]) in long))
        for run in runs
    ]


@pytest.mark.parametrize(
    ("layout", "loss"), marked([(layout, loss) for layout, kind in COMPARED for loss in KINDS[kind]])
)
def test_a_loss_and_its_gradients_are_those_of_one_process(found, layout, loss):
    kind, layers = "reward" if loss in REWARD else "policy", layers_of(layout)
    reference, result = found["reference", kind, layers][loss], found[layout, kind, layers][loss]
    assert reference["micro_batches"] > 1 and (layout != "large_micro_batches" or result["micro_batches"] == 1)
    assert max(np.abs(g).max() for g in reference["grads"].values()) > 1e-3, "gradients too small to compare"
    assert result["metrics"].keys() == reference["metrics"].keys()
    for name, theirs in reference["metrics"].items():
        # Of 60 steps: where rounding turns two around, or moves one to the next bin, these jump by 0.002 and 0.03.
        rough = {"preference/auc": 0.01, "preference/calibration_error": 0.07} if loss == "cross_entropy" else {}
        near = pytest.approx(theirs, rel=1e-5, abs=rough.get(name, 1e-5))
        assert result["metrics"][name] == near, f"{name} is {result['metrics'][name]}, not {theirs}"
    assert result["norm"] == pytest.approx(reference["norm"], rel=1e-5)
    assert result["grads"].keys() == reference["grads"].keys()
    for tensor, grad in reference["grads"].items():
        worst = np.abs(result["grads"][tensor] - grad).max()
        assert worst < 1e-5, f"gradient of {tensor} differs by {worst}"


@pytest.mark.parametrize(("layout", "kind"), marked(COMPARED))
def test_weights_after_all_updates_are_those_of_one_process(found, layout, kind):
    for tensor, theirs in found["reference", kind, layers_of(layout)]["weights"].items():
        worst = np.abs(found[layout, kind, layers_of(layout)]["weights"][tensor] - theirs).max()
        assert worst < 1e-5, f"{tensor} differs by {worst}"
