"""What test_vp2o.py runs in processes of their own."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from ranks import end_layout

from megatron_rl.algorithms import stein
from megatron_rl.config import ParallelConfig, VP2OConfig
from megatron_rl.config.optimizers import OPTIMIZERS
from megatron_rl.data.packing import Batch
from megatron_rl.data.sequence import Sequence
from megatron_rl.distributed import parallel
from megatron_rl.errors import UserError
from megatron_rl.hooks.predictors import Predictors
from megatron_rl.models.moe import ExpertSlice, expert_slices, moe_layers
from megatron_rl.routing.measure import Load
from megatron_rl.routing.table import RouteShape, RouteTable
from megatron_rl.trainer.checkpoint import random_states
from megatron_rl.trainer.hooks import UpdateContext, UpdateHook
from megatron_rl.trainer.preview import StepPreview
from megatron_rl.trainer.trainer import Trainer
from megatron_rl.vp2o.expert_groups import Active, Coactivation, ExpertLayer, Experts
from megatron_rl.vp2o.transform import Stein
from megatron_rl.vp2o.trust_region import TrustRegion
from tests.trainer.layouts import LATER, hook_of, make_config, make_trainer, score, update

EXPERTS = 6
"""Of layers that are made up here."""
ONE_MICRO_BATCH = {"tokens_per_micro_batch": 4096}
"""Three sequences may have more tokens than the layouts' micro-batches."""


def state_of(trainer: Trainer) -> list[torch.Tensor]:
    """Parameters, optimizer state and random states, as tensors."""
    found = [p.detach().clone() for chunk in trainer.chunks for p in chunk.parameters()]
    for part in trainer.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            found += [torch.tensor(float(group["lr"]))]
            for p in group["params"]:
                found += [p.detach().clone()]
                found += [v.clone() for v in part.optimizer.state[p].values() if isinstance(v, torch.Tensor)]
    for adam in (hook.adam for hook in trainer.hooks if isinstance(hook, Predictors)):
        found += [p.detach().clone() for group in adam.param_groups for p in group["params"]]
        found += [v.clone() for state in adam.state.values() for v in state.values()]
    random = random_states()
    numbers = torch.tensor([*random["python"][1], *random["numpy"][1].tolist()])
    return [*found, random["torch"], numbers, torch.tensor(trainer.scheduler.num_steps)]


