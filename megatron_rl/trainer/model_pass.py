"""Forward and backward passes over micro-batches, by Megatron's pipeline schedule: model, head and objective."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.config import ModelConfig, PrecisionConfig
from megatron_rl.data.packing import Batch
from megatron_rl.distributed.parallel import Interrupt
from megatron_rl.models import fp8
from megatron_rl.models.build import Model
from megatron_rl.models.packed import LayerOutputs, PackedBatch
from megatron_rl.models.value_head import value_head
from megatron_rl.ops.device import LateChecks
from megatron_rl.routing.passes import RoutePass, RouterLosses
from megatron_rl.trainer.features import watched_layers
from megatron_rl.trainer.head import HeadRequest, RecordedTeacher, TeacherHead, hidden_head, log_prob_head
from megatron_rl.trainer.objective import (
    ComputeValues,
    HeadOutputs,
    HiddenStates,
    LogProbs,
    Objective,
    Result,
    Values,
)


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of a `ModelPass`: its index, and its entry in each of the `ModelPass` lists (such as `routes`)."""

    index: int
    batch: Batch
    routes: RoutePass | None
    features: LayerOutputs | None
    routers: RouterLosses | None
    teacher: TeacherHead | RecordedTeacher | None


@dataclass(frozen=True)
class ModelPass:
    """Inputs of a pass over micro-batches: a forward pass and, unless `forward_only`, a backward pass."""

    model: Model
    chunks: Items[torch.nn.Module]
    """Chunks of the model or of its frozen reference, plain or wrapped in Megatron's DDP."""
    batches: list[Batch]
    routes: Items[RoutePass | None]
    """Route observers and route replay, one entry per micro-batch."""
    objective: Objective
    support: SamplingSupport
    features: Items[LayerOutputs] = ()
    """Observers of the layers' outputs, one per micro-batch; empty if there are none."""
    routers: Items[RouterLosses | None] = ()
    """Router balancing losses, one per micro-batch; empty if there are none."""
    teachers: Items[TeacherHead | RecordedTeacher | None] = ()
    """The teacher's outputs for distillation, one per micro-batch; empty if there are none."""
    forward_only: bool = True

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches in order."""
        nobody: list[None] = [None] * len(self.batches)
        parts = (self.routes, self.features or nobody, self.routers or nobody, self.teachers or nobody)
        return (MicroBatch(*of_one) for of_one in zip(range(len(self.batches)), self.batches, *parts, strict=True))

    def that_scores(self) -> ModelPass:
        """Return a forward-only pass over the same micro-batches that computes log-probs or values, without observers."""
        objective = ComputeValues() if self.model.value_head else LogProbs()
        routes = [None] * len(self.batches)
        return ModelPass(self.model, self.chunks, self.batches, routes, objective, self.support)


class PassRunner:
    """Runs one pass at a time. `results` fills up while the micro-batches of a pass run."""

    def __init__(self, settings: ModelConfig, precision: PrecisionConfig, sequence_length: int) -> None:
        """Create the runner. sequence_length: tokens of a micro-batch; it sets the size of tensors between pipeline stages."""
        self.settings = settings
        self.precision = precision
        self.sequence_length = sequence_length
        self.interrupt: Interrupt | None = None
        """Request that can abort a step."""
        self.results: list[Result | None] = []
        """Result of each micro-batch of the current pass; None on pipeline stages without the head; empty between passes."""

    def run(self, asked: ModelPass) -> list[Result | None]:
        """Run a pass and return its results.

        With delayed FP8 scaling, the first call starts with an additional forward pass, which measures the scales.
        """
        if asked.model.recipe.fp8_recipe != "delayed":
            return self._forward_backward(asked)
        if not fp8.calibrated(asked.chunks):
            with torch.no_grad():
                self._forward_backward(asked.that_scores())
            fp8.calibrate()
        with fp8.amaxes_kept(asked.chunks) if asked.forward_only else nullcontext():
            return self._forward_backward(asked)

    def _forward_backward(self, asked: ModelPass) -> list[Result | None]:
        chunks = asked.chunks
        for chunk in chunks:
            chunk.train(not asked.forward_only)
        results: list[Result | None] = [None] * len(asked.batches)
        self.results = results
        data: list[Iterator[MicroBatch]] = [asked.micro_batches() for _ in chunks]
        late = LateChecks()
        if self.interrupt is not None:
            self.interrupt.look()
        with watched_layers(chunks if asked.features else ()):
            get_forward_backward_func()(
                forward_step_func=partial(self.forward_step, asked=asked, late=late),
                data_iterator=data if len(chunks) > 1 else data[0],
                model=[*chunks] if len(chunks) > 1 else chunks[0],
                num_microbatches=len(asked.batches),
                seq_length=self.sequence_length,
                micro_batch_size=1,
                forward_only=asked.forward_only,
            )
        late.look()
        self.results = []  # so that the tensors live no longer than the step that uses them
        return results

    def forward_step(
        self, iterator: Iterator[MicroBatch], chunk: torch.nn.Module, *, asked: ModelPass, late: LateChecks
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict]]]:
        """Run the chunk on the next micro-batch; return its output and the loss function (Megatron's `forward_step_func`)."""
        mine = next(iterator)
        batch = mine.batch
        if self.interrupt is not None and self.interrupt.deep:
            self.interrupt.look()
        head, request = self._head(asked, mine, late)
        values = chunk(
            input_ids=batch.tokens,
            position_ids=batch.position_ids,
            attention_mask=None,
            packed_seq_params=_packed(mine),
            output_processor=head,
            output_processor_context=request,
        )

        def loss(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
            result = asked.objective(batch, _outputs(asked, values))
            tokens = batch.mask.sum()
            counted = tokens if result.counted is None else result.counted
            self.results[mine.index] = replace(result, loss=result.loss.detach(), counted=counted)
            return result.loss, tokens.int(), {}

        return values, loss

    def _head(
        self, asked: ModelPass, mine: MicroBatch, late: LateChecks
    ) -> tuple[Callable[..., torch.Tensor], HeadRequest | torch.Tensor | None]:
        batch, objective, support = mine.batch, asked.objective, asked.support
        if asked.model.value_head:
            return value_head, None
        if objective.reads_hidden:
            return hidden_head, batch.label_rows

        def token_loss(log_probs: torch.Tensor, entropy: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
            entropy = torch.zeros_like(log_probs) if entropy is None else entropy
            return objective(batch.take(rows), HeadOutputs(log_probs, entropy, torch.zeros_like(entropy))).loss

        return log_prob_head, HeadRequest(
            labels=batch.labels,
            rows=batch.label_rows,
            temperature=support.temperature,
            log_rho=support.log_rho,
            kept=batch.kept,
            with_entropy=objective.with_entropy,
            vocab_size=asked.model.hf_config.vocab_size,
            chunk_tokens=self.settings.head_chunk_tokens,
            token_loss=token_loss if objective.per_token else None,
            late=late,
            fp32_logits=self.precision.fp32_lm_head,
            identical=self.precision.identical,
            teacher=mine.teacher,
            smooths=objective.label_smoothing > 0,
        )


def _outputs(asked: ModelPass, values: torch.Tensor) -> Values | HiddenStates | HeadOutputs:
    if asked.objective.reads_hidden:
        return HiddenStates(values)
    return Values(*values) if asked.model.value_head else HeadOutputs(*values)


def _packed(mine: MicroBatch) -> PackedBatch:
    """Return the sequence borders for attention, together with the micro-batch's observers and route replay."""
    batch, borders = mine.batch, mine.batch.cu_seqlens
    return PackedBatch(
        qkv_format="thd",
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        cu_seqlens_q_padded=borders,
        cu_seqlens_kv_padded=borders,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
        places=batch.places,
        routing=mine.routes,
        features=mine.features,
        router_losses=mine.routers,
    )
