"""`megatron-rl report RUN --attribute`: how much each source contributes to the KL between rollout and trainer.

The trainer scores a recorded batch (rollout.record) again with the weights that sampled it: first in the same way as in the
run, then with one source of the mismatch removed at a time. The removals are: replay SGLang's experts; also replay SGLang's
gate weights; leave out tokens outside the safe set; attention in fp64; all matrix multiplications in fp32. The KL that remains
with all removals comes from SGLang.
"""

from __future__ import annotations

import os
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms.correction import divergence
from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.checks.model_and_machine import activate_flash
from megatron_rl.checks.model_folders import with_folders
from megatron_rl.config import FROM_ENGINE, Config, KLConfig, OptimizerConfig
from megatron_rl.config.load import load_config
from megatron_rl.data.packing import Batch
from megatron_rl.data.sequence import Sequence
from megatron_rl.data.trajectory import Trajectory, load_trajectories
from megatron_rl.distributed import parallel
from megatron_rl.errors import UserError
from megatron_rl.hooks.routing_replay import RoutingReplay
from megatron_rl.metrics import attribution
from megatron_rl.metrics.attribution import Attribution, Source
from megatron_rl.metrics.logger import METRICS_FILE, read_json_lines
from megatron_rl.models.attention import exact_attention
from megatron_rl.models.families import family_named
from megatron_rl.models.parallel_check import check_parallel, read_hf_config
from megatron_rl.models.precision import Machine, check_precision, this_machine
from megatron_rl.run.update_hooks import update_hooks
from megatron_rl.trainer import checkpoint
from megatron_rl.trainer.trainer import Trainer, build_trainer

_RECORD = re.compile(r"step_(\d+)\.rank\d+\.npz")


def attribute_command(run: Path, step: int | None, overrides: list[str]) -> Attribution | None:
    """Compute the attribution, write it to the run's attribution.json, and return it on rank 0. Every process must call this.

    step: 0-based; by default the newest step with both rollouts and weights. overrides: command-line overrides of the run's
    config. Errors: UserError that names what is missing in the run.
    """
    if not (run / "config.yaml").exists():
        raise UserError(f"report: {run} is not the folder of a run (it has no config.yaml)")
    config = with_folders(load_config(run / "config.yaml", overrides), "attribution")
    step, version, weights = _choose(run, config.checkpoint.load, step)
    hf_config, machine = read_hf_config(config.model.path), this_machine()
    check_precision(config.precision, machine, rolls_out=False)
    check_parallel(hf_config, config.parallel, int(os.environ.get("WORLD_SIZE", 1)))
    activate_flash(config.model, config.precision, hf_config, machine)
    ranks = parallel.initialize(config.parallel, config.seed)
    try:
        files = sorted((run / "rollouts").glob(f"step_{step:06d}.rank*.npz"))
        trajectories = [trajectory for file in files for trajectory in load_trajectories(file)]
        found = attribute(config, ranks, trajectories, weights, step, version)
    finally:
        parallel.shutdown()
    if ranks.rank:
        return None
    attribution.save(found, run)
    return found


def _choose(run: Path, loaded: str | None, step: int | None) -> tuple[int, int, Path | None]:
    """Return a recorded step, the step of the weights that sampled it, and their checkpoint (None: the model's folder)."""
    recorded = {int(m[1]) for path in (run / "rollouts").glob("*.npz") if (m := _RECORD.fullmatch(path.name))}
    if not recorded:
        raise UserError(f"report: {run} has no recorded rollouts; set rollout.record: true and run it again")
    weights: dict[int, Path | None] = {0: Path(loaded) if loaded else None}
    weights |= {checkpoint.step_of(path): path for path in checkpoint.complete_checkpoints(run / "checkpoints")}
    refreshed = [
        line for line in read_json_lines(run / METRICS_FILE) if line.get("sync/staleness")
    ]  # with sync.refresh.when: drift
    ages = {line["step"] - 1: int(line["sync/staleness"]) for line in refreshed}
    version = {number: number + 1 - ages.get(number, 1) for number in recorded}
    usable = sorted(number for number in recorded if version[number] in weights)
    if step is None and usable:
        step = usable[-1]
    if step not in usable:
        asked = "" if step is None else f" --step {step}:"
        has = f"steps {', '.join(map(str, usable))} have both" if usable else "no step has both"
        raise UserError(
            f"report:{asked} a step needs its rollouts and the checkpoint of its weights, and {has}; checkpoint.every"
            " and checkpoint.keep decide which checkpoints are kept"
        )
    return step, version[step], weights[version[step]]


