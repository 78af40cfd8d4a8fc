"""A hook and an observer from outside: called in the stated order, they measure, scale a step, and reject it."""

from __future__ import annotations

import pytest
import torch
from ranks import end_layout, run_ranks

from megatron_rl.errors import UserError
from megatron_rl.metrics.reduce import Metrics, alike, figures, maximum
from megatron_rl.routing.passes import RouteObserver, RoutePass
from megatron_rl.trainer.hooks import Step, UpdateContext, UpdateHook

OBSERVED = ["see_logits", "replay", "see_choice"]
PASS = ["before_forward", "observers"]
UPDATE = [*PASS, *OBSERVED, "after_backward", "after_reduction", "after_pass", "observed", "check", "before_step"]


class Watching(RouteObserver):
    """Tells the hook what it is asked, and sends all tokens to experts 0 and 1."""

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.largest = calls, torch.zeros(())

    def see_logits(self, layer, hidden, logits, router):
        self.calls.append("see_logits")
        self.largest = torch.maximum(self.largest, logits.detach().abs().max())
        return logits

    def replay(self, layer):
        self.calls.append("replay")
        return

    def see_choice(self, layer, own, chosen) -> None:
        self.calls.append("see_choice")
        assert torch.equal(own, chosen)

    def metrics(self) -> Metrics:
        self.calls.append("observed")
        return {"toy/largest_logit": maximum(self.largest)}


