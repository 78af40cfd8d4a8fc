"""The runs of route_shadow.sh: R2 with a recorder of router data, and predictors that run beside it without effect.

Each predictor learns as in a Pr2 run, from the same tokens in the same updates with the trainer's own loss and
optimizer, and predicts the next rollout batch. Its routes are not used, so all predictors predict the same routers.
They are compared with least-squares fits of the drift. A fit on the other half of the same rollout batch is the best
that a predictor linear in the router's input can do. A fit on the batch before shows how far drift persists. The
third comparison is the routers' own change over the batch before.

The setting leaves something to gain: many experts, many updates, and a learning rate that is not divided by their
number. The policy stays stable because an update has 64 responses, which are therefore short. All settings are in
`MODEL`, `WARM_START` and `RUN`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path

import torch
from ablations import (
    REPOSITORY,
    Settings,
    check_names,
    last_step,
    make_parser,
    mean_and_spread,
    mean_of,
    run_all,
    save,
    warm_start,
)
from route_recorder import Seen
from torch import Tensor

from megatron_rl.config import OptimizerConfig, RoutingConfig
from megatron_rl.hooks.predictors import make_adam, set_lr
from megatron_rl.metrics.logger import METRICS_FILE, read_json_lines
from megatron_rl.routing.predictor import RoutePredictor, predictive_loss, relative_horizon
from megatron_rl.routing.table import kl_divergence, routing_log_probs

UPDATES = 16
TOPK = 8
MODEL = ("--preset", "quickstart", "--experts", "64", "--topk", str(TOPK), "--expert-intermediate", "64")
WARM_START: Settings = {"steps": 160}
BETAS = (0.9, 0.99)
RUN: Settings = {
    "batch.updates_per_step": UPDATES,
    "optimizer.lr": 2e-4,
    "optimizer.betas": list(BETAS),
    "optimizer.warmup_steps": UPDATES,
    "optimizer.decay": "constant",
    "routing.source": "r2",
    "batch.prompts_per_step": 128,
    "routing.cached_tokens": 4,  # for 1,024 responses per rollout batch; with 4 layers 15 MB
    "hooks": "examples/route_recorder.py:RouteRecorder",
    "eval.every": 0,
}
MULTIPLIERS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
DECAYS = (0.0, 0.01, 0.05, 0.2)
HORIZONS = ("constant", "scaled")
RIDGE = 1e-3
"""Ridge of a fit: added to the diagonal of the inputs' second moments, relative to its mean."""
COLUMNS = {
    "all": ("route KL left", ".3f"),
    "first": ("of it in update 1", ".3f"),
    "later": ("KL left, updates 2 on", ".3f"),
    "last": ("KL left, last update", ".3f"),
    "agreement": ("agreement, updates 2 on", ".4f"),
    "gain": ("beside R2's", "+.4f"),
    "agreement_last": ("agreement, last update", ".4f"),
}


@dataclass(frozen=True)
class Form:
    """Settings of a predictor."""

    horizon: str
    decay: float
    multiplier: float

    @property
    def name(self) -> str:
        paper = ", as in the paper" if self.horizon == "constant" and not self.decay else ""
        return f"{self.horizon}, decay {self.decay:g}, multiplier {self.multiplier:g}{paper}"

    def scale(self, update: int) -> float:
        return relative_horizon(update, UPDATES) if self.horizon == "scaled" else 1.0


FORMS = [Form(*settings) for settings in product(HORIZONS, DECAYS, MULTIPLIERS)]


class Shadow:
    """A predictor of one layer."""

    def __init__(self, form: Form, hidden: int, experts: int) -> None:
        self.form, self.predictor = form, RoutePredictor(hidden, experts)
        self.routing = RoutingConfig(predictor_lr_multiplier=form.multiplier, predictor_decay=form.decay)
        self.adam = make_adam(self.predictor.parameters(), self.routing, OptimizerConfig(betas=BETAS))

    def learn(self, seen: Seen, update: int, lr: float) -> None:
        bias = self.form.scale(update) * self.predictor(seen.hidden)
        self.adam.zero_grad()
        predictive_loss(seen.current, seen.recorded, bias).backward()
        set_lr(self.adam, lr, self.routing)
        self.adam.step()


@dataclass
class Score:
    """Scores of one predictor at one layer, by update; sums over rollout batches."""

    kl: list[float] = field(default_factory=lambda: [0.0] * UPDATES)
    agreement: list[float] = field(default_factory=lambda: [0.0] * UPDATES)


