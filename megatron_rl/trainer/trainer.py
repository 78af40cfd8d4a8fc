"""The trainer and its operations, which all processes call: pack, compute_log_probs, update, export_weights, sleep, wake."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.bridge.models.conversion.model_bridge import WeightConversionTask
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer
from megatron_rl_plugin.fingerprint import fingerprint_tensor, to_integers

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.config import Config
from megatron_rl.data.packing import Batch, Layout, micro_batch_count, pack_all
from megatron_rl.data.sequence import Sequence
from megatron_rl.distributed.parallel import Interrupt, Ranks, process_group
from megatron_rl.metrics.reduce import Metrics, mean, of_update, over_ranks, total
from megatron_rl.models.adapters import adapters_off
from megatron_rl.models.build import Model, load
from megatron_rl.models.families import expert_count
from megatron_rl.models.hf_folder import whole_folder
from megatron_rl.models.shape import engine_routes
from megatron_rl.routing.passes import RoutePass, RouterLosses
from megatron_rl.routing.table import RouteShape
from megatron_rl.trainer.features import DrawnLayers, RecordedLayers, own_part, own_rows
from megatron_rl.trainer.head import RecordedTeacher, TeacherHead
from megatron_rl.trainer.hooks import ALONE, Stage, Step, UpdateContext, UpdateHook
from megatron_rl.trainer.model_pass import ModelPass, PassRunner
from megatron_rl.trainer.objective import ComputeHidden, ComputeValues, LogProbs, Objective, Result, Totals
from megatron_rl.trainer.offload import Residence
from megatron_rl.trainer.optimizer import gather_parameters, make_optimizer, make_scheduler, wrap_ddp
from megatron_rl.trainer.preview import StepPreview, scaled_lr

TEACHER = "distillation.teacher"
"""Name of the teacher model among the companions. Names of reward models have no dot, so they cannot clash with it."""


@dataclass(frozen=True)
class Update:
    """Result of an update."""

    metrics: Metrics
    """Metrics over all micro-batches and ranks."""
    tokens: list[Mapping[str, torch.Tensor]]
    """Per-token values by name for each micro-batch, [T] each (`Result.tokens`); empty on pipeline stages without the head."""
    lr_scale: float = 1.0
    """Factor of the learning rate in this step: below 1 if a hook reduced it, 0 if a hook skipped the step."""
    ends_batch: bool = False
    """True if a hook skips all later updates of the rollout batch."""


class Trainer:
    """The policy with its optimizer and, if requested, its frozen reference."""

    def __init__(
        self,
        config: Config,
        model: Model,
        ranks: Ranks,
        *,
        total_updates: int | None,
        support: SamplingSupport,
        hooks: Iterable[UpdateHook] = (),
        reference: str | None = None,
    ) -> None:
        """Build the model chunks and, unless total_updates is None (for scoring only), the optimizer.

        hooks: update hooks, called in this order. reference: folder of the frozen reference; None for no reference.
        """
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
        self.reference = self._make_reference(reference) if reference else None
        self._export_plan: list[WeightConversionTask] | None = None
        self.ddp: list[DistributedDataParallel] = []
        self._optimizer: ChainedOptimizer | None = None
        self._divisor = torch.ones(())
        self.hooks = list(hooks)
        self.companions: dict[str, Trainer] = {}
        """Other models on the same ranks, such as a critic. They leave the device and return together with this model. This
        trainer's checkpoints also contain the companions that are trained."""
        self.passes = PassRunner(config.model, config.precision, config.batch.tokens_per_micro_batch)
        if total_updates is not None:
            self._prepare_updates(total_updates)
        self.reports = (
            parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            and parallel_state.get_tensor_model_parallel_rank() == 0
        )
        """True if this process reports per-token results: one tensor-parallel rank of the last pipeline stage."""
        self.residence = Residence(self)
        for hook in self.hooks:
            hook.attach(self)

    def add_companions(self, companions: Mapping[str, Trainer]) -> None:
        """Add models on the same ranks, which leave the device and return together with this model."""
        self.companions |= companions

    def part_steps_by(self, separator: str | None) -> None:
        """Set the step separator that the saved model folder of a process reward model contains."""
        self.model = replace(self.model, step_separator=separator)

    def watch(self, interrupt: Interrupt) -> None:
        """Let `interrupt` abort steps of this model and of its companions."""
        for trainer in (self, *self.companions.values()):
            trainer.passes.interrupt = interrupt

    @property
    def trains(self) -> bool:
        """True if the trainer was built for updates and has an optimizer."""
        return self._optimizer is not None

    @property
    def optimizer(self) -> ChainedOptimizer:
        """Megatron's optimizer. Errors: RuntimeError for a trainer that was built for scoring only."""
        if self._optimizer is None:
            raise RuntimeError("this trainer was built for scoring only (total_updates=None)")
        return self._optimizer

    def _prepare_updates(self, total: int) -> None:
        # Hooks that change gradients must run before the reduction, so it cannot overlap with the backward.
        early = not any(hook.changes_gradients for hook in self.hooks)
        parallel, precision = self.config.parallel, self.config.precision
        self.ddp = wrap_ddp(parallel, precision.gradients, self.chunks, reduce_early=early)
        self._optimizer = make_optimizer(self.config.optimizer, parallel, precision.train, self.ddp)
        self.scheduler = make_scheduler(self.config.optimizer, self._optimizer, total)
        settings = self.chunks[0].config
        settings.finalize_model_grads_func = self._finalize
        settings.grad_scale_func = self._optimizer.scale_loss
        waits = [d.no_sync for d in self.ddp]
        settings.no_sync_func = waits if len(waits) > 1 else waits[0]  # pyright: ignore[reportAttributeAccessIssue]: as Megatron's

    def _make_reference(self, folder: str) -> list[GPTModel]:
        if self.model.lora.rank and Path(folder).resolve() == self.model.path.resolve():
            return self.chunks  # adapters off: needs no second copy
        chunks = self.model.make_chunks(weights=folder, adapt=False)
        for chunk in chunks:
            chunk.requires_grad_(False)
            chunk.eval()
        return chunks

    # -- micro-batches ------------------------------------------------------------------------------------------------

    def pack(self, samples: Items[Sequence]) -> list[Batch]:
        """Pack this data-parallel rank's samples into micro-batches. All ranks get the same number of micro-batches."""
        count = micro_batch_count([s.inputs for s in samples], self.config.batch.tokens_per_micro_batch)
        count = self.ranks.maximum(count)
        if self.config.parallel.virtual_pipeline > 1:  # the interleaved schedule runs rounds of `pipeline`
            stages = self.config.parallel.pipeline
            count = -(-count // stages) * stages
        return [batch.to(self.ranks.device) for batch in pack_all([*samples], count, self.layout)]

    # -- passes -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def compute_log_probs(
        self,
        batches: list[Batch],
        chunks: Items[torch.nn.Module] | None = None,
        *,
        support: SamplingSupport | None = None,
        place: UpdateContext = ALONE,
        hooks: Iterable[UpdateHook] | None = None,
    ) -> list[torch.Tensor | None]:
        """Run a forward pass and return log-probs [T] of each micro-batch; None on pipeline stages without the head.

        chunks: chunks of a model other than the policy; such a pass has no hooks. support: sampling support of the log-probs,
        by default the policy's. hooks: hooks to use instead of the trainer's own.
        """
        hooks = [] if chunks is not None else list(self.hooks if hooks is None else hooks)
        support = support or self.support
        with self._observed(hooks, batches, "log_probs", place) as passes:
            results = self._run(ModelPass(self.model, chunks or self.chunks, batches, passes, LogProbs(), support))
        return [result and result.tokens["log_probs"] for result in results]

    @torch.no_grad()
    def compute_values(self, batches: list[Batch]) -> list[torch.Tensor | None]:
        """Return the values [T] at every position of each micro-batch. The model needs a value head. See compute_log_probs."""
        with self._observed([], batches, "log_probs", ALONE) as passes:
            results = self._run(ModelPass(self.model, self.chunks, batches, passes, ComputeValues(), self.support))
        return [result and result.tokens["values"] for result in results]

    @torch.no_grad()
    def teach(self, batches: list[Batch], layers: frozenset[int] = frozenset()) -> None:
        """Run this teacher. Store its last hidden states and the outputs of `layers` in the student's micro-batches."""
        kept = [RecordedLayers(self._feature_rows(batch), layers) for batch in batches if layers]
        with self._observed([], batches, "log_probs", ALONE) as passes:
            results = self._run(
                ModelPass(self.model, self.chunks, batches, passes, ComputeHidden(), self.support, features=kept)
            )
        for batch, result in zip(batches, results, strict=True):
            batch.teacher_hidden = result and result.tokens["hidden"]
        for batch, of_batch in zip(batches, kept, strict=bool(layers)):
            batch.teacher_layers = of_batch.outputs

    def _feature_rows(self, batch: Batch) -> torch.Tensor:
        return own_rows(batch.mask, sequence_parallel=self.chunks[0].config.sequence_parallel)

    def compute_fields(self, batches: list[Batch], needs: frozenset[str], place: UpdateContext = ALONE) -> None:
        """Compute an objective's fields `needs` by forward passes, and add them to the micro-batches (`Objective.needs`)."""
        found: dict[str, list[torch.Tensor | None]] = {}
        if "values" in needs:
            found["values"] = self.compute_values(batches)
        if "old_log_probs" in needs:
            found["old_log_probs"] = self.compute_log_probs(batches, place=place)
        if "reference_log_probs" in needs:
            # The reference's vocabulary is not pruned. Its own safe set would give a log-prob of -inf to tokens that the policy
            # samples, and the policy an infinite KL.
            support = self.support.unpruned
            with adapters_off(self.reference or []):
                found["reference_log_probs"] = self.compute_log_probs(batches, self.reference, support=support)
        teacher = self.companions.get(TEACHER)
        if "teacher_log_probs" in needs and teacher:
            found["teacher_log_probs"] = teacher.compute_log_probs(batches, hooks=[])
        if "teacher_hidden" in needs and teacher:
            teacher.teach(batches, frozenset(layer for _, layer in self.config.distillation.feature_layers))
        for name, values in found.items():
            for batch, of_batch in zip(batches, values, strict=True):
                if of_batch is not None:
                    batch.fields[name] = of_batch

    def update(self, batches: list[Batch], objective: Objective, place: UpdateContext = ALONE) -> Update:
        """Run forward, backward, gradient reduction, clipping and one optimizer step.

        If the gradient norm is not finite, or no token counts in the loss, the step changes nothing, and the metric
        'update/skipped' is 1.

        Errors: UserError from a hook's `check`, before anything is changed.
        """
        self.residence.require("all")
        for ddp in self.ddp:
            ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        totals = self.totals(batches)
        objective = objective.for_update(totals)
        # Gradients are divided by what the objective counts. The router losses are a mean over all tokens.
        weight = objective.divisor(totals) / max(1, totals.inputs)
        routers = [self._router_losses(batch, weight) for batch in batches]
        drawn: list[DrawnLayers] = []
        if objective.teacher is not None and objective.teacher.feature_layers:
            drawn = [DrawnLayers(self._feature_rows(b), b.teacher_layers, objective.teacher) for b in batches]
        with self._observed(self.hooks, batches, "update", place) as passes:
            results = self._run(
                ModelPass(
                    self.model,
                    self.ddp,
                    batches,
                    passes,
                    objective,
                    self.support,
                    features=drawn,
                    routers=routers,
                    teachers=[self._teacher_head(batch, objective) for batch in batches],
                    forward_only=False,
                )
            )
        for batch in () if place.again else batches:
            batch.teacher_hidden, batch.teacher_layers = None, {}  # large, and no longer needed
        measured = [result.metrics for result in results if result] if self.reports else []
        measured += [observer.metrics() for route_pass in passes if route_pass for observer in route_pass.observers]
        measured += [features.metrics() for features in drawn]
        measured += [losses.metrics(place.update + 1) for losses in routers if losses]
        metrics = over_ranks(self.ranks, measured)
        for hook in self.hooks:
            hook.check(metrics)
        step = self._step()
        for hook in self.hooks:
            hook.after_step(step)
        metrics = of_update(metrics | over_ranks(self.ranks, [hook.metrics() for hook in self.hooks]))
        metrics["update/lr"] = mean(step.lr, 1)
        metrics["update/grad_norm"] = mean(step.norm, 1)
        metrics["update/skipped"] = total(float(not step.done and step.scale > 0))
        if step.done:
            self.scheduler.step(1)
        tokens = [result.tokens if result else {} for result in results]
        return Update(metrics, tokens, step.scale, any(hook.ends_batch for hook in self.hooks))

    def _step(self) -> Step:
        """Clip the gradients and step. Skip the step if no token counts, the norm is not finite, or a hook refuses the step.

        Megatron's own check for finite norms is not used: it raises an error or steps on NaN.
        """
        if self.passes.interrupt is not None:
            self.passes.interrupt.disarm()
        found_inf = self.optimizer.prepare_grads()
        clipped_by = self.optimizer.get_grad_norm()
        norm, lr = float(clipped_by), self.optimizer.param_groups[0]["lr"]
        if found_inf or not math.isfinite(norm) or not float(self._divisor):
            return Step(False, norm, lr)
        if any(hook.ends_batch for hook in self.hooks):  # no step is taken, so the other hooks are not asked
            return Step(False, norm, 0.0, 0.0)
        preview = StepPreview(self.optimizer, clipped_by)
        scale = math.prod((hook.before_step(preview) for hook in self.hooks), start=1.0)
        if not scale:
            return Step(False, norm, 0.0, 0.0)
        with scaled_lr(self.optimizer, scale):
            done, _, _ = self.optimizer.step()
        return Step(done, norm, lr * scale, scale)

    def _finalize(self, chunks: list[torch.nn.Module], num_tokens: torch.Tensor, **options) -> None:
        """Reduce the gradients as Megatron does, and divide them by the number of counted tokens (at least 1).

        num_tokens: Megatron's own count, which this method does not use (an integer, 0 except on the last pipeline stage).
        """
        for hook in self.hooks:
            hook.after_backward()
        counted = [result.counted.double() for result in self.passes.results if result and result.counted is not None]
        self._divisor = torch.stack(counted).sum() if counted else torch.zeros_like(num_tokens, dtype=torch.float64)
        finalize_model_grads(chunks, self._divisor, **options)  # which sums the divisor over the ranks
        for hook in self.hooks:
            hook.after_reduction()

    def _router_losses(self, batch: Batch, weight: float) -> RouterLosses | None:
        if not expert_count(self.model.hf_config):
            return None
        settings = self.chunks[0].config
        real = own_part(batch.segments.ids >= 0, sequence_parallel=settings.sequence_parallel)
        return RouterLosses(real, weight)

    def weights_pushed(self) -> None:
        """Tell the hooks that the rollout engine has just received the current weights. Collective."""
        self.residence.require("weights")
        for hook in self.hooks:
            hook.weights_pushed()

    def totals(self, batches: list[Batch]) -> Totals:
        """Return the numbers of counted tokens, sequences and all tokens in the micro-batches of all ranks. Collective."""
        lengths = torch.cat([b.sequence_lengths for b in batches]).tolist()
        tokens = self.ranks.total(round(sum(lengths)), of_leaders=True)
        sequences = self.ranks.total(sum(length > 0 for length in lengths), of_leaders=True)
        inputs = sum(b.inputs for b in batches) if self.reports else 0
        return Totals(tokens, max(1, sequences), self.ranks.total(inputs))  # if all sequences are masked, 1

    def context_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over context-parallel ranks, which hold parts of the same sequences. Not differentiable."""
        if self.config.parallel.context == 1:
            return tensor
        total = tensor.to(self.ranks.device)
        dist.all_reduce(total, group=process_group(parallel_state.get_context_parallel_group()))
        return total.to(tensor.device)

    @contextmanager
    def _observed(
        self, hooks: list[UpdateHook], batches: list[Batch], stage: Stage, place: UpdateContext
    ) -> Iterator[list[RoutePass | None]]:
        """Observe the routers in the pass within the block. Yield a RoutePass per micro-batch; None for a dense model."""
        for hook in hooks:
            hook.before_forward(batches, stage, place)
        tables = [batch.routes for batch in batches if batch.routes]
        observers = [[one for hook in hooks for one in hook.observers(table, stage, place)] for table in tables]
        yield [RoutePass(one) for one in observers] if observers and hooks else [None] * len(batches)
        for hook in hooks:
            hook.after_pass(stage)

    def _run(self, asked: ModelPass) -> list[Result | None]:
        self.residence.require("all")
        return self.passes.run(asked)

    def _teacher_head(self, batch: Batch, objective: Objective) -> TeacherHead | RecordedTeacher | None:
        if objective.teacher is None:
            return None
        if objective.teacher.recorded and batch.top_token_ids is not None and batch.top_log_probs is not None:
            own = self.model.hf_config.vocab_size
            return RecordedTeacher(batch.top_token_ids, batch.top_log_probs, objective.teacher, own)
        if batch.teacher_hidden is None:
            return None
        teacher = self.companions[TEACHER]
        last = teacher.chunks[-1]
        tied = teacher.model.config.share_embeddings_and_output_weights
        weight = last.shared_embedding_or_output_weight() if tied else last.output_layer.get_parameter("weight")
        vocab = min(teacher.model.hf_config.vocab_size, self.model.hf_config.vocab_size)
        return TeacherHead(batch.teacher_hidden, weight, objective.teacher, vocab)

    # -- weights ------------------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full tensors with Hugging Face names, one at a time. Collective: every process iterates to the end.

        Errors: RuntimeError while the weights are off the device.
        """
        return self.model.export_hf_weights(self.chunks, self._exported())

    def export_adapters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the full adapter tensors with PEFT's names on rank 0; nothing on other ranks. Collective."""
        self.residence.require("weights")
        gather_parameters(self.ddp)
        yield from self.model.gather_adapters(self.chunks).items()

    def fingerprints(self) -> dict[str, int]:
        """Return fingerprints of this process's weights, by Megatron's names. Equal fingerprints mean unchanged weights.

        Collective. Errors: RuntimeError while the weights are off the device.
        """
        mine = {
            task.global_param_name: fingerprint_tensor(task.param_weight)
            for task in self.model.merged(self.chunks, self._exported())
            if task.param_weight is not None
        }
        return dict(zip(mine, to_integers([*mine.values()]), strict=True))

    def _exported(self) -> list[WeightConversionTask]:
        self.residence.require("weights")
        gather_parameters(self.ddp)
        if self._export_plan is None:
            self._export_plan = self.model.export_plan(self.chunks, foreign=any(hook.served for hook in self.hooks))
        return self._export_plan

    def save_hf(self, out: Path) -> None:
        """Save the weights as a Hugging Face folder. Collective.

        Errors: RuntimeError while the weights are off the device; UserError as in Model.save_hf.
        """
        self.residence.require("weights")
        gather_parameters(self.ddp)
        self.model.save_hf(self.chunks, out)

    def save_adapter(self, out: Path) -> None:
        """Save the adapters as a folder in PEFT's format. Collective.

        Errors: RuntimeError while the weights are off the device; UserError if the folder cannot be written.
        """
        self.residence.require("weights")
        gather_parameters(self.ddp)
        tensors = self.model.gather_adapters(self.chunks)

        def write() -> None:
            with whole_folder(out, "adapter folder", replace=True) as partial:
                self.model.write_adapters(tensors, partial)

        self.ranks.main_does(write)

    # -- memory -------------------------------------------------------------------------------------------------------

    def sleep(self, *, keep_weights: bool = False) -> None:
        """Free device memory for the rollout engine: weights, gradient buffers, optimizer state, reference, tensors of hooks.

        keep_weights: keep the policy's weights on the device for a weight sync. Until `wake`, passes raise RuntimeError.
        """
        self.residence.leave(keep_weights=keep_weights)
        for companion in self.companions.values():
            companion.sleep()

    def wake(self, *, weights_only: bool = False) -> None:
        """Restore everything on the device, bit for bit, with zero gradients.

        weights_only: restore only the weights, for a weight sync.
        """
        self.residence.come_back(weights_only=weights_only)
        for companion in {} if weights_only else self.companions.values():
            companion.wake()


