"""`megatron-rl plan`: whether a run fits, what it needs by kind, and what would help; and the refusal of what cannot fit."""

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
    "weights": "as they are trained",
    "fp8_weights": "Transformer Engine's copies, one a direction of the products",
    "gradients": "buffers of all micro-batches' sums",
    "optimizer": "its moments, and fp32 weights where bf16 ones are trained",
    "reference": "frozen, of algorithm.kl or dpo",
    "masks": "of model.keep_zeros",
    "critic": "of algorithm.advantage: gae, with its gradients and its own Adam",
    "predictors": "of routes, with their own Adam",
    "reward_models": "frozen, of rewards.models",
    "batch": "tokens and labels of a step, if all responses are as long as they may be",
    "routes": "experts of every token of a step",
    "features": "router inputs and logits of cached tokens",
    "anchors": "VP2O's prototypes and probes",
    "push": "buckets of the weights on their way to the engine",
    "server": "an engine that shares the GPU, asleep: assumed",
    "reserve": "CUDA, NCCL, workspaces, fragments: assumed",
    "activations": "what forwards keep for their backwards",
    "layer": "one layer's backward: what is recomputed, gradients",
    "dispatch": "copies of tokens on their way to experts and back",
    "logits": "of one chunk of the head's tokens",
    "head": "gradient sums of the head",
    "optimizer_step": "temporaries of the step",
    "transform": "temporaries of VP2O's transform",
}
"""Kind of bytes on a GPU -> its meaning."""


def plan_command(config: Config, gpus: int, memory_gb: float, *, run: Kind = "train", as_json: bool = False) -> None:
    """Print whether training with this config fits on so many trainer GPUs of so many GB (10^9 bytes)."""
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
    """The fields that `--json` prints; all sizes in bytes.

    micro_batches: of an update on a data-parallel rank; pipeline_bubble: share of its passes in which a stage waits.
    per_gpu: use of the pipeline stage that needs most. Its total is what is resident plus the largest of `phases`, which follow
    one another and share their memory. fits: whether training fits. server: one GPU of an engine of rollout.server with that
    memory.
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
    """Refuse a run whose weights, gradients, optimizer and other certain bytes exceed a GPU's `memory` bytes.

    A run that may not fit if all responses are as long as they may be, under the assumptions of `memory.py`, gets a warning.
    Errors: UserError.
    """
    found = estimate(config, hf_config, gpus, run=run)
    usage, here = found.usage, f"they have {memory / GB:.1f}"
    figures = ", ".join(f"{kind} {usage.resident[kind] / GB:.1f}" for kind in EXACT if usage.resident[kind])
    helps = [
        f"{r.key}: {r.value}" for r in remedies(config, hf_config, found, usage.largest, run=run) if r.key != "gpus"
    ]
    remedy = f"; {helps[0]} needs less, as do more GPUs" if helps else "; use more GPUs"
    if usage.least > memory:
        raise UserError(
            f"config: each of the {gpus} GPUs would need {usage.least / GB:.1f} GB ({figures}) before the first token, and"
            f" {here}{remedy} (megatron-rl plan shows all of it)"
        )
    if usage.total > memory and os.environ.get("RANK", "0") == "0":
        logger.warning(
            f"each of the {gpus} GPUs may need up to {usage.total / GB:.1f} GB ({figures}), and {here}{remedy}"
            " (megatron-rl plan shows all of it)"
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
        f" {counts['active']} active"
    )
    total, memory = report["per_gpu"]["total"], report["memory"]
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for kind, size in report["per_gpu"].items():
        if kind != "total":
            table.add_row(kind, f"{gigabytes(size):>7} GB", f"[dim]{MEANING[kind]}[/]")
    largest = max(report["phases"], key=report["phases"].get)
    color = "green" if report["fits"] else "bold red"
    table.add_row(f"[{color}]total[/]", f"[{color}]{gigabytes(total):>7} GB[/]", f"at most, in the phase '{largest}'")
    console.print(table)
    verdict = "fits" if report["fits"] else "does not fit"
    console.print(f"[{color}]{verdict}[/]: {report['gpus']} trainer GPUs of {gigabytes(memory)} GB each")
    first = report["breaks_first"]
    console.print(f"largest: {first['kind']}, {gigabytes(first['bytes'])} GB")
    for remedy in report["remedies"]:
        key = "--gpus" if remedy["key"] == "gpus" else f"--{remedy['key']}"
        console.print(f"  {key} {remedy['value']} needs {gigabytes(remedy['saves'])} GB less")
    if report["host_optimizer"]:
        console.print(f"optimizer in host memory: {gigabytes(report['host_optimizer'])} GB a process")
    save, push = report["save"], report["push"]
    console.print(
        f"a save: {gigabytes(save['host_bytes'])} GB of host memory a process, {gigabytes(save['host_bytes_per_node'])} GB a"
        f" node, {gigabytes(save['disk_bytes'])} GB on disk; a push: {gigabytes(push['bytes'])} GB in {push['buckets']} buckets"
    )
    if bubble := report["pipeline_bubble"]:
        console.print(
            f"pipeline: its stages wait for {bubble:.1%} of an update's passes, of {report['micro_batches']} micro-batches on a"
            " data-parallel rank; of shorter responses there are fewer, and they wait longer"
        )
    server = report["server"]
    cache = f"{gigabytes(server['cache'])} GB for its cache" if server["cache"] else "nothing for its cache"
    cache += "" if server["fits"] else " [bold red]and does not fit[/]"
    console.print(
        f"a GPU of an engine: {gigabytes(server['weights'])} GB of weights, so that rollout.server.memory_fraction ="
        f" {gigabytes(server['share'])} GB leaves {cache}"
    )


@dataclass(frozen=True)
class Remedy:
    """A change of one key, and what it makes of the total."""

    key: str
    """A key of the config, or 'gpus'."""
    value: Any
    saves: int
    """Bytes by which the total falls."""
    saves_of_kind: int
    """Bytes by which the kind that is asked about falls."""


def _savers(opt: OptimizerConfig, sharded: bool, train: str, vp2o: VP2OConfig) -> list[tuple[str, Any]]:
    """Savers of the optimizer's and gradients' memory that the rest of the config allows (key_rules.MEMORY)."""
    if TRAIN[train].width == 4:
        return []
    offload = sharded and vp2o.trust_region is None
    tries: list[tuple[str, Any]] = [("optimizer.cpu_offload", 1.0)] if offload and not opt.precision_aware else []
    return tries if vp2o.enabled else [*tries, ("precision.gradients", "bf16")]


def remedies(
    config: Config, hf_config: PreTrainedConfig, now: Estimate, kind: str, *, run: Kind = "train"
) -> list[Remedy]:
    """Changes of one key that lower the total, the best for this kind first. Sizes that do not divide are left out."""
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