@dataclass
class Layer:
    """One layer over a run."""

    shadows: list[Shadow]
    scores: dict[str, Score] = field(default_factory=dict)
    fits: list[Tensor] = field(default_factory=list)
    """[E, d] drift of one update by least squares, of each rollout batch."""
    moves: list[Tensor] = field(default_factory=list)
    """[E, d] change of the router over each rollout batch."""
    hidden: list[Tensor] = field(default_factory=list)
    """[C, d] router inputs of each rollout batch."""

    def judge(self, biases: Mapping[str, Tensor], seen: Seen, update: int, part: slice = slice(None)) -> None:
        """Score predictors. biases: [C, E] by name, added to the recorded logits; part: which of the tokens."""
        current, recorded = seen.current[part], seen.recorded[part]
        now, chosen = routing_log_probs(current), _chosen(current)
        tokens = len(current) / len(seen.current)
        for name, bias in biases.items():
            predicted = recorded + bias
            score = self.scores.setdefault(name, Score())
            score.kl[update] += tokens * float(kl_divergence(now, routing_log_probs(predicted)).mean())
            score.agreement[update] += tokens * float((chosen & _chosen(predicted)).sum() / (len(current) * TOPK))


def _chosen(logits: Tensor) -> Tensor:
    """Return the chosen experts, [C, E] bool."""
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, logits.topk(TOPK).indices, True)


def fit(parts: Sequence[tuple[Seen, float]], rows: slice = slice(None)) -> Tensor:
    """Return the [E, d] that minimizes the squared error of c W h for the change of the logits; parts: (tokens, c).

    The result is centered over the experts, because softmax ignores a common shift.
    """
    moments: Tensor | float = 0.0
    products: Tensor | float = 0.0
    for seen, c in parts:
        h, change = seen.hidden[rows].double(), (seen.current - seen.recorded)[rows].double()
        moments = moments + c * c * h.T @ h
        products = products + c * h.T @ (change - change.mean(-1, keepdim=True))
    assert isinstance(moments, Tensor) and isinstance(products, Tensor)
    moments.diagonal().add_(RIDGE * moments.diagonal().mean())
    return torch.linalg.solve(moments, products).T.float()


def batches_of(folder: Path) -> Iterable[tuple[dict[int, Tensor], list[tuple[float, dict[int, Seen]]]]]:
    """Yield each complete rollout batch: the routers before it, and the learning rate and router data of its updates."""
    for batch in sorted(folder.glob("batch_*")):
        files = sorted(batch.glob("update_*.pt"))
        if len(files) == UPDATES:
            loaded = [torch.load(file) for file in files]
            seen = [{layer: _seen(**parts) for layer, parts in one["layers"].items()} for one in loaded]
            yield torch.load(batch / "routers.pt"), [(o["lr"], s) for o, s in zip(loaded, seen, strict=True)]


def _seen(hidden: Tensor, recorded: Tensor, current: Tensor) -> Seen:
    return Seen(hidden.float(), recorded, current)


def shadow(folder: Path) -> dict[int, Layer]:
    """Run all predictors over one run, and score them after its first quarter."""
    layers: dict[int, Layer] = {}
    before: dict[int, Tensor] = {}
    judged = len(list(folder.glob("batch_*"))) // 4
    for number, (routers, updates) in enumerate(batches_of(folder)):
        for index, router in routers.items():
            layer = layers.setdefault(index, Layer([Shadow(form, *router.T.shape) for form in FORMS]))
            if before:
                layer.moves.append(router - before[index])
            seen = [of_layers[index] for _, of_layers in updates]
            fitted = fit([(s, float(u)) for u, s in enumerate(seen)])
            if number >= max(judged, 2):
                judge(layer, seen)
            layer.fits.append(fitted)
            layer.hidden.append(torch.cat([s.hidden for s in seen]))
            for update, (lr, _) in enumerate(updates):
                if update and lr:
                    for one in layer.shadows:
                        one.learn(seen[update], update, lr)
        before = routers
    return layers


@torch.no_grad()
def judge(layer: Layer, seen: Sequence[Seen]) -> None:
    """Score all predictors, in their state before a rollout batch, on the updates of the batch."""
    weights = torch.stack([one.predictor.weight for one in layer.shadows])
    slopes = {"the batch before, scaled": layer.fits[-1], "the batch before, scaled, half of it": layer.fits[-1] / 2}
    slopes["the router's own change over the batch before, scaled"] = layer.moves[-1] / UPDATES
    for update, s in enumerate(seen):
        biases = {"R2": torch.zeros_like(s.recorded)}
        for one, bias in zip(layer.shadows, torch.einsum("ved,cd->vce", weights, s.hidden), strict=True):
            biases[one.form.name] = one.form.scale(update) * bias
        biases |= {f"least squares, {name}": update * s.hidden @ slope.T for name, slope in slopes.items()}
        layer.judge(biases, s, update)
    half = len(seen[0].hidden) // 2
    for fitted, judged in ((slice(half), slice(half, None)), (slice(half, None), slice(half))):
        for horizon in HORIZONS:
            scale = [1.0 if horizon == "constant" else float(u) for u in range(UPDATES)]
            w = fit([(s, scale[u]) for u, s in enumerate(seen) if u], fitted)
            for update, s in enumerate(seen):
                bias = scale[update] * s.hidden[judged] @ w.T
                layer.judge({f"least squares, the same batch's other half, {horizon}": bias}, s, update, judged)


