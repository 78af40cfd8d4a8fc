"""`megatron-rl plan` prints whether a run fits into memory, how the memory is used, and remedies.

`check_fits` refuses runs that cannot fit.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedConfig

from megatron_rl.checks.memory_plan import EXACT, GB, Estimate, changed, estimate, server_use
from megatron_rl.config import Config, OptimizerConfig, VP2OConfig
from megatron_rl.config.optimizers import OPTIMIZERS
from megatron_rl.config.plan import Kind
from megatron_rl.data.hub import as_id
from megatron_rl.errors import UserError
from megatron_rl.models.parallel_check import read_hf_config
from megatron_rl.models.precision import TRAIN
from megatron_rl.models.shape import Shape

logger = logging.getLogger(__name__)

MEANING = {
    "weights": "weights of the trained model",
    "fp8_weights": "FP8 copies of the weights in Transformer Engine, one per direction of the products",
    "gradients": "sums over all micro-batches",
    "optimizer": "moments, and fp32 weights if bf16 weights are trained",
    "reference": "frozen reference model of algorithm.kl or dpo",
    "masks": "masks of model.keep_zeros",
    "critic": "critic of algorithm.advantage: gae, with its gradients and its own Adam",
    "predictors": "predictors of routes, with their own Adam",
    "reward_models": "frozen reward models of rewards.models",
    "teacher": "teacher of distillation.teacher, with its outputs for a step",
    "batch": "tokens and labels of a step, if all responses have the largest possible length",
    "routes": "expert choices of all tokens of a step",
    "features": "router inputs and logits of cached tokens",
    "anchors": "VP2O's prototypes and probes",
    "push": "buckets of weights that are sent to SGLang",
    "server": "sleeping SGLang server on the same GPU (assumption)",
    "reserve": "CUDA, NCCL, workspaces, fragmentation (assumption)",
    "activations": "tensors that forward passes keep for their backward passes",
    "layer": "backward pass of one layer: recomputed tensors, gradients",
    "dispatch": "copies of tokens that are sent to experts and back",
    "logits": "logits of one chunk of tokens",
    "head": "gradient sums of the head",
    "optimizer_step": "temporaries of the optimizer's update",
    "transform": "temporaries of VP2O's transform",
}
"""{kind of memory on a GPU: its meaning}."""


def plan_command(config: Config, gpus: int, memory_gb: float, *, run: Kind = "train", as_json: bool = False) -> None:
    """Print whether training with this config fits on `gpus` trainer GPUs of `memory_gb` GB (10^9 bytes) each."""
    hf_config = read_hf_config(config.model.path)
    found = estimate(config, hf_config, gpus, run=run)
    report = as_dict(config, hf_config, found, int(memory_gb * GB), run)
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        _print_tables(report)


def as_dict(
    config: Config, hf_config: PreTrainedConfig, found: Estimate, memory: int, run: Kind = "train"
) -> dict[str, Any]:
    """Return the fields that `--json` prints; all sizes are in bytes.

    micro_batches: largest number of micro-batches of an update on a data-parallel rank. pipeline_bubble: share of the time of
    an update's forward and backward passes in which a pipeline stage waits. per_gpu: memory of the pipeline stage that needs
    the most memory. The total of `per_gpu` is the resident memory plus the largest of `phases`, which share memory. fits: True
    if training fits. server: memory use of a server that the trainer starts (rollout.server), on a GPU of the same size.
    """
    usage, shape = found.usage, Shape.from_config(hf_config)
    helps = remedies(config, hf_config, found, usage.largest, run=run)
    best = helps[0] if helps else None
    return {
        "model": as_id(config.model.path),
        "gpus": found.gpus,
        "memory": memory,
        "parameters": asdict(found.counts),
        "per_gpu": {**usage.kinds, "total": usage.total},
        "phases": {name: sum(kinds.values()) for name, kinds in usage.phases.items()},
        "pipeline_stage": usage.stage,
        "micro_batches": found.micro_batches,
        "pipeline_bubble": found.bubble,
        "host_optimizer": found.host,
        "save": found.save,
        "push": found.push,
        "server": server_use(
            config.rollout, config.sync, config.precision.rollout, shape, usage.resident["weights"], memory
        ),
        "fits": found.fits(memory),
        "breaks_first": {
            "kind": usage.largest,
            "bytes": usage.peak[usage.largest],
            "key": best and best.key,
            "value": best and best.value,
        },
        "remedies": [asdict(remedy) for remedy in helps],
    }


def check_fits(config: Config, hf_config: PreTrainedConfig, gpus: int, memory: int, run: Kind = "train") -> None:
    """Refuse a run whose exactly known memory (weights, gradients, optimizer and others) exceeds `memory` bytes per GPU.

    A run gets a warning if it may not fit when all responses have the largest possible length. This estimate uses the
    assumptions of `memory_plan.py`. Errors: UserError.
    """
    found = estimate(config, hf_config, gpus, run=run)
    usage, here = found.usage, f"each GPU has {memory / GB:.1f} GB"
    figures = ", ".join(f"{kind} {usage.resident[kind] / GB:.1f}" for kind in EXACT if usage.resident[kind])
    helps = [
        f"{r.key}: {r.value}" for r in remedies(config, hf_config, found, usage.largest, run=run) if r.key != "gpus"
    ]
    remedy = f"; {helps[0]} needs less memory, and more GPUs do too" if helps else "; use more GPUs"
    if usage.least > memory:
        raise UserError(
            f"config: each of the {gpus} GPUs would need {usage.least / GB:.1f} GB ({figures}) before the first token,"
            f" but {here}{remedy} (`megatron-rl plan` shows the details)"
        )
    if usage.total > memory and os.environ.get("RANK", "0") == "0":
        logger.warning(
            f"each of the {gpus} GPUs may need up to {usage.total / GB:.1f} GB ({figures}), but {here}{remedy}"
            " (`megatron-rl plan` shows the details)"
        )


def _print_tables(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    def gigabytes(size: float) -> str:
        return f"{size / GB:.2f}" if size < 10 * GB else f"{size / GB:.1f}"

    console = Console()
    counts = {name: f"{size / 1e9:.2f} B" for name, size in report["parameters"].items()}
    console.print(
        f"{escape(report['model'])}: {counts['total']} parameters, {counts['experts']} of them in experts,"
        f" {counts['active']} active per token"
    )
    total, memory = report["per_gpu"]["total"], report["memory"]
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for kind, size in report["per_gpu"].items():
        if kind != "total":
            table.add_row(kind, f"{gigabytes(size):>7} GB", f"[dim]{MEANING[kind]}[/]")
    largest = max(report["phases"], key=report["phases"].get)
    color = "green" if report["fits"] else "bold red"
    table.add_row(
        f"[{color}]total[/]", f"[{color}]{gigabytes(total):>7} GB[/]", f"largest use, in the phase '{largest}'"
    )
    console.print(table)
    verdict = "fits" if report["fits"] else "does not fit"
    console.print(f"[{color}]{verdict}[/]: {report['gpus']} trainer GPUs of {gigabytes(memory)} GB each")
    first = report["breaks_first"]
    console.print(f"largest part: {first['kind']}, {gigabytes(first['bytes'])} GB")
    for remedy in report["remedies"]:
        key = "--gpus" if remedy["key"] == "gpus" else f"--{remedy['key']}"
        console.print(f"  {key} {remedy['value']} needs {gigabytes(remedy['saves'])} GB less")
    if report["host_optimizer"]:
        console.print(f"optimizer in host memory: {gigabytes(report['host_optimizer'])} GB per process")
    save, push = report["save"], report["push"]
    console.print(
        f"checkpoint: {gigabytes(save['host_bytes'])} GB of host memory per process,"
        f" {gigabytes(save['host_bytes_per_node'])} GB per node, {gigabytes(save['disk_bytes'])} GB on disk; weight"
        f" push: {gigabytes(push['bytes'])} GB in {push['buckets']} buckets"
    )
    if bubble := report["pipeline_bubble"]:
        console.print(
            f"pipeline: stages are idle for {bubble:.1%} of the passes of an update, with {report['micro_batches']}"
            " micro-batches per data-parallel rank; shorter responses give fewer micro-batches and more idle time"
        )
    server = report["server"]
    cache = (
        f"{gigabytes(server['cache'])} GB for the key-value cache"
        if server["cache"]
        else "nothing for the key-value cache"
    )
    cache += "" if server["fits"] else " [bold red]and does not fit[/]"
    console.print(
        f"GPU of an SGLang server: {gigabytes(server['weights'])} GB of weights; rollout.server.memory_fraction ="
        f" {gigabytes(server['share'])} GB leaves {cache}"
    )


@dataclass(frozen=True)
class Remedy:
    """A change of one key, and its effect on the total."""

    key: str
    """Config key to change, or 'gpus'."""
    value: Any
    saves: int
    """Number of bytes by which the total memory falls."""
    saves_of_kind: int
    """Number of bytes by which the kind of memory given to `remedies` falls."""


def _savers(opt: OptimizerConfig, sharded: bool, train: str, vp2o: VP2OConfig) -> list[tuple[str, Any]]:
    """Return (key, value) changes that save optimizer or gradient memory and that key_rules.MEMORY allows in this config."""
    if TRAIN[train].width == 4:
        return []
    offload = sharded and vp2o.trust_region is None
    tries: list[tuple[str, Any]] = [("optimizer.cpu_offload", 1.0)] if offload and not opt.precision_aware else []
    return tries if vp2o.enabled else [*tries, ("precision.gradients", "bf16")]


def remedies(
    config: Config, hf_config: PreTrainedConfig, now: Estimate, kind: str, *, run: Kind = "train"
) -> list[Remedy]:
    """Return changes of one key that lower the total memory; the change that saves most of `kind` comes first.

    Changes that lead to sizes that do not divide are left out.
    """
    parallel, found = config.parallel, []
    tries = [
        ("model.recompute", "full"),
        ("parallel.expert", 2 * parallel.expert),
        ("parallel.pipeline", 2 * parallel.pipeline),
        ("parallel.tensor", 2 * parallel.tensor),
        *([("parallel.distributed_optimizer", True)] if OPTIMIZERS[config.optimizer.name].sharded else []),
        *_savers(config.optimizer, parallel.distributed_optimizer, config.precision.train, config.vp2o),
        (
            "batch.tokens_per_micro_batch",
            max(config.rollout.context_length - 1, config.batch.tokens_per_micro_batch // 2),
        ),
        ("model.head_chunk_tokens", max(256, config.model.head_chunk_tokens // 2)),
        ("routing.cached_tokens", max(1, config.routing.cached_tokens // 2)),
        *([("algorithm.kl.coefficient", 0.0)] if run == "train" else []),
        *([("dpo.precompute_reference", True)] if run == "dpo" else []),
        ("gpus", 2 * now.gpus),
    ]
    for key, value in tries:
        gpus, other = (value, config) if key == "gpus" else (now.gpus, changed(config, key, value))
        if gpus == now.gpus and other == config:
            continue
        try:
            then = estimate(other, hf_config, gpus, run=run).usage
        except UserError:
            continue
        saves = now.usage.total - then.total
        of_kind = now.usage.kinds.get(kind, 0) - then.kinds.get(kind, 0)
        if saves > now.usage.total // 100:
            found.append(Remedy(key, value, saves, of_kind))
    return sorted(found, key=lambda remedy: (-max(remedy.saves_of_kind, 0), -remedy.saves))
