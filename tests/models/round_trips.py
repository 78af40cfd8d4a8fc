"""What each rank does in test_convert_ranks.py: conversions and loads in turn on the same processes."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.config import ParallelConfig
from megatron_rl.errors import UserError
from megatron_rl.models.build import load
from megatron_rl.models.convert import _parallel_state, convert


def there_and_back(cases: list[tuple[str, dict, str, dict, str]]) -> None:
    """(folder, layout, checkpoint, layout, folder): Hugging Face -> Megatron under one layout, back under the other."""
    for source, one, checkpoint, other, out in cases:
        print(source, one, other, flush=True)
        convert(Path(source), Path(checkpoint), ParallelConfig(**one))
        convert(Path(checkpoint), Path(out), ParallelConfig(**other))


def export(path: str, layout: dict, precision: str) -> dict[str, torch.Tensor]:
    """A folder's weights after loading them into Megatron, exported, as every rank sees them."""
    parallel = ParallelConfig(**layout)
    with _parallel_state(Path(path), parallel):
        model = load(path, parallel=parallel, precision=precision)
        return {name: tensor.clone() for name, tensor in model.export_hf_weights(model.make_chunks())}


def load_error(path: str, layout: dict) -> str:
    """The message with which loading fails on this rank."""
    parallel = ParallelConfig(**layout)
    with _parallel_state(Path(path), parallel):
        try:
            load(path, parallel=parallel, precision="fp32").make_chunks()
        except UserError as error:
            return str(error)
    return ""


def several(calls: list[tuple[str, tuple]]) -> list:
    """Call functions of this module in turn, so that processes start, meet and import Megatron once."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    return [globals()[name](*arguments) for name, arguments in calls]


def quantize(source: str, checkpoint: str, out: str, layout: dict) -> tuple[bool, str]:
    """Write a folder's weights as a checkpoint and as FP8 folder `out`: is it there, and why not."""
    convert(Path(source), Path(checkpoint), ParallelConfig(**layout))
    try:
        convert(Path(checkpoint), Path(out), ParallelConfig(**layout), quantize="fp8")
    except UserError as error:
        dist.barrier()  # rank 0 removes what it has written
        return Path(out).exists() or Path(out + ".partial").exists(), str(error)
    dist.barrier()  # rank 0 writes
    return Path(out).exists(), ""
