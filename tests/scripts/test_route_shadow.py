"""The offline part of route_shadow.py, on routers whose drift is made up here; and its recorder, as a hook of a run."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_rl.config.load import build_config
from megatron_rl.errors import UserError
from megatron_rl.hooks.routing_replay import RoutingReplay
from megatron_rl.metrics.logger import METRICS_FILE
from megatron_rl.routing.table import RouteShape, RouteTable
from megatron_rl.trainer.hooks import Stage, Step, UpdateContext

LAYER, EXPERTS, HIDDEN, TOPK, UPDATES, TOKENS = 1, 6, 5, 2, 4, 240
SMALL = 3e-3
"""Drift of a logit in one update: KL is then quadratic in it, but for a share of this order."""


@pytest.fixture
def small(ablation, monkeypatch):
    monkeypatch.setattr(ablation, "UPDATES", UPDATES)
    monkeypatch.setattr(ablation, "TOPK", TOPK)
    forms = [
        ablation.Form(horizon, 0.0, multiplier) for horizon in ("constant", "scaled") for multiplier in (0.2, 1e-9)
    ]
    monkeypatch.setattr(ablation, "FORMS", forms)
    return ablation


def record(small, folder, signs: list[int]) -> None:
    """A run whose router goes one direction in each update of a rollout batch, forth or back, as its recorder keeps it.

    Its passes are made of what the trainer's hooks have at the routers.
    """
    from route_recorder import RouteRecorder

    settings = {"name": folder.name, "runs_dir": str(folder.parent), "routing": {"source": "r2"}}
    recorder = RouteRecorder(build_config(settings | {"batch": {"updates_per_step": UPDATES}}))
    weight, direction = torch.randn(EXPERTS, HIDDEN), SMALL * torch.randn(EXPERTS, HIDDEN)
    recorder.weights = {LAYER: weight}
    router, routes = SimpleNamespace(score_function="softmax"), RoutingReplay("r2")

    def look(stage: Stage, update: int, table: RouteTable, hidden: Tensor) -> None:
        recorder.before_forward([SimpleNamespace(routes=table)], stage, UpdateContext(update))
        logits = hidden @ weight.T
        for hook in (routes, recorder):
            for observer in hook.observers(table, stage, UpdateContext(update)):
                logits = observer.see_logits(LAYER, hidden, logits, router)

    for sign in signs:
        every = torch.ones(TOKENS, dtype=torch.bool)
        tables = [RouteTable(RouteShape((LAYER,), EXPERTS, TOPK), every, torch.arange(TOKENS)) for _ in range(UPDATES)]
        seen = [(update, table, torch.randn(TOKENS, HIDDEN).half().float()) for update, table in enumerate(tables)]
        for mini_batch in seen:
            look("log_probs", *mini_batch)
        for mini_batch in seen:
            look("update", *mini_batch)
            recorder.after_step(Step(True, 1.0, SMALL))
            weight += sign * direction


def figures_of(small, folder, signs: list[int]) -> tuple[dict, dict]:
    record(small, folder, signs)
    [(layer, found)] = small.shadow(folder / "routes").items()
    assert layer == LAYER
    return small.figures(found), small.cosines(found)


def test_drift_that_goes_on_is_predicted_by_what_came_before(small, tmp_path):
    seed = torch.seed()
    found, cosines = figures_of(small, tmp_path / "run", [1] * 5)
    message = f"seed {seed}: {found}"
    assert found["R2"] == {"all": 1, "first": 0, "later": 1, "last": 1, "gain": 0} | {
        k: found["R2"][k] for k in ("agreement", "agreement_last")
    }
    for name in (
        "least squares, the same batch's other half, scaled",
        "least squares, the batch before, scaled",
        "least squares, the router's own change over the batch before, scaled",
    ):
        assert found[name]["all"] < 0.01 and found[name]["gain"] >= 0, message
    # Half of a drift leaves a quarter of the KL; a constant bias, fitted to the updates 1 to 3 with 1 / 4 / 9 of the KL, has a
    # bias of two updates: 4 / 14 of it in the first, and 1 + 0 + 1 of it later.
    assert found["least squares, the batch before, scaled, half of it"]["all"] == pytest.approx(0.25, abs=0.02), message
    # Its fit is over half of the tokens: standard deviations of 5 % and 3 % with 240, so that rel=0.5 is ten and more of them.
    constant = found["least squares, the same batch's other half, constant"]
    assert constant["first"] == pytest.approx(4 / 14, rel=0.5) and constant["later"] == pytest.approx(2 / 14, rel=0.5)
    assert all(value == pytest.approx(1, abs=0.02) for pair in cosines.values() for value in pair), (message, cosines)
    for form in small.FORMS:  # those that hardly learn leave all; the others some of it
        left = found[form.name]["all"]
        assert (left == pytest.approx(1, abs=0.01)) if form.multiplier < 1e-6 else left < 0.9, (message, form.name)
    assert found["scaled, decay 0, multiplier 0.2"]["first"] == 0.0


def test_drift_that_turns_round_is_not(small, tmp_path):
    """What the batch before did is the opposite: twice the distance, four times the KL."""
    seed = torch.seed()
    found, cosines = figures_of(small, tmp_path / "run", [1, -1, 1, -1, 1])
    message = f"seed {seed}: {found} {cosines}"
    assert found["least squares, the batch before, scaled"]["all"] == pytest.approx(4, abs=0.1), message
    assert found["least squares, the same batch's other half, scaled"]["all"] < 0.01, message
    assert cosines["fits"] == pytest.approx([-1, -1], abs=0.02) and cosines["routers"] == pytest.approx(
        [-1, -1], abs=0.02
    )
    assert cosines["fit and router"] == pytest.approx([1, 1], abs=0.02), message


def test_results_are_of_the_runs_that_are_done(small, tmp_path, capsys):
    root = tmp_path / "runs"
    for seed in (0, 1):
        record(small, root / f"seed{seed}", [1] * 5)
        lines = [{"step": step, "eval/score": 0.5} for step in range(6 - seed)]
        (root / f"seed{seed}" / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    small.write_results(root, tmp_path / "out", 5, {"seed0": 3.0})
    found = json.loads((tmp_path / "out" / "route-shadow.json").read_text())
    assert (
        list(found["runs"]) == ["seed0"] and found["minutes"] == 3.0 and list(found["runs"]["seed0"]["layers"]) == ["1"]
    )
    rows = (tmp_path / "out" / "route-shadow.md").read_text().splitlines()
    [r2] = [row for row in rows if row.startswith("| R2 |")]
    assert r2.startswith("| R2 | 1.000 | 0.000 | 1.000 | 1.000 |")
    capsys.readouterr()


def test_a_recorder_wants_r2(small):
    from route_recorder import RouteRecorder

    with pytest.raises(UserError, match=r"RouteRecorder needs routing.source: r2"):
        RouteRecorder(build_config({"routing": {"source": "pr2"}, "batch": {"updates_per_step": 4}}))