def route_shape(model: Model) -> RouteShape | None:
    """Return the shape of a model's routes; None for a dense model."""
    if not expert_count(model.hf_config):
        return None
    return engine_routes(model.hf_config).shape


def build_trainer(
    config: Config,
    ranks: Ranks,
    *,
    total_updates: int | None,
    support: SamplingSupport,
    hooks: Collection[UpdateHook] = (),
    value_head: bool = False,
    reference: str | None = None,
    plain: bool = False,
) -> Trainer:
    """Build the trainer of the model folder config.model.path. Its log-probs use the sampling support `support`.

    total_updates: number of updates of the run; None for scoring only. value_head: True for a reward model or critic.
    reference: see Trainer. plain: see `models.build.load`. parallel_state must be initialized. Errors: UserError.
    """
    model = load(
        config.model.path,
        parallel=config.parallel,
        precision=config.precision.train,
        recompute=config.model.recompute,
        moe_dispatcher=config.model.moe_dispatcher,
        moe_router_fusion=config.model.moe_router_fusion,
        moe_permute_fusion=not any(hook.reads_outputs for hook in hooks),
        moe_aux_loss=config.model.moe_aux_loss,
        moe_z_loss=config.model.moe_z_loss,
        freeze=config.model.freeze,
        lora=config.lora,
        seed=config.seed,
        attention_sinks=config.model.attention_sinks,
        flash_attention=config.model.flash_attention,
        value_head=value_head,
        pooling=config.reward_model.pooling,
        plain=plain,
        identical=config.precision.identical,
    )
    return Trainer(config, model, ranks, total_updates=total_updates, support=support, hooks=hooks, reference=reference)
