"""The trainer's verbs: pack, compute_log_probs, update, export_weights, sleep, wake. Every process calls every verb."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_rl.config import Config
from megatron_rl.data.packing import Batch, Layout, micro_batch_count, pack_all
from megatron_rl.data.sequence import Sequence
from megatron_rl.metrics.reduce import Metrics, figures, mean, over_ranks, total
from megatron_rl.models.build import Model, load
from megatron_rl.models.packed import PackedBatch
from megatron_rl.models.parallel_check import expert_count
from megatron_rl.models.router import routers
from megatron_rl.ops.late_checks import LateChecks
from megatron_rl.rollout.routes import RouteLayout
from megatron_rl.rollout.sampling import SamplingSupport
from megatron_rl.routing.metrics import route_sums
from megatron_rl.routing.predictors import Predictors
from megatron_rl.routing.replay import PREDICTING, PredictorLoss, RoutePass
from megatron_rl.routing.table import RouteShape
from megatron_rl.trainer.agreement import check_agreement
from megatron_rl.trainer.head import HeadRequest, log_prob_head
from megatron_rl.trainer.objective import HeadOutputs, LogProbs, Objective, Result, Totals
from megatron_rl.trainer.offload import Residence
from megatron_rl.trainer.optimizer import gather_parameters, make_optimizer, make_scheduler, wrap_ddp
from megatron_rl.trainer.parallel import Ranks
from megatron_rl.vp2o.preview import StepPreview, owned_ranges, scaled_lr
from megatron_rl.vp2o.transform import PREFIX, Stein
from megatron_rl.vp2o.trust_region import TrustRegion, Verdict


@dataclass(frozen=True)
class Step:
    """What became of one optimizer step."""

    done: bool
    norm: float
    """Of all gradients, before clipping."""
    verdict: Verdict | None = None
    """Of the trust region, where there is one and the gradients are finite."""


@dataclass(frozen=True)
class Update:
    """What an update leaves behind."""

    metrics: Metrics
    """Over all micro-batches and ranks."""
    tokens: list[Mapping[str, torch.Tensor]]
    """[T] values by name of each micro-batch (`Result.tokens`); nothing on pipeline stages without the head."""
    lr_scale: float = 1.0
    """Share of the learning rate at which the step was taken: below 1 where the trust region confined it, 0 where it left it
    out."""
    sums: Mapping[str, float] = field(default_factory=dict)
    """What routers and VP2O measured."""


class Trainer:
    """The policy with its optimizer, and its frozen reference where one is asked for."""

    def __init__(
        self, config: Config, model: Model, ranks: Ranks, *, total_updates: int | None, support: SamplingSupport
    ) -> None:
        """total_updates: of the run; None: it scores alone, and has neither gradients nor an optimizer."""
        self.config = config
        self.model = model
        self.ranks = ranks
        self.support = support
        self.layout = Layout(
            tensor=config.parallel.tensor,
            tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
            context=config.parallel.context,
            context_rank=parallel_state.get_context_parallel_rank(),
            routes=None if config.model.moe_router_fusion else route_shape(model),
            cached_tokens=config.routing.cached_tokens,
            multiple=model.recipe.multiple if torch.cuda.is_available() else 1,
            vocabulary=model.hf_config.vocab_size,
            all_reduce=self.context_sum if config.parallel.context > 1 else None,
        )
        self.chunks = model.make_chunks()
        self.predictors = self._make_predictors()
        self.reference = self._make_reference() if config.algorithm.kl.coefficient > 0 else None
        self._export_plan: list | None = None
        self.ddp: list[DistributedDataParallel] = []
        self.optimizer: MegatronOptimizer | None = None
        self.stein: Stein | None = None
        self.trust_region: TrustRegion | None = None
        if total_updates is not None:
            self._prepare_updates(total_updates)
        self.reports = (
            parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            and parallel_state.get_tensor_model_parallel_rank() == 0
        )
        """Whether this process's per-token results count: those of the last stage, once per tensor-parallel group."""
        self.residence = Residence(self)

    def _prepare_updates(self, total: int) -> None:
        self.ddp = wrap_ddp(self.config, self.chunks)
        self.optimizer = make_optimizer(self.config, self.ddp)
        self.scheduler = make_scheduler(self.config.optimizer, self.optimizer, total)
        settings = self.chunks[0].config
        settings.finalize_model_grads_func = self._finalize
        settings.grad_scale_func = self.optimizer.scale_loss
        settings.no_sync_func = [d.no_sync for d in self.ddp] if len(self.ddp) > 1 else self.ddp[0].no_sync
        vp2o = self.config.vp2o
        if vp2o.enabled:
            self.stein = Stein(vp2o, self.chunks)
            self._owned = owned_ranges(self.optimizer)
        if vp2o.enabled and vp2o.trust_region is not None:
            self.trust_region = TrustRegion(vp2o, self.stein, lambda value: max(self.ranks.gather(value)))

    def _make_reference(self) -> list[torch.nn.Module]:
        chunks = self.model.make_chunks(weights=self.config.algorithm.kl.reference)
        for chunk in chunks:
            chunk.requires_grad_(False)
            chunk.eval()
        return chunks

    def _make_predictors(self) -> Predictors | None:
        """None where none is asked for, or this pipeline stage has no MoE layer."""
        if self.config.routing.source not in PREDICTING:
            return None
        found = dict(routers(self.chunks))
        for router in found.values():
            router.add_predictor()
        return Predictors(found.items(), self.config.optimizer, self.config.routing) if found else None

    # -- micro-batches ------------------------------------------------------------------------------------------------

    def pack(self, samples: list[Sequence]) -> list[Batch]:
        """This data-parallel rank's samples as micro-batches, equally many on all ranks."""
        count = micro_batch_count([s.inputs for s in samples], self.config.batch.tokens_per_micro_batch)
        count = self.ranks.maximum(count)
        if self.config.parallel.virtual_pipeline > 1:  # the interleaved schedule works in rounds of `pipeline`
            stages = self.config.parallel.pipeline
            count = -(-count // stages) * stages
        return [batch.to(self.ranks.device) for batch in pack_all(samples, count, self.layout)]

    # -- passes -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def compute_log_probs(
        self,
        batches: list[Batch],
        chunks: list[torch.nn.Module] | None = None,
        *,
        support: SamplingSupport | None = None,
        learn_routes: bool = True,
    ) -> list[torch.Tensor | None]:
        """Forward alone: log-probs [T] of each micro-batch; None on pipeline stages without the head.

        chunks: of another model than the policy. support: under which they are, by default the policy's. The policy's own
        pass is that of the old snapshot: routers record their routes and features; their inputs, which are most of these, only
        where an update of these micro-batches will `learn_routes`.
        """
        learn = self.config.routing.predictor_loss if learn_routes and self.predictors else None
        passes = self._passes(batches, "log_probs", learn) if chunks is None else [None] * len(batches)
        probes = self.trust_region if chunks is None else None
        if probes:
            probes.probe(passes)
        results = self._run(
            chunks or self.chunks, batches, passes, LogProbs(), support or self.support, forward_only=True
        )
        if probes:
            probes.probed(passes)
        return [result and result.tokens["log_probs"] for result in results]

    def compute_fields(self, batches: list[Batch], needs: frozenset[str], *, learn_routes: bool = True) -> None:
        """Add to the micro-batches what an objective needs, each by a pass over them (`Objective.needs`)."""
        found: dict[str, list[torch.Tensor | None]] = {}
        if "old_log_probs" in needs:
            found["old_log_probs"] = self.compute_log_probs(batches, learn_routes=learn_routes)
        if "reference_log_probs" in needs:
            # It is not pruned: its own safe set would give tokens that the policy samples a log-prob of -inf, and the policy an
            # infinite KL.
            support = replace(self.support, min_p=0.0)
            found["reference_log_probs"] = self.compute_log_probs(batches, self.reference, support=support)
        for name, values in found.items():
            for batch, of_batch in zip(batches, values, strict=True):
                if of_batch is not None:
                    batch.fields[name] = of_batch

    def update(
        self,
        batches: list[Batch],
        objective: Objective,
        *,
        learn_routes: bool = False,
        rollout_batch: list[list[Batch]] | None = None,
    ) -> Update:
        """Forward, backward, gradient reduction, clipping, one optimizer step.

        learn_routes: route predictors learn too, from the routers as they are now. rollout_batch: that of all updates,
        over which VP2O counts co-activation. A step whose gradient norm is not finite changes nothing and is reported as
        'update/skipped' = 1; one that the trust region refuses changes nothing, as 'update/rejected' = 1.

        Errors: UserError, before anything is changed, where engine and trainer agree less than rollout.agreement_floor.
        """
        self.residence.require("all")
        for ddp in self.ddp:
            ddp.train()
            ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        totals = self.totals(batches)
        objective = objective.for_update(batches, totals, self._total_of)
        learn = self.config.routing.predictor_loss if learn_routes and self.predictors else None
        passes = self._passes(batches, "update", learn)
        if self.stein:
            self.stein.begin(batch.routes for one in rollout_batch or [batches] for batch in one)
        if self.trust_region:
            self.trust_region.probe(passes)
        results = self._run(self.ddp, batches, passes, objective, self.support, forward_only=False)
        if self.trust_region:
            self.trust_region.probed(passes)
        metrics = over_ranks(self.ranks, [result.metrics for result in results if result] if self.reports else [])
        sums = self._total(route_sums(passes) | (self.stein.sums() if self.stein else {}))
        check_agreement(figures(metrics), sums, totals.tokens, self.config.rollout.agreement_floor)
        lr = self.optimizer.param_groups[0]["lr"]
        step = self._step()
        scale = step.verdict.scale if step.verdict else 1.0
        metrics["update/lr"] = mean(lr * scale, 1)
        if self.config.routing.source in PREDICTING:
            learn = learn if lr * scale else None  # what is rejected changes no predictor either
            failed = bool(learn) and not self.predictors.step(passes, lr * scale)
            metrics["update/predictors_skipped"] = total(float(self.ranks.maximum(int(failed))))
        metrics["update/grad_norm"] = mean(step.norm, 1)
        metrics["update/skipped"] = total(float(not step.done and not step.verdict))
        if self.trust_region:
            metrics["update/rejected"] = total(float(scale == 0.0))
            metrics["update/backtracks"] = total(float(step.verdict.backtracks if step.verdict else 0))
            shifts = step.verdict.shifts if step.verdict else {}
            sums |= self._total({f"{PREFIX}{layer}/shift": shift for layer, shift in shifts.items()})
        if step.done:
            self.scheduler.step(1)
        return Update(metrics, [result.tokens if result else {} for result in results], scale, sums)

    def _step(self) -> Step:
        """Clip and step, unless the norm is not finite (Megatron's own check raises, or steps on NaN) or the trust region
        refuses it."""
        found_inf = self.optimizer.prepare_grads()
        clipped_by = self.optimizer.get_grad_norm()
        norm = float(clipped_by)
        if found_inf or not math.isfinite(norm):
            return Step(False, norm)
        verdict = self.trust_region.judge(StepPreview(self.optimizer, clipped_by)) if self.trust_region else None
        if verdict and not verdict.scale:
            return Step(False, norm, verdict)
        with scaled_lr(self.optimizer, verdict.scale if verdict else 1.0):
            done, _, _ = self.optimizer.step()
        if self.stein:
            self.stein.weights_changed()
        return Step(done, norm, verdict)

    def _finalize(self, chunks: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **options) -> None:
        """Megatron's reduction of the gradients, with the Stein transform around it."""
        if self.stein:
            self.stein.attract()
        finalize_model_grads(chunks, num_tokens, **options)
        if self.stein:
            self.stein.repel(self._owned)

    def weights_pushed(self) -> None:
        """The rollout engine has just got the weights as they are: VP2O's trust region is around them. Collective."""
        self.residence.require("weights")
        if self.trust_region:
            self.trust_region.anchor()

    def totals(self, batches: list[Batch]) -> Totals:
        """Counted tokens and sequences of these micro-batches over all ranks. Collective."""
        lengths = torch.cat([b.sequence_lengths for b in batches]).tolist()
        tokens = self.ranks.total(round(sum(lengths)), of_leaders=True)
        return Totals(tokens, self.ranks.total(sum(length > 0 for length in lengths), of_leaders=True))

    def _total_of(self, value: float) -> float:
        """Sum over the ranks whose per-token results count. Collective."""
        return sum(self.ranks.gather(value if self.reports else 0.0))

    def context_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the context-parallel ranks, which hold the other parts of the same sequences (not differentiable)."""
        if self.config.parallel.context == 1:
            return tensor
        total = tensor.to(self.ranks.device)
        dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
        return total.to(tensor.device)

    def _passes(
        self, batches: list[Batch], stage: Literal["log_probs", "update"], learn: PredictorLoss | None = None
    ) -> list[RoutePass | None]:
        """What the routers of the policy do with each micro-batch; None for a dense model."""
        source, shape, gradients = self.config.routing.source, self.layout.routes, {}
        if shape is None:
            return [None] * len(batches)
        vp2o, options = self.config.vp2o, {"count_pairs": self.stein is not None}
        if self.stein and stage == "update":
            options |= {"orthogonality": vp2o.orthogonality, "orthogonality_tokens": vp2o.orthogonality_tokens}
        return [RoutePass(b.routes, source, shape.experts, stage, learn, gradients, **options) for b in batches]

    def _run(
        self,
        chunks: list[torch.nn.Module],
        batches: list[Batch],
        passes: list[RoutePass | None],
        objective: Objective,
        support: SamplingSupport,
        *,
        forward_only: bool,
    ) -> list[Result | None]:
        """What the objective makes of each micro-batch; None on pipeline stages without the head."""
        self.residence.require("all")
        if forward_only:
            for chunk in chunks:
                chunk.eval()
        results: list[Result | None] = [None] * len(batches)
        data = [zip(range(len(batches)), batches, passes, strict=True) for _ in chunks]
        late = LateChecks()
        step = partial(self._forward_step, objective=objective, support=support, results=results, late=late)
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=data if len(chunks) > 1 else data[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(batches),
            seq_length=self.config.batch.tokens_per_micro_batch,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        late.look()
        return results

    def _forward_step(
        self,
        iterator: Iterator[tuple[int, Batch, RoutePass | None]],
        chunk: torch.nn.Module,
        *,
        objective: Objective,
        support: SamplingSupport,
        results: list[Result | None],
        late: LateChecks,
    ):
        index, batch, route_pass = next(iterator)

        def token_loss(log_probs: torch.Tensor, entropy: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
            entropy = torch.zeros_like(log_probs) if entropy is None else entropy
            return objective(batch.take(rows), HeadOutputs(log_probs, entropy, torch.ones_like(entropy))).loss

        borders = batch.cu_seqlens
        packed = PackedBatch(
            qkv_format="thd",
            cu_seqlens_q=borders,
            cu_seqlens_kv=borders,
            cu_seqlens_q_padded=borders,
            cu_seqlens_kv_padded=borders,
            max_seqlen_q=batch.max_seqlen,
            max_seqlen_kv=batch.max_seqlen,
            layout=batch.layout,
            routing=route_pass,
        )
        values = chunk(
            input_ids=batch.tokens,
            position_ids=batch.position_ids,
            attention_mask=None,
            packed_seq_params=packed,
            output_processor=log_prob_head,
            output_processor_context=HeadRequest(
                batch.labels,
                batch.label_rows,
                support.temperature,
                support.log_rho,
                batch.kept,
                objective.with_entropy,
                self.model.hf_config.vocab_size,
                self.config.model.head_chunk_tokens,
                token_loss if objective.per_token else None,
                late,
                self.config.precision.fp32_lm_head,
            ),
        )

        def loss(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
            result = objective(batch, HeadOutputs(*values))
            results[index] = replace(result, loss=result.loss.detach())
            return result.loss, batch.mask.sum().int(), {}

        return values, loss

    def _total(self, mine: dict[str, float]) -> dict[str, float]:
        """Add up what routers measured on every rank, as each has tokens or layers of its own."""
        total: dict[str, float] = {}
        for part in self.ranks.gather(mine):
            for key, value in part.items():
                total[key] = total.get(key, 0.0) + value
        return total

    # -- weights ------------------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full Hugging Face tensors, one at a time (a collective: every process iterates to the end).

        Errors: RuntimeError while the weights are off the device.
        """
        self.residence.require("weights")
        gather_parameters(self.ddp)
        if self._export_plan is None:  # an engine has predictors where it records the routes
            with_predictors = self.config.routing.source == "pr3"
            self._export_plan = self.model.export_plan(self.chunks, predictors=with_predictors)
        return self.model.export_hf_weights(self.chunks, self._export_plan)

    def save_hf(self, out: Path) -> None:
        """The weights as a Hugging Face folder. Collective. Errors: as export_weights; UserError as Model.save_hf."""
        self.residence.require("weights")
        gather_parameters(self.ddp)
        self.model.save_hf(self.chunks, out)

    # -- memory -------------------------------------------------------------------------------------------------------

    def sleep(self, *, keep_weights: bool = False) -> None:
        """Leave the device to the rollout engine: weights, gradient buffers, optimizer state, reference and predictors.

        keep_weights: the policy's weights stay, for a push. Every pass raises RuntimeError until `wake`.
        """
        self.residence.leave(keep_weights=keep_weights)

    def wake(self, *, weights_only: bool = False) -> None:
        """Come back, bit for bit as before, with gradients of zero. weights_only: the policy's weights alone, for a push."""
        self.residence.come_back(weights_only=weights_only)


def route_shape(model: Model) -> RouteShape | None:
    """What the routes of a model look like; None for a dense one."""
    if not expert_count(model.hf_config):
        return None
    return RouteLayout.from_config(model.hf_config.to_dict()).kept


def build_trainer(config: Config, ranks: Ranks, *, total_updates: int | None, support: SamplingSupport) -> Trainer:
    """The trainer of the folder config.model.path, whose log-probs are those under `support`.

    total_updates: of the run; None: for scoring alone. parallel_state must be initialised. Errors: UserError.
    """
    model = load(
        config.model.path,
        parallel=config.parallel,
        precision=config.precision.train,
        recompute=config.model.recompute,
        moe_dispatcher=config.model.moe_dispatcher,
        moe_router_fusion=config.model.moe_router_fusion,
        moe_permute_fusion=not (config.vp2o.enabled and config.vp2o.orthogonality),
        moe_aux_loss=config.model.moe_aux_loss,
        freeze_router=config.model.freeze_router,
    )
    return Trainer(config, model, ranks, total_updates=total_updates, support=support)
