"""Post-training quantization for serving: calibrate on the task's data, measure the error on held-out data, write `hf/`."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import torch
from transformers import PreTrainedModel

from megatron_rl.compression import quantization
from megatron_rl.config import Config
from megatron_rl.data.sequence import Sequence
from megatron_rl.errors import UserError
from megatron_rl.likelihood import held_out
from megatron_rl.metrics import mismatch
from megatron_rl.ops.distillation_kl import linear_kl
from megatron_rl.ops.linear_log_probs import linear_log_probs
from megatron_rl.run.run import Run

REPORT = "quantization.json"
MEASURED = ("abs_mean", "abs_p99", "ratio_max", "ratio_min")
"""Names of the mismatch metrics that are also defined for tokens that no model sampled."""


def quantize(config: Config) -> None:
    """Run `megatron-rl quantize`: write the quantized model to `hf/` and its error to quantization.json in the run's folder."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("quantize: it runs in one process, which holds the whole model; remove --nproc")
    settings, source, out = config.quantize, Path(config.model.path), config.run_dir / "hf"
    if out.exists():
        raise UserError(f"quantize: {out} exists; remove it, or choose another name")
    quantization.check_source(source, settings.format, settings.keep_layers)
    with Run(config, kind="quantize") as run:
        samples = run.stream.next_demonstrations(settings.calibration_samples, random.Random(f"{config.seed}/quantize"))
        [(_, unseen)] = held_out(run)
        model = quantization.load(source)

        def passes() -> None:
            for sample in samples:
                hidden_states(model, sample)

        quantization.calibrate(model, settings.format, settings.keep_layers, passes)
        report = {
            "format": settings.format,
            "calibration_sequences": len(samples),
            "calibration_tokens": sum(sample.inputs for sample in samples),
            "held_out_sequences": len(unseen),
            **cost(model, unseen),
        }
        quantization.export(model, settings.format, source, out, settings.keep_layers)
        (run.folder / REPORT).write_text(json.dumps(report, indent=2) + "\n")
        run.logger.say(json.dumps(report, indent=2))
        run.logger.say(f"model: {out}")


def cost(model: PreTrainedModel, sequences: list[Sequence]) -> dict[str, float]:
    """Return how much a quantized model differs from the original on the trained tokens of the sequences; {} without tokens.

    kl: mean KL(original || quantized) over the vocabulary, in nats per token. abs_*: absolute difference between the two
    log-probs of a token. ratio_*: extremes of the ratio of the token's probabilities, quantized / original. loss_*: mean
    negative log-likelihood in nats.
    """
    found, kl, nats = mismatch.Mismatch(), 0.0, torch.zeros(2, dtype=torch.float64)
    head = model.lm_head.weight.detach()
    for sequence in sequences:
        with quantization.plain(model):
            before = hidden_states(model, sequence)
        after = hidden_states(model, sequence)
        labels = torch.as_tensor(sequence.tokens[sequence.prompt_length :], dtype=torch.long, device=before.device)
        mask = torch.as_tensor(sequence["loss_mask"], device=before.device)
        old, new = (linear_log_probs(hidden, head, labels, log_rho=None).log_probs for hidden in (before, after))
        found += mismatch.measure(new, old, mask)
        kl += float(linear_kl(after, head, before, head)[mask].double().sum())
        nats -= torch.stack([old[mask].double().sum(), new[mask].double().sum()]).cpu()
    if not found.tokens:
        return {}
    figures, losses = mismatch.figures(found), (nats / found.tokens).tolist()
    return {
        "held_out_tokens": found.tokens,
        "kl": kl / found.tokens,
        **{name: figures[name] for name in MEASURED},
        "loss_original": losses[0],
        "loss_quantized": losses[1],
    }


@torch.no_grad()
def hidden_states(model: PreTrainedModel, sequence: Sequence) -> torch.Tensor:
    """Return the hidden states [labels, hidden] from which the head computes the logits of a sequence's response tokens."""
    tokens = torch.as_tensor(sequence.tokens[:-1], dtype=torch.long, device=model.device)
    return model.base_model(tokens[None], use_cache=False).last_hidden_state[0, sequence.prompt_length - 1 :]