def attribute(
    config: Config, ranks: parallel.Ranks, trajectories: list[Trajectory], weights: Path | None, step: int, version: int
) -> Attribution:
    """Score `trajectories` of step `step`, sampled with the weights of step `version`, with each source removed.

    Every process must call this with the same arguments.
    """
    versions = ({span.version for span in t.weight_spans} for t in trajectories)
    usable = [t for t, of in zip(trajectories, versions, strict=True) if of == {str(version)} and t["loss_mask"].any()]
    if not usable:
        raise UserError(
            f"report: no recorded response of step {step} was sampled with the weights of step {version} alone; choose"
            " another step with --step"
        )
    support = SamplingSupport.from_config(config.rollout.sampling, config.pruning)
    try:
        for trajectory in usable:
            support.check_recorded(trajectory.support)
    except ValueError as error:
        raise UserError(f"report: the responses of step {step} were {error}") from None
    samples: list[Sequence] = [*usable[ranks.data_rank :: ranks.data_size]]
    routing = config.routing
    routes, gates = (RoutingReplay("r3", gates=also, give_up_below=routing.give_up_below) for also in (False, True))
    replayed = (gates if routing.replay_gates else routes) if routing.source in FROM_ENGINE else None
    config = _scoring_alone(config)
    own = _Scorer(config, ranks, samples, weights, step)
    dense = own.trainer.layout.routes is None
    without_routes = (
        (dense and config.model.moe_router_fusion, "the fused router cannot replay routes"),
        (dense, "a dense model has no routes"),
    )
    reasons = {
        "routes": (
            *without_routes,
            (replayed, "the run already replays SGLang's"),
            (all(t.routes is None for t in usable), "not recorded: set rollout.routes: true"),
        ),
        "gates": (
            *without_routes,
            (replayed is gates, "the run already replays SGLang's"),
            (all(t.gates is None for t in usable), "not recorded: set rollout.gates: true"),
        ),
        "tail": (
            (config.pruning.enabled, "the run already prunes it"),
            (any(t.kept is not None for t in usable), "the sampler already truncates it"),
        ),
        "precision": ((config.precision.train == "fp32", "the run already trains in fp32"),),
    }
    stays = {name: why for name, cases in reasons.items() if (why := next((w for holds, w in cases if holds), None))}
    removed: dict[str, tuple[str, Tensor | None]] = {}

    def remove(name: str, how: str, scorer: _Scorer, **options: Any) -> None:
        """Score with the source `name` removed. If it cannot be removed, store the reason."""
        if name in stays:
            removed[name] = stays[name], None
        else:
            removed[name] = how, scorer.compare(base, scorer.score(**{"replay": replayed, **options}))

    base = own.score(replay=replayed)
    rho = config.pruning.rho
    few = routed_otherwise(own.trainer.model.hf_config.architectures or [], config.precision.rollout, this_machine())
    remove("routes", f"SGLang's experts replayed{few}", own, replay=routes)
    remove("gates", "SGLang's experts and their gate weights replayed", own, replay=gates)
    remove("tail", f"tokens below {rho:.2g} of the likeliest token left out", own, rho=rho)
    remove("attention", "attention in fp64", own, exact=True)
    whole = _everywhere(ranks, own.compare(base, base))
    dtypes = [p.dtype for chunk in own.trainer.chunks for p in chunk.parameters()]
    del own
    exact = replace(config, precision=replace(config.precision, train="fp32"))
    best = _Scorer(exact, ranks, samples, weights, step)
    best.round_weights(dtypes)
    remove("precision", f"fp32 instead of {config.precision.train}", best)
    most = next((one for name, one in (("gates", gates), ("routes", routes)) if name not in stays), replayed)
    rho = None if "tail" in stays else rho
    remove("all", "all of the above together", best, replay=most, rho=rho, exact=True)

    sources = [
        Source(name, how, None) if sums is None else attribution.source(name, how, *_everywhere(ranks, sums).unbind(1))
        for name, (how, sums) in removed.items()
    ]
    _, kl, tokens = whole.sum(0).tolist()
    return Attribution(step, round(tokens), len(usable), len(trajectories) - len(usable), kl / max(tokens, 1), sources)