def same(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return len(before) == len(after) and all(map(torch.equal, before, after))


def mine(trainer: Trainer, samples: list[Sequence]) -> list[Sequence]:
    return samples[trainer.ranks.data_rank :: trainer.ranks.data_size]


def learn(trainer: Trainer, batches: list[Batch]) -> dict[str, float]:
    """Score and update."""
    score(trainer, batches)
    return update(trainer, batches)


def preview_all(model: str, samples: list[Sequence], layouts: list[dict]) -> list[float]:
    """Largest difference, over two updates and all parameters, of what was previewed and what the step made."""
    return [_preview(model, samples, overrides) for overrides in layouts]


def _preview(model: str, samples: list[Sequence], overrides: dict) -> float:
    trainer = make_trainer(make_config(model, overrides))
    parameters = [p for chunk in trainer.chunks for p in chunk.parameters()]
    step, worst = trainer._step, 0.0

    def previewed():
        nonlocal worst
        trainer.optimizer.prepare_grads()
        preview = StepPreview(trainer.optimizer, float(trainer.optimizer.get_grad_norm()))
        before = state_of(trainer)
        expected = preview.after(parameters, 1.0)
        assert same(before, state_of(trainer)), "the preview changed something"
        result = step()
        differences = [(p.float() - q.float()).abs().max() for p, q in zip(parameters, expected, strict=True)]
        worst = max(worst, float(max(differences)))
        moved = any(not torch.equal(p, q) for p, q in zip(before, parameters, strict=False))
        assert moved, "the step changed nothing"
        return result

    trainer._step = previewed
    for _ in range(2):
        batches = trainer.pack(mine(trainer, samples))
        score(trainer, batches)
        update(trainer, batches)
    end_layout()
    return max(trainer.ranks.gather(worst))


def sgd_by_definition(model: str, samples: list[Sequence], momentum: float) -> tuple[float, float, float]:
    """Largest error over three updates of what SGD previews, and of what it makes, and by how much the parameters move.

    All as multiples of what rounding may do: in fp32 a weight is rounded once a step, its sum of gradients with the decay, the
    clip and the momentum eight times, and the gradients' norm, which adds up some 10^5 squares in a tree, to 2^-18.
    """
    lr, decay, clip = 0.5, 0.1, 0.5
    sgd = {"name": "sgd", "lr": lr, "momentum": momentum, "weight_decay": decay, "clip_grad": clip}
    trainer = make_trainer(make_config(model, {"optimizer": sgd, "parallel": {"distributed_optimizer": False}}))
    parameters = [p for chunk in trainer.chunks for p in chunk.parameters()]
    weights = [p.detach().double() for p in parameters]
    sums = [torch.zeros_like(w) for w in weights]
    sizes = [torch.zeros_like(w) for w in weights]  # as sums, of absolute values: terms may cancel each other
    errors, step = {"previewed": 0.0, "taken": 0.0, "moved": 0.0}, trainer._step

    def compare(found: list[torch.Tensor], what: str) -> None:
        for p, w, size in zip(found, weights, sizes, strict=True):
            allowed = 2**-24 * w.abs() + lr * (8 * 2**-24 + 2**-18) * size + 1e-12
            errors[what] = max(errors[what], float(((p.double() - w).abs() / allowed).max()))

    def compared():
        trainer.optimizer.prepare_grads()
        gradients = [p.main_grad.double().view_as(p) for p in parameters]
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients))
        before = [p.detach().clone() for p in parameters]
        for w, s, size, g, p in zip(weights, sums, sizes, gradients, before, strict=True):
            w.copy_(p)  # so that roundings of earlier steps do not add up
            clipped, decayed = g * min(1.0, clip / norm), (decay if w.ndim > 1 else 0.0) * w
            s.mul_(momentum).add_(clipped + decayed)
            size.mul_(momentum).add_(clipped.abs() + decayed.abs())
            w.sub_(lr * s)
        compare(before, "moved")
        preview = StepPreview(trainer.optimizer, trainer.optimizer.get_grad_norm())
        compare(preview.after(parameters, 1.0), "previewed")
        result = step()
        compare(parameters, "taken")
        return result

    trainer._step = compared
    for _ in range(3):
        batches = trainer.pack(mine(trainer, samples))
        score(trainer, batches)
        update(trainer, batches)
    end_layout()
    return errors["previewed"], errors["taken"], errors["moved"]


sgd_without_momentum = sgd_by_definition


def refused_and_halved(model: str, samples: list[Sequence], vp2o: dict) -> dict:
    """An update inside a wide region; then one that is refused, and one that is halved, in narrow ones."""
    trainer = make_trainer(make_config(model, {"vp2o": {**vp2o, "trust_region": 2.0}}))
    found = {}
    for name in ("wide", "reject", "backtrack"):
        settings = {
            "wide": {},
            "reject": {"trust_region": 1e-4},
            "backtrack": {"trust_region": 0.02, "on_violation": "backtrack"},
        }[name]
        region = hook_of(trainer, TrustRegion)
        region.config = make_config(model, {"vp2o": {**vp2o, "trust_region": 2.0, **settings}}).vp2o
        trainer.weights_pushed()
        batches = trainer.pack(mine(trainer, samples))
        score(trainer, batches)
        before = state_of(trainer)
        judge, verdicts = region.judge, []
        region.judge = lambda preview, judge=judge, verdicts=verdicts: verdicts.append(judge(preview)) or verdicts[0]
        metrics = update(trainer, batches)
        region.judge = judge
        found[name] = {
            "metrics": metrics,
            "shift": max(verdicts[0].shifts.values()),
            "unchanged": same(before, state_of(trainer)),
            # Measured on the weights as they are now.
            "shift_after": _shift_now(trainer),
        }
    return found