def figures(layer: Layer) -> dict[str, dict[str, float]]:
    """Return the figures of each predictor over the scored rollout batches; KL as a share of R2's."""
    r2 = layer.scores["R2"]
    batches = r2.agreement[0]  # agreement is 1 there, because no router has moved
    later = range(1, UPDATES)

    def agreement(score: Score) -> float:
        return statistics.fmean(score.agreement[u] for u in later) / batches

    return {
        name: {
            "all": sum(score.kl) / sum(r2.kl),
            "first": score.kl[0] / sum(r2.kl),
            "later": sum(score.kl[u] for u in later) / sum(r2.kl[u] for u in later),
            "last": score.kl[-1] / r2.kl[-1],
            "agreement": agreement(score),
            "gain": agreement(score) - agreement(r2),
            "agreement_last": score.agreement[-1] / batches,
        }
        for name, score in layer.scores.items()
    }


def cosine(a: Tensor, b: Tensor, hidden: Tensor | None = None) -> float:
    """Return the cosine of two [E, d], both centered over the experts; with hidden [C, d], of their biases for these inputs."""
    a, b = (t - t.mean(0) if hidden is None else hidden @ (t - t.mean(0)).T for t in (a, b))
    return float((a * b).sum() / (a.norm() * b.norm()))


COSINES = {
    "fits": "the drift of two successive batches, by least squares",
    "routers": "the change of a router over two successive batches",
    "fit and router": "a batch's drift and the change of its router",
}


def cosines(layer: Layer) -> dict[str, list[float]]:
    """Return mean cosines over successive rollout batches: of the weights, and of the biases for the later batch's tokens."""
    fits, moves = layer.fits, layer.moves
    pairs = {
        "fits": [(*two, h) for two, h in zip(pairwise(fits), layer.hidden[1:], strict=True)],
        "routers": [(*two, h) for two, h in zip(pairwise(moves), layer.hidden[1:-1], strict=True)],
        "fit and router": [*zip(fits[:-1], moves, layer.hidden[:-1], strict=True)],
    }
    return {
        name: [
            statistics.fmean(cosine(a, b, h if of_biases else None) for a, b, h in found) for of_biases in (False, True)
        ]
        for name, found in pairs.items()
    }


def table(units: Sequence[dict]) -> str:
    """Return a table of means and standard errors over the layers of all seeds, sorted by the remaining KL."""
    rows = {name: {key: [u["figures"][name][key] for u in units] for key in COLUMNS} for name in units[0]["figures"]}
    lines = [
        "| predictor | " + " | ".join(title for title, _ in COLUMNS.values()) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for name, found in sorted(rows.items(), key=lambda row: statistics.fmean(row[1]["all"])):
        cells = [mean_and_spread(found[key], form, error=True) for key, (_, form) in COLUMNS.items()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "| cosine of | weights | biases of the same tokens |", "|---|---|---|"]
    for name, title in COSINES.items():
        of = [[u["cosines"][name][i] for u in units] for i in range(2)]
        weights, biases = (mean_and_spread(values, ".3f", error=True) for values in of)
        lines.append(f"| {title} | {weights} | {biases} |")
    return "\n".join(lines)


def settings_of(seed: int, model: Path) -> Settings:
    return {"model.path": model, "seed": seed, "data.seed": seed} | RUN


def write_results(root: Path, out: Path, steps: int, minutes: dict[str, float]) -> None:
    """Write out/route-shadow.json and .md of the finished runs."""
    results = {}
    for name in (f"seed{seed}" for seed in range(3)):
        if last_step(root / name) == steps:
            layers = shadow(root / name / "routes")
            found = {str(n): {"figures": figures(layer), "cosines": cosines(layer)} for n, layer in layers.items()}
            lines = read_json_lines(root / name / METRICS_FILE)
            names = (
                "reward/mean",
                "response/length",
                "routing/agreement",
                "routing/later/agreement",
                "routing/later/kl",
            )
            names += (f"routing/update_{UPDATES}/agreement",)
            run = {metric: mean_of(metric, lines) for metric in names}
            run |= {"before": lines[0]["eval/score"], "eval/score": lines[-1].get("eval/score")}
            results[name] = {"run": run, "layers": found}
    if results:
        units = [unit for result in results.values() for unit in result["layers"].values()]
        save(out, "route-shadow", steps, minutes, results, table(units))


def main() -> None:
    parser = make_parser("route_shadow", __doc__.splitlines()[0], steps=16)
    args = parser.parse_args()
    names = [f"seed{seed}" for seed in range(3)]
    check_names(parser, args, names)
    torch.set_num_threads(1)  # for this process only; its matrices are small
    model = warm_start((REPOSITORY / args.runs).resolve(), MODEL, WARM_START)
    plans = {name: settings_of(seed, model) for seed, name in enumerate(names) if name in (args.only or names)}
    run_all(args, plans, write_results)


if __name__ == "__main__":
    main()