class Toy(UpdateHook):
    """Scales every step by `scale`, and notes who called it when."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.scale, self.refuses = 1.0, False
        self.steps: list[Step] = []

    def attach(self, trainer) -> None:
        self.calls.append("attach")

    def before_forward(self, batches, stage, place) -> None:
        self.calls.append("before_forward")

    def observers(self, table, stage, place) -> list[RouteObserver]:
        self.calls.append("observers")
        return [Watching(self.calls)]

    def after_backward(self) -> None:
        self.calls.append("after_backward")

    def after_reduction(self) -> None:
        self.calls.append("after_reduction")

    def after_pass(self, stage) -> None:
        self.calls.append("after_pass")

    def check(self, metrics) -> None:
        self.calls.append("check")
        assert "toy/largest_logit" in metrics
        if self.refuses:
            raise UserError("toy: no")

    def before_step(self, preview) -> float:
        self.calls.append("before_step")
        return self.scale

    def after_step(self, step) -> None:
        self.calls.append("after_step")
        self.steps.append(step)

    def metrics(self) -> Metrics:
        self.calls.append("metrics")
        return {"toy/steps": alike(1.0, across="sum")}

    def weights_pushed(self) -> None:
        self.calls.append("weights_pushed")


def played(model: str, seed: int) -> dict:
    """What a trainer with the hook makes of updates at scales 1, 1/2 and 0, and of one that the hook refuses."""
    from trainer.layouts import make_config, make_samples

    from megatron_rl.algorithms.sampling_support import SamplingSupport
    from megatron_rl.distributed import parallel
    from megatron_rl.trainer.objective import Policy
    from megatron_rl.trainer.trainer import build_trainer

    found: dict = {"moved": {}, "figures": {}, "lr": {}}
    # One micro-batch, and a step that does not depend on how large gradients are: Adam's first.
    batch = {"tokens_per_micro_batch": 4096, "updates_per_step": 1}
    config = make_config(model, {"batch": batch, "optimizer": {"weight_decay": 0.0}})
    for scale in (1.0, 0.5, 0.0):
        toy = Toy()
        ranks = parallel.initialize(config.parallel, config.seed)
        options = {"total_updates": 4, "support": SamplingSupport(), "hooks": [toy]}
        trainer = build_trainer(config, ranks, **options)
        found["attached"] = toy.calls.copy()
        batches, objective = trainer.pack(make_samples(seed, 4, 64)), Policy(config)
        before = [p.detach().clone() for chunk in trainer.chunks for p in chunk.parameters()]
        toy.scale, toy.calls[:] = scale, []
        trainer.compute_log_probs(batches, place=UpdateContext())
        found["log_probs"], toy.calls[:] = toy.calls.copy(), []
        done = trainer.update(batches, objective)
        found["update"], toy.calls[:] = toy.calls.copy(), []
        after = [p.detach() for chunk in trainer.chunks for p in chunk.parameters()]
        found["moved"][scale] = [b - a for a, b in zip(before, after, strict=True)]
        found["figures"][scale] = figures(done.metrics) | {"scheduled": trainer.scheduler.num_steps}
        found["lr"][scale] = done.lr_scale, toy.steps[0].lr, toy.steps[0].done
        trainer.weights_pushed()
        found["pushed"] = toy.calls.copy()
        if scale == 1.0:
            toy.refuses, kept = True, [p.clone() for p in after]
            with pytest.raises(UserError, match="toy: no"):
                trainer.update(batches, objective)
            found["refused"] = all(map(torch.equal, kept, after))
        end_layout()
    return found


@pytest.fixture(scope="module")
def found(tiny_model) -> dict:
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    return run_ranks(1, "trainer.test_hooks:played", (str(tiny_model("qwen3_moe", "--layers", "1")), seed))[0]


def test_the_order_is_as_stated(found):
    assert found["attached"] == ["attach"] and found["pushed"] == ["weights_pushed"]
    assert found["log_probs"] == [*PASS, *OBSERVED, "after_pass"]
    assert found["update"] == [*UPDATE, "after_step", "metrics"]


def test_a_step_is_scaled_and_rejected(found):
    """Adam's first step is the learning rate times the gradient's sign: half of it at half the scale, and nothing at 0."""
    whole, half, none = (found["moved"][scale] for scale in (1.0, 0.5, 0.0))
    assert max(float(moved.abs().max()) for moved in whole) > 1e-4
    for a, b in zip(whole, half, strict=True):  # a weight is near 1 at most, and rounded to fp32 before and after
        torch.testing.assert_close(b, a / 2, atol=4e-7, rtol=1e-4)
    assert not any(moved.any() for moved in none)
    (scale, lr, done), (_, halved, _), (left_out, nothing, took) = (found["lr"][s] for s in (1.0, 0.5, 0.0))
    assert (scale, left_out, done, took) == (1.0, 0.0, True, False)
    assert halved == lr / 2 > 0 and nothing == 0.0
    for scale, of_update in found["figures"].items():
        assert of_update["toy/steps"] == 1.0 and of_update["toy/largest_logit"] > 0
        assert of_update["update/lr"] == lr * scale and of_update["update/skipped"] == 0.0
        assert of_update["scheduled"] == (scale > 0)


def test_what_a_check_refuses_changes_nothing(found):
    assert found["refused"]


def test_the_first_observer_with_routes_is_obeyed():
    class Fixed(RouteObserver):
        def __init__(self, ids: list[list[int]] | None) -> None:
            self.ids = None if ids is None else torch.tensor(ids, dtype=torch.uint8)
            self.chosen = None

        def see_logits(self, layer, hidden, logits, router):
            return logits * 2 + 1

        def replay(self, layer):
            return self.ids

        def see_choice(self, layer, own, chosen) -> None:
            self.chosen = chosen

    observers = [Fixed(None), Fixed([[3, 1], [255, 255]]), Fixed([[0, 2], [0, 2]])]
    route_pass = RoutePass(observers)
    assert float(route_pass.see_logits(0, None, torch.ones(()), None)) == 15.0
    # A token without a route goes where the router sends it.
    assert route_pass.choose(0, torch.tensor([[4, 5], [6, 7]])).tolist() == [[3, 1], [6, 7]]
    assert all(one.chosen.tolist() == [[3, 1], [6, 7]] for one in observers)