def always_refused(model: str, samples: list[Sequence], vp2o: dict) -> tuple[int, str]:
    """How many updates in a row are refused, from the first one on, before the run ends, and what it says."""
    overrides = {"vp2o": {**vp2o, "trust_region": 1e-4}, "routing": {"source": "pr2"}}
    trainer = make_trainer(make_config(model, overrides))
    batches = trainer.pack(samples[:2])
    score(trainer, batches)
    before = state_of(trainer)
    for count in range(1, 100):
        try:
            assert update(trainer, batches, LATER)["update/rejected"] == 1
        except UserError as error:
            return count, str(error)
        assert same(before, state_of(trainer)), (
            "a refused step changed parameters, optimizer, predictors or random states"
        )
    return count, "nothing"


def refused_on_all(model: str, samples: list[Sequence], vp2o: dict, layouts: list[dict]) -> list[bool]:
    """Of each layout: whether an update is refused, and everything as before, on all processes."""
    found = []
    for overrides in layouts:
        trainer = make_trainer(make_config(model, {"vp2o": {**vp2o, "trust_region": 1e-4}, **overrides}))
        batches = trainer.pack(mine(trainer, samples))
        score(trainer, batches)
        before = state_of(trainer)
        undone = update(trainer, batches)["update/rejected"] == 1
        found.append(all(trainer.ranks.gather(undone and same(before, state_of(trainer)))))
        end_layout()
    return found


def _shift_now(trainer: Trainer) -> float:
    still = SimpleNamespace(after=lambda parameters, _: [p.detach() for p in parameters])
    return max(hook_of(trainer, TrustRegion)._shifts(still, 1.0).values())


def past_a_right_angle(model: str, samples: list[Sequence], vp2o: dict) -> dict[str, float]:
    """All experts' top singular vectors turn by 0.06 across what is orthogonal to the fixed start of the iteration.

    The second singular value is as close as makes the fixed start's prototype half of each on either side.
    """
    trainer = make_trainer(make_config(model, {"vp2o": {**vp2o, "trust_region": 2.0}}))
    experts, angle = hook_of(trainer, Stein).experts, 0.03
    ratio = angle ** (1 / (2 * vp2o["power_iterations"]))

    def turn(angle: float) -> None:
        for layer in experts.layers.values():
            width = len(layer.start)
            start = torch.nn.functional.normalize(layer.start, dim=0)
            basis = torch.linalg.qr(torch.cat([start[:, None], torch.eye(width)[:, : width - 1]], 1)).Q
            basis[:, 0] = start
            top, second = basis[:, 1] + angle * start, start - angle * basis[:, 1]
            for output in layer.outputs:
                left = torch.eye(output.data.shape[1], 2)
                output.data.copy_(torch.stack([top, ratio * second], 1) @ left.t())
        experts.weights_changed()

    turn(angle)
    trainer.weights_pushed()
    fixed = {n: experts.prototypes(n) for n in experts.layers}
    score(trainer, trainer.pack(samples[:4]))
    turn(-angle)
    cosines = [(p * experts.prototypes(n)).sum(-1).abs().max() for n, p in fixed.items()]
    return {"shift": _shift_now(trainer), "fixed": float(max(cosines))}


def not_finite(model: str, samples: list[Sequence], vp2o: dict) -> dict:
    """One expert's gradient is NaN."""
    trainer = make_trainer(make_config(model, {"vp2o": vp2o}))
    batches = trainer.pack(samples)
    score(trainer, batches)
    transform = hook_of(trainer, Stein)
    attract = transform.after_backward

    def poisoned():
        next(iter(transform.experts.layers.values())).outputs[1].main_grad[0, 0] = float("nan")
        attract()

    before = state_of(trainer)
    transform.after_backward = poisoned
    metrics = update(trainer, batches)
    unchanged = same(before, state_of(trainer))
    transform.after_backward = attract
    after = update(trainer, batches)
    return {"metrics": metrics, "unchanged": unchanged, "next": after}


