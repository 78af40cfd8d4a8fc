"""Likelihood of held-out demonstrations and texts under the trainer's model: loss, perplexity, and bits per byte."""

from __future__ import annotations

import json
import math

import numpy as np
import torch

from megatron_rl.checks.eval_sets import EvalSet, overall
from megatron_rl.config import Config
from megatron_rl.data.balance import plan_updates
from megatron_rl.data.packing import Batch
from megatron_rl.data.sequence import Sequence
from megatron_rl.errors import UserError
from megatron_rl.metrics.reduce import Metrics, derived, figures, mean, over_ranks
from megatron_rl.run.run import Run
from megatron_rl.tasks.chat import NO_TEXT
from megatron_rl.tasks.stream import held_out_demonstrations
from megatron_rl.trainer.trainer import Trainer


def held_out(run: Run) -> list[tuple[EvalSet, list[Sequence]]]:
    """Return (evaluation set, its held-out demonstrations and pieces of texts) for each evaluation set of the run."""
    length = run.config.rollout.context_length
    return [(one, held_out_demonstrations(one.held_out, one.program, length)) for one in run.eval_sets]


def likelihoods(run: Run, trainer: Trainer, sets: list[tuple[EvalSet, list[Sequence]]]) -> dict[str, float]:
    """Return the scores of each set (`likelihood`) under its own names. Collective.

    For several named sets, eval/loss is the mean over the sets.
    """
    scores = dict[str, float]()
    for one, sequences in sets:
        scores |= one.named(likelihood(run, trainer, sequences))
    return scores | overall(scores, "eval/loss", run.eval_sets)


def likelihood(run: Run, trainer: Trainer, sequences: list[Sequence]) -> dict[str, float]:
    """Return the scores of the sequences, equal on every process; empty without sequences. Collective.

    eval/loss: mean negative log-likelihood of the trained tokens in nats. eval/perplexity: exponential of eval/loss.
    eval/bits_per_byte: negative log-likelihood in bits of the tokens that encode text, divided by the number of the text's
    UTF-8 bytes. The end-of-sequence token encodes no text, so it counts only in eval/loss and eval/perplexity. If the number of
    bytes is unknown (conversations of an agent), there is no eval/bits_per_byte.
    """
    if not sequences:
        return {}
    [shares] = plan_updates([s.inputs for s in sequences], updates=1, ranks=run.ranks.data_size)
    batches = trainer.pack([sequences[i] for i in shares[run.ranks.data_rank]])
    log_probs = trainer.compute_log_probs(batches)
    measured = [
        _metrics(batch, values)
        for batch, values in zip(batches, log_probs, strict=True)
        if values is not None and trainer.reports
    ]
    return figures(over_ranks(run.ranks, measured)) | {"eval/prompts": float(len(sequences))}


def _metrics(batch: Batch, log_probs: torch.Tensor) -> Metrics:
    nats, tokens = -log_probs.where(batch.mask, 0.0).sum(), batch.mask.sum()
    found = {"eval/loss": mean(nats, tokens), "eval/perplexity": derived(_perplexity, nats, tokens)}
    if "text_bytes" not in batch.fields:
        return found
    text = batch.mask & (batch["text_bytes"] != NO_TEXT)
    nats, size = -log_probs.where(text, 0.0).sum(), batch["text_bytes"].where(text, 0).sum()
    return found | {"eval/bits_per_byte": derived(_bits_per_byte, nats, size)}


def _perplexity(nats: float, tokens: float) -> float:
    return float(np.exp(nats / tokens)) if tokens else math.nan


def _bits_per_byte(nats: float, size: float) -> float | None:
    return nats / math.log(2) / size if size else None


def likelihood_command(config: Config) -> None:
    """Run `megatron-rl eval` with eval.likelihood: print the likelihood of held-out data under the model in model.path."""
    with Run(config, kind="score") as run:
        sets = held_out(run)
        if not any(sequences for _, sequences in sets):
            raise UserError(
                f"data: task '{config.data.task}' has no held-out demonstrations or texts to evaluate on (eval.prompts"
                f" = {config.eval.prompts}): set data.eval_path, or raise eval.prompts"
            )
        run.logger.say(json.dumps(likelihoods(run, run.scorer(config.model.path), sets), indent=2))