def routed_otherwise(architectures: list[str], rollout: str, machine: Machine) -> str:
    """Return a note that SGLang itself routes tokens differently in decode and prefill; an empty text if it does not."""
    family = family_named(architectures)
    rows = family.few_tokens if family else 0
    if not rows or rollout == "fp32" or (machine.gpu or (0, 0)) < (9, 0):
        return ""
    return f"; SGLang's own decode routes up to {rows} tokens by another product than its prefill"


def _scoring_alone(config: Config) -> Config:
    """Return the config without settings that only training needs, or that are not allowed for a single update."""
    algorithm = replace(config.algorithm, kl=KLConfig())
    source = "pr2" if config.routing.source == "pr2" else "none"
    # Scored tokens belong to no update, so predictors look ahead by the average.
    routing = replace(config.routing, source=source, features="trainer", predictor_horizon="constant")
    return replace(config, algorithm=algorithm, routing=routing, optimizer=OptimizerConfig())


def _everywhere(ranks: parallel.Ranks, mine: Tensor) -> Tensor:
    return torch.cat(ranks.gather(mine))


class _Scorer:
    """A trainer that only computes log-probs, always for the same samples."""

    def __init__(
        self, config: Config, ranks: parallel.Ranks, samples: list[Sequence], weights: Path | None, step: int
    ) -> None:
        support = SamplingSupport.from_config(config.rollout.sampling, config.pruning)
        hooks = update_hooks(config, scores_alone=True)
        self.trainer: Trainer = build_trainer(config, ranks, total_updates=None, support=support, hooks=hooks)
        if weights is not None:
            # At the run's first step its predictors are new, whatever weights it started from.
            checkpoint.load_weights(weights, self.trainer, hooks=step > 0)
        self.samples = samples

    @torch.no_grad()
    def round_weights(self, dtypes: list[torch.dtype]) -> None:
        """Round the weights to another trainer's dtypes (one per parameter), because SGLang got the rounded weights."""
        parameters = (p for chunk in self.trainer.chunks for p in chunk.parameters())
        for parameter, dtype in zip(parameters, dtypes, strict=True):
            parameter.copy_(parameter.to(dtype))

    def score(self, *, replay: RoutingReplay | None, rho: float | None = None, exact: bool = False) -> list[Tensor]:
        """Return the KL estimate k3 of each trained token, [n] per micro-batch; [] on ranks without the model's head.

        The estimate is NaN outside of the run's own safe set, where no KL is measured. replay: hook that replays SGLang's
        routes, used instead of the run's hooks. rho: threshold of a safe set; tokens outside of this set count as 0. exact:
        attention in fp64.
        """
        trainer = self.trainer
        hooks = [replay] if replay else trainer.hooks
        self.batches = trainer.pack(self.samples)  # pack again: routers store their inputs of a pass in the batch
        with exact_attention(trainer.chunks) if exact else nullcontext():
            found = trainer.compute_log_probs(self.batches, hooks=hooks)
            pruned: list[Tensor | None] = [None] * len(found)
            if rho is not None:
                support = replace(trainer.support, min_p=rho)
                pruned = trainer.compute_log_probs(self.batches, support=support, hooks=hooks)
        triples = zip(self.batches, found, pruned, strict=True)
        return [self._k3(batch, own, within) for batch, own, within in triples if own is not None]

    def _k3(self, batch: Batch, log_probs: Tensor, pruned: Tensor | None) -> Tensor:
        d = log_probs.double() - batch["rollout_log_probs"].double()
        k3 = torch.where(d.isfinite(), divergence(torch.where(d.isfinite(), d, 0.0), "k3"), torch.nan)
        k3 = k3 if pruned is None else torch.where(pruned > -torch.inf, k3, 0.0)
        return k3[batch.mask]  # padding depends on the precision

    def compare(self, before: list[Tensor], after: list[Tensor]) -> Tensor:
        """Return the `common_sums` of this rank's sequences, [S, 3]; empty on ranks that do not report their results.

        before, after: results of `score` without and with the removal of a source.
        """
        sums = []
        # One result per micro-batch on the pipeline stage with the head; none elsewhere.
        for batch, one, other in zip(self.batches, before, after, strict=False):
            sums.append(attribution.common_sums(one, other, batch.segments.take(batch.mask)).T)
        counts = self.trainer.reports and self.trainer.layout.context_rank == 0
        return torch.cat(sums).cpu() if counts and sums else torch.zeros(0, 3, dtype=torch.float64)