def never_active(model: str, samples: list[Sequence], vp2o: dict) -> dict:
    """The routers' bias of expert 0 is far below all others': whether its weights stay, it is pushed, and others from it."""
    trainer = make_trainer(make_config(model, {"vp2o": vp2o, "optimizer": {"weight_decay": 0.0}}))
    transform = hook_of(trainer, Stein)
    layers = transform.experts.layers.values()
    for layer in layers:
        layer.router.bias.data[0] = -1e4
    trainer.optimizer.reload_model_params()
    before = [s.data.clone() for layer in layers for slices in layer.slices.values() for s in slices[:1]]
    batches = trainer.pack(samples)
    score(trainer, batches)
    metrics = update(trainer, batches)
    after = [s.data for layer in layers for slices in layer.slices.values() for s in slices[:1]]
    repel = torch.stack([found.repel for found in transform._interactions.values()])
    pushed, pushes = bool(repel[:, 0].any()), bool(repel[:, 1:, 0].any())
    load = sum(float(batch.routes.left(Load)[0][0]) for batch in batches)
    return {"metrics": metrics, "load": load, "still": same(before, after), "pushed": pushed, "pushes": pushes}


def stand_still(model: str, samples: list[Sequence], vp2o: dict, layouts: list[dict]) -> list[dict]:
    """Of each layout: updates in which all experts learn; then one without a token for expert 0, whose momentum is there."""
    return [_stand_still(model, samples, vp2o, overrides) for overrides in layouts]


def _stand_still(model: str, samples: list[Sequence], vp2o: dict, overrides: dict) -> dict:
    trainer = make_trainer(make_config(model, {"vp2o": vp2o, "optimizer": {"weight_decay": 0.1}, **overrides}))
    layers = hook_of(trainer, Stein).experts.layers.values()
    batches = trainer.pack(mine(trainer, samples))
    for _ in range(2):
        learn(trainer, batches)
    for layer in layers:
        layer.router.bias.data[0] = -1e4
    trainer.optimizer.reload_model_params()
    first = [
        s.parameter
        for layer in layers
        if layer.mine.start == 0
        for s in (slices[0] for slices in layer.slices.values())
    ]
    others = [s.parameter for layer in layers for s in layer.outputs[1:]]
    before, others_before = _kept_of(trainer, first), _kept_of(trainer, others)
    batches = trainer.pack(mine(trainer, samples))
    metrics = learn(trainer, batches)
    found = {
        "same": all(trainer.ranks.gather(same(before, _kept_of(trainer, first)))),
        "others move": all(trainer.ranks.gather(not same(others_before, _kept_of(trainer, others)))),
        "momentum": any(trainer.ranks.gather(any(bool(t.any()) for t in before[len(first) :]))),
        "load": sum(trainer.ranks.gather(sum(float(batch.routes.left(Load)[0][0]) for batch in batches))),
        "skipped": metrics["update/skipped"],
    }
    end_layout()
    return found


def _kept_of(trainer: Trainer, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Copies of parameters, and of what this process's optimizer has of them: fp32 weights and moments."""
    found = [p.detach().clone() for p in parameters]
    for part in trainer.optimizer.chained_optimizers:
        for p in parameters:
            main = getattr(p, "main_param", None)
            main = p if main is None else main
            if isinstance(part, DistributedOptimizer):
                if p not in part.model_param_group_index_map:
                    continue
                group, order = part.model_param_group_index_map[p]
                main = part.optimizer.param_groups[group]["params"][order]
            if main in part.optimizer.state:
                state = part.optimizer.state[main]
                found += [*(t.clone() for t in state.values() if torch.is_tensor(t) and t.ndim), main.detach().clone()]
    return found


def of_a_range(model: str, samples: list[Sequence], layouts: list[dict]) -> list[bool]:
    """Of each layout: whether a range of a parameter, as an expert that is a row has, is as before, and the rest moved."""
    found = []
    for overrides in layouts:
        trainer = make_trainer(make_config(model, overrides))
        parameter = next(iter(moe_layers(trainer.chunks)))[1].router.weight
        place, held = slice(5, parameter.numel() // 2 + 3), []
        hook = UpdateHook()
        hook.before_step = lambda preview, p=parameter, s=place, h=held: (
            h.extend((t, t.clone()) for t in preview.changes(p, s)) or 1.0
        )
        trainer.hooks.append(hook)
        for _ in range(2):
            before = parameter.detach().clone().view(-1)
            learn(trainer, trainer.pack(mine(trainer, samples)))
            moments = sum(len(t) for t, _ in held[1:] if t.dtype == torch.float32)
            for tensor, copy in held:
                tensor.data.copy_(copy)
            held.clear()
        moved = parameter.detach().view(-1) != before
        size = place.stop - place.start
        ok = not moved[place].any() and moved[: place.start].any() and moved[place.stop :].any()
        # Each process has its part of the moments (and beside bf16 weights of the fp32 ones), or all of them.
        opt = trainer.config.optimizer
        tensors = len(OPTIMIZERS[opt.name].states(opt)) + (trainer.config.precision.train == "bf16")
        own = trainer.config.parallel.distributed_optimizer
        total = sum(trainer.ranks.gather(moments)) / (1 if own else trainer.ranks.data_size)
        found.append(all(trainer.ranks.gather(bool(ok))) and total == tensors * size)
        end_layout()
    return found


def of_the_rollout_batch(model: str, samples: list[Sequence], vp2o: dict, sources: list[str]) -> list[dict]:
    """Of each source of routes, the shift of a router that noise has moved, as the region sees it and by hand.

    By hand: over the tokens of the second rollout batch since the engine got its weights, through the routers that it has.
    """
    found = []
    for source in sources:
        settings = {**vp2o, "trust_region": 2.0, "probe_tokens": 4096}
        changes = {"vp2o": settings, "routing": {"source": source}, "batch": ONE_MICRO_BATCH}
        trainer = make_trainer(make_config(model, changes))
        region = hook_of(trainer, TrustRegion)
        trainer.weights_pushed()
        layers = region.experts.layers
        engine = {n: layer.router.weight.detach().clone() for n, layer in layers.items()}
        batches = trainer.pack(samples[:7])
        learn(trainer, batches)
        (batch,) = trainer.pack(samples[7:10])
        seen, handles = {}, []
        for n, layer in layers.items():
            keep = partial(_keep, seen, n)
            handles.append(layer.router.register_forward_pre_hook(keep))
        score(trainer, [batch])
        for handle in handles:
            handle.remove()
        expected = {}
        for n, layer in layers.items():
            layer.router.weight.data.add_(torch.randn_like(layer.router.weight) * layer.router.weight.std())
            p, counted = region._anchors[n].prototypes, batch.routes.counted
            hidden = seen[n][counted]
            routes = batch.routes.recorded[n][counted].long() if source == "r2" else None
            now, then = (_gates_by_hand(hidden @ w.t(), routes, 2) for w in (layer.router.weight.detach(), engine[n]))
            # The experts have moved with the first update: prototypes of now are the region's.
            still = SimpleNamespace(after=lambda parameters, _: [q.detach() for q in parameters])
            own = region._prototypes_after(n, region._anchors[n], still, 1.0)
            expected[n] = float((now @ own - then @ p).norm(dim=-1).mean())
        found.append({"found": region._shifts(still, 1.0), "expected": expected})
        end_layout()
    return found


def soft(model: str, samples: list[Sequence], vp2o: dict) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """By layer: soft co-activation of an update's tokens, as the transform has it and from what its router sees."""
    trainer = make_trainer(make_config(model, {"vp2o": {**vp2o, "coactivation": "soft"}, "batch": ONE_MICRO_BATCH}))
    transform, seen = hook_of(trainer, Stein), {}
    (batch,) = trainer.pack(samples[:3])
    layers = transform.experts.layers
    before = {n: layer.router.weight.detach().clone() for n, layer in layers.items()}
    handles = [layer.router.register_forward_pre_hook(partial(_keep, seen, n)) for n, layer in layers.items()]
    learn(trainer, [batch])
    for handle in handles:
        handle.remove()
    shares = {n: (seen[n][batch.routes.counted] @ w.t()).double().softmax(-1) for n, w in before.items()}
    return [(transform._interactions[n].coactivation.double(), s.t() @ s / len(s)) for n, s in shares.items()]


def _keep(seen: dict[int, torch.Tensor], number: int, _: object, inputs: tuple[torch.Tensor, ...]) -> None:
    seen[number] = inputs[0].detach().flatten(0, -2)


def _gates_by_hand(logits: torch.Tensor, routes: torch.Tensor | None, topk: int) -> torch.Tensor:
    routes = logits.topk(topk).indices if routes is None else routes
    return torch.zeros_like(logits).scatter(1, routes, logits.gather(1, routes).softmax(-1))


def overwhelmed(model: str, samples: list[Sequence], vp2o: dict) -> dict[str, tuple[float, int]]:
    """By case: the share of layers in which repulsion is more than attraction or the clip, and warnings of two updates."""
    found = {}
    for name, settings, clip in (
        ("absolute", {"repulsion": 10.0, "repulsion_scale": "absolute"}, 0.0),
        ("relative", {"repulsion": 0.1}, 0.0),
        ("the clip", {"repulsion": 0.5}, 1e-7),
    ):
        changes = {"vp2o": vp2o | {"orthogonality": 0.0} | settings, "optimizer": {"clip_grad": clip}}
        trainer = make_trainer(make_config(model, changes))
        batches = trainer.pack(samples[:4])
        with _warnings() as said:
            shares = [learn(trainer, batches)["vp2o/repulsion_dominates"] for _ in range(2)]
        found[name] = (shares, said)
        end_layout()
    return found


def outweighed(model: str, samples: list[Sequence], vp2o: dict) -> dict[tuple[str, float], tuple[float, list[str]]]:
    """By form and weight of the orthogonality loss: the largest layer's share of its gradient, and warnings of two updates."""
    found = {}
    for form, weight in (("cosine", 1e3), ("projection", 1e3), ("cosine", 1e-6)):
        settings = {"repulsion": 0.0, "orthogonality": weight, "orthogonality_form": form}
        trainer = make_trainer(make_config(model, {"vp2o": vp2o | settings}))
        batches = trainer.pack(samples[:4])
        with _warnings() as said:
            for _ in range(2):
                metrics = learn(trainer, batches)
        shares = [
            value for name, value in metrics.items() if re.fullmatch(r"routing/layer_\d+/orthogonality_gradient", name)
        ]
        found[form, weight] = (max(shares), said)
        end_layout()
    return found


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What the transform says."""
    said: list[str] = []
    handler, log = logging.Handler(), logging.getLogger("megatron_rl.vp2o.transform")
    handler.emit = lambda record: said.append(record.getMessage())
    log.addHandler(handler)
    try:
        yield said
    finally:
        log.removeHandler(handler)


def counted(model: str, samples: list[Sequence], vp2o: dict) -> dict:
    """Co-activation of the first of two updates, over the whole rollout batch and over its own part."""
    trainer = make_trainer(make_config(model, {"vp2o": vp2o}))
    updates = [trainer.pack(samples[:7]), trainer.pack(samples[7:])]
    for batches in updates:
        score(trainer, batches)
    transform = hook_of(trainer, Stein)
    first = next(iter(transform.experts.layers))
    topk = [b.routes.recorded[first][b.routes.counted] for batches in updates for b in batches]
    own = [b.routes.recorded[first][b.routes.counted] for b in updates[0]]
    result = {"expected": stein.coactivation(torch.cat(topk), 8), "expected_own": stein.coactivation(torch.cat(own), 8)}
    for name, place in (("whole", UpdateContext(0, updates)), ("own", UpdateContext())):
        update(trainer, updates[0], place)
        result[name] = transform._interactions[first].coactivation
    return result


def orthogonality(model: str, samples: list[Sequence], vp2o: dict) -> dict[str, dict]:
    """By its form."""
    return {form: _orthogonality(model, samples, vp2o, form) for form in ("cosine", "projection")}


def _orthogonality(model: str, samples: list[Sequence], vp2o: dict, form: stein.OrthogonalityForm) -> dict:
    """Of the last MoE layer, the loss and what it adds to gradients, and both by hand from what each expert puts out.

    The gradient at the outputs as a share of all else's, for two weights: the loss of the policy does not depend on them.
    """
    vp2o = vp2o | {"neighbors": 1, "repulsion": 0.0, "orthogonality_form": form}
    with_it, twice, without = (vp2o | {"orthogonality": weight} for weight in (0.5, 1.0, 0.0))
    plain = _of_last_layer(model, samples, without)
    found = _of_last_layer(model, samples, with_it)
    x = found.inputs.reshape(-1, found.inputs.shape[-1])
    tokens = found.routes.counted.nonzero()[:, 0].tolist()
    loss = torch.zeros(())
    for token in tokens:
        outputs = []
        for e in found.routes.recorded[found.number][token].tolist():
            fc1, fc2 = (found.experts[e][f"linear_fc{i}.weight"] for i in (1, 2))
            gate, up = (fc1 @ x[token]).chunk(2)
            outputs.append(fc2 @ (torch.nn.functional.silu(gate) * up))
        loss = loss + stein.orthogonality_loss(torch.stack(outputs)[None], form)
    parameters = [p for expert in found.experts for p in expert.values()]
    # An expert may have no token of the two sequences.
    expected = torch.autograd.grad(0.5 * loss / len(tokens), parameters, allow_unused=True, materialize_grads=True)
    return {
        "logged": found.metrics[f"routing/layer_{found.number:02}/orthogonality"],
        "expected": float(loss.detach()) / len(tokens),
        "added": [a - b for a, b in zip(found.of_experts, plain.of_experts, strict=True)],
        "expected_added": list(expected),
        "router": (found.of_router, plain.of_router),
        "shares": [
            of.metrics[f"routing/layer_{found.number:02}/orthogonality_gradient"]
            for of in (found, _of_last_layer(model, samples, twice))
        ],
    }


def _of_last_layer(model: str, samples: list[Sequence], vp2o: dict) -> SimpleNamespace:
    """An update on two sequences: its metrics and routes, and of the last MoE layer the number, the weights before, what it
    saw, and its gradients before they are clipped."""
    trainer = make_trainer(make_config(model, {"vp2o": vp2o}))
    (batch,) = trainer.pack(samples[:2])
    score(trainer, [batch])
    number, layer = list(moe_layers(trainer.chunks))[-1]
    local = layer.experts.local_experts
    weights = [{k: v.detach().clone().requires_grad_() for k, v in e.named_parameters()} for e in local]
    found = SimpleNamespace(number=number, routes=batch.routes, experts=weights)
    handle = layer.register_forward_pre_hook(lambda _, inputs: setattr(found, "inputs", inputs[0].detach()))
    step = trainer._step

    def captured():
        found.of_experts = [p.main_grad.clone() for e in local for p in e.parameters()]
        found.of_router = layer.router.weight.main_grad.clone()
        return step()

    trainer._step = captured
    found.metrics = update(trainer, [batch])
    handle.remove()
    end_layout()
    return found


class Stored(torch.nn.Module):
    """Expert weights in one of the ways in which Megatron stores them."""

    def __init__(self, way: str, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for layer, tensor in weights.items():
            linear = torch.nn.Module()
            setattr(self, layer, linear)
            if way == "one parameter":
                linear.weight = torch.nn.Parameter(tensor.clone())
            for expert, matrix in enumerate(tensor if way == "numbered" else ()):
                setattr(linear, f"weight{expert}", torch.nn.Parameter(matrix.clone()))
        for p in self.parameters():
            p.main_grad = torch.zeros_like(p)


def transform_of(
    module: torch.nn.Module, gradients: dict[str, torch.Tensor], topk: torch.Tensor, mine: slice | None = None, **vp2o
) -> tuple[Stein, dict[str, list[ExpertSlice]]]:
    """A transform that is about to begin, of a layer with these experts and gradients; and its slices."""
    slices = expert_slices(module)
    for name, gradient in gradients.items():
        for one, own in zip(slices[f"{name}.weight"], gradient, strict=True):
            one.main_grad.copy_(own)
    experts, hidden = EXPERTS, gradients["linear_fc2"].shape[1]
    transform = Stein(
        VP2OConfig(**{"enabled": True, "neighbors": 3, "inactive_neighbors": 4, "repulsion_scale": "absolute", **vp2o})
    )
    transform.experts = Experts([], transform.config.power_iterations)
    start = torch.randn(hidden, generator=torch.Generator().manual_seed(0))
    transform.experts.layers = {0: ExpertLayer(None, slices, experts, mine or slice(0, experts), start)}
    everywhere = torch.ones(len(topk), dtype=torch.bool)
    table = RouteTable(RouteShape((0,), experts, topk.shape[1]), everywhere, torch.arange(0))
    table.left(Coactivation)[0] = stein.coactivation(topk, experts) * len(topk)
    table.left(Active)[0] = table.left(Coactivation)[0].diagonal()
    transform.before_forward([SimpleNamespace(routes=table)], "update", UpdateContext())
    return transform, slices


def exchanged(
    weights: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor], topk: torch.Tensor
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Half of the experts on each of two ranks: mixed gradients of all, and bytes that each sends to the other."""
    ranks = parallel.initialize(ParallelConfig(expert=2), 0)
    half = EXPERTS // 2
    own = slice(ranks.data_rank * half, (ranks.data_rank + 1) * half)
    module = Stored("one parameter", {name: tensor[own] for name, tensor in weights.items()})
    mine = {name: tensor[own] for name, tensor in gradients.items()}
    transform, slices = transform_of(module, mine, topk, own, neighbors=2, repulsion=0.0)
    sent, plain = 0, {name: getattr(dist, name) for name in ("all_to_all_single", "reduce_scatter")}

    def all_to_all(received, out, *args, **kwargs):
        nonlocal sent
        sent += out.numel() * out.element_size()
        return plain["all_to_all_single"](received, out, *args, **kwargs)

    def reduce_scatter(into, parts, *args, **kwargs):
        nonlocal sent
        sent += sum(part.numel() * part.element_size() for part in parts[1:])
        return plain["reduce_scatter"](into, parts, *args, **kwargs)

    dist.all_to_all_single, dist.reduce_scatter = all_to_all, reduce_scatter
    try:
        transform.after_backward()
    finally:
        dist.all_to_all_single, dist.reduce_scatter = plain["all_to_all_single"], plain["reduce_scatter"]
    mixed = {name: torch.stack([one.main_grad.clone() for one in v]) for name, v in slices.items()}
    every = ranks.gather((mixed, sent))
    return {name: torch.cat([m[name] for m, _ in every]) for name in mixed}, [bytes for _, bytes in every]


def storage(
    weights: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor], topk: torch.Tensor
) -> dict[str, dict]:
    """Transformed gradients `[N, ...]` by way of storage and layer, of the same weights, gradients and routes."""
    parallel.initialize(ParallelConfig(), 0)
    found = {}
    for way in ("a module each", "numbered", "one parameter"):
        if way == "a module each":
            module = torch.nn.Module()
            alone = [
                Stored("one parameter", dict(zip(weights, one, strict=True)))
                for one in zip(*weights.values(), strict=True)
            ]
            module.local_experts = torch.nn.ModuleList(alone)
        else:
            module = Stored(way, weights)
        transform, slices = transform_of(module, gradients, topk, repulsion=0.5)
        transform.after_backward()
        transform.after_reduction()
        found[way] = {k: torch.stack([one.main_grad.clone() for one in v]) for k, v in slices.items()}
    return found


def shard(
    weights: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor], topk: torch.Tensor
) -> tuple[float, float]:
    """Squared norm of the part of the gradients that is this process's, as it is counted and by hand."""
    parallel.initialize(ParallelConfig(), 0)
    module = Stored("one parameter", weights)
    transform, _ = transform_of(module, gradients, topk, repulsion=0.0)
    transform.after_backward()
    first, part = module.linear_fc1.weight, slice(7, 100)
    transform.owned = {first: part}
    transform.after_reduction()
    return transform.metrics()["vp2o/layer_00/attraction"].parts[0], float(
        first.main_grad.view(-1)[part].square().sum()
    )


def in_turn(calls: dict[str, tuple]) -> dict[str, object]:
    """Functions of this file with their arguments, one after the other on the same process."""
    found = {}
    for name, arguments in calls.items():
        found[name] = globals()[name](*arguments)
        if parallel_state.model_parallel_is_initialized():
            end_layout()
    return found
