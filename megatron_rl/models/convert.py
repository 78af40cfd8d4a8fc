"""Hugging Face safetensors <-> Megatron distributed checkpoint, bit-exact, under any parallel layout on either side.

A Megatron checkpoint is a folder of torch.distributed.checkpoint files with a subfolder `hf/`, which holds config.json and the
tokenizer. The trainer's own checkpoints have this form. A single process without a GPU streams the weights and holds only a
few tensors in memory, whatever the model's size (`streamed_convert.py`). With several processes, each holds its share of the
model plus one tensor. In `megatron_to_hf`, rank 0 also holds the tensors of one output file. After the conversion, the result
is read again and compared with the checksums of the written tensors.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from megatron.bridge.models.conversion.model_bridge import WeightConversionTask
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.transformer.module import MegatronModule
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_rl.config import ParallelConfig
from megatron_rl.config.plan import expert_tensor_size
from megatron_rl.distributed.processes import join
from megatron_rl.errors import UserError, together
from megatron_rl.models import fp8
from megatron_rl.models.build import Model, load
from megatron_rl.models.distributed_checkpoint import load_weights, read, verify_files, without_extra_state, write
from megatron_rl.models.families import architecture, is_classifier
from megatron_rl.models.hf_folder import (
    SHARD_BYTES,
    Checksums,
    check_weight_files,
    copy_metadata,
    read_weights,
    whole_folder,
    write_weights,
)
from megatron_rl.models.parallel_check import check_parallel, one_line, read_hf_config
from megatron_rl.models.peft_folder import CONFIG, merge_folder
from megatron_rl.models.streamed_convert import FolderSource, checkpoint_tasks, shard_bytes

METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}
"""Megatron's options for sharded weights, the same as in the trainer's checkpoints."""


def convert(
    source: Path,
    out: Path,
    parallel: ParallelConfig,
    quantize: Literal["fp8"] | None = None,
    *,
    base: Path | None = None,
    adapter: bool = False,
) -> Path:
    """Convert a Hugging Face folder to a checkpoint, or a checkpoint to a Hugging Face folder; return `out`.

    Every rank calls this function (torchrun, or one process).

    quantize: write a Hugging Face folder with block FP8 weights; works for both kinds of source. The source may also be a
    folder in PEFT's format, or a checkpoint with adapters. Its adapters are merged into the weights of the folder `base` (by
    default, the model that they were trained on). With `adapter`, the result is a folder in PEFT's format instead.
    Errors: UserError if source is neither a Hugging Face folder nor a checkpoint, or if out exists.
    """
    if out.exists():
        raise UserError(f"convert: {out} exists; remove it or choose another folder")
    adapters = next((folder for folder in (source, source / "adapter") if (folder / CONFIG).is_file()), None)
    if adapters is not None:
        return _convert_adapters(source, adapters, out, quantize, base, adapter=adapter)
    if base or adapter:
        raise UserError(
            f"convert: {'--base' if base else '--adapter'} is only for adapters, but {source} has none; leave it out"
        )
    if (source / "hf" / "config.json").is_file():
        return megatron_to_hf(source, out, parallel, quantize)
    if not (source / "config.json").is_file():
        raise UserError(
            f"convert: {source} is neither a Hugging Face folder (config.json) nor a checkpoint (hf/config.json)"
        )
    if quantize:
        return quantize_folder(source, out)
    return hf_to_megatron(source, out, parallel)


def _convert_adapters(
    source: Path, adapters: Path, out: Path, quantize: str | None, base: Path | None, *, adapter: bool
) -> Path:
    """Convert a source that holds adapters (see `convert`) on rank 0. Merging is little work, so other ranks do nothing."""
    if quantize:
        raise UserError(
            f"convert: {source} has adapters; write the whole model first, then convert the result with --quantize"
        )
    if int(os.environ.get("RANK", "0")):
        return out
    if adapter:
        with whole_folder(out) as partial:
            shutil.copytree(adapters, partial)
    else:
        merge_folder(adapters, out, base, source / "hf" if (source / "hf").is_dir() else None)
    return out


def hf_to_megatron(hf_dir: str | Path, out_dir: str | Path, parallel: ParallelConfig) -> Path:
    """Write the folder's weights as a Megatron distributed checkpoint, sharded by `parallel`."""
    hf_dir, out = Path(hf_dir), Path(out_dir)
    check_weight_files(hf_dir)
    with _parallel_state(hf_dir, parallel):
        model = _model(hf_dir, parallel)
        chunks = model.make_chunks(load_weights=False)
        total, checksums, source = sum(1 for chunk in chunks for _ in chunk.parameters()), Checksums(), None
        with _bar(f"reading {hf_dir}", total) as advance, _finished_folder(out) as partial:
            if _streams():
                source = FolderSource(*model.reader(chunks), checksums, done=advance)
            else:
                for _ in model.iter_load(chunks):
                    advance()
                checksums.take(_named_tensors(chunks))
            write(_sharded_state(chunks), partial, source)
            if dist.get_rank() == 0:
                model.save_hf_metadata(partial / "hf")
            if source is not None:
                read_again = _checkpoint_tasks(chunks, partial, source.tasks)
                found = ((task.param_name, cast("torch.Tensor", task.param_weight)) for task in read_again)
            else:
                load_checkpoint_weights(chunks, partial)
                found = _named_tensors(chunks)
            together(lambda: checksums.compare(found, f"checkpoint {out}"))
        _tell_verified(out, checksums)
    return out


def megatron_to_hf(
    checkpoint_dir: str | Path, out_dir: str | Path, parallel: ParallelConfig, quantize: Literal["fp8"] | None = None
) -> Path:
    """Write a checkpoint's weights as a Hugging Face folder. parallel: layout of the model during the conversion.

    Errors: UserError that names a tensor for which SGLang cannot load the quantized form.
    """
    checkpoint, out = Path(checkpoint_dir), Path(out_dir)
    if quantize:
        fp8.check_architecture(architecture(read_hf_config(checkpoint / "hf")))
    with _parallel_state(checkpoint / "hf", parallel):
        model = _model(checkpoint / "hf", parallel)
        chunks = model.make_chunks(load_weights=False)
        plan, size = None, SHARD_BYTES
        if _streams():
            with _readable(checkpoint):
                verify_files(checkpoint)
            tasks = model.export_plan(chunks)
            plan, size = _checkpoint_tasks(chunks, checkpoint, tasks), shard_bytes(tasks, size)
        else:
            load_checkpoint_weights(chunks, checkpoint)
        export = fp8.Export(writes=dist.get_rank() == 0) if quantize else None
        checksums = Checksums()

        def wrap(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
            wanted = export.wrap(tensors) if export else tensors
            return _progress(checksums.watch(wanted) if dist.get_rank() == 0 else wanted, f"writing {out}")

        def complete(folder: Path) -> None:
            if export:
                export.complete(folder)
            checksums.compare(read_weights(folder), f"model folder {out}")

        model.save_hf(chunks, out, wrap, complete, plan=plan, shard_bytes=size)
        _tell_verified(out, checksums)
    return out


def quantize_folder(hf_dir: Path, out: Path) -> Path:
    """Write a Hugging Face folder's weights in block FP8, tensor by tensor, on rank 0.

    Errors: UserError for a tensor that SGLang would refuse or a folder that is quantized already; the message names it.
    """
    if int(os.environ.get("RANK", "0")):
        return out
    check_weight_files(hf_dir)
    if quantized := getattr(read_hf_config(hf_dir), "quantization_config", None):
        raise UserError(
            f"convert: {hf_dir} is quantized already ({quantized['quant_method']}); write plain weights first:"
            f" megatron-rl convert {hf_dir} CHECKPOINT"
        )
    fp8.check_folder(hf_dir)
    export, checksums = fp8.Export(), Checksums()
    with whole_folder(out) as partial:
        copy_metadata(hf_dir, partial, torch.bfloat16)
        write_weights(partial, checksums.watch(export.wrap(read_weights(hf_dir))))
        export.complete(partial)
        checksums.compare(read_weights(partial), f"model folder {out}")
    return out


def load_checkpoint_weights(chunks: Sequence[MegatronModule], checkpoint: Path) -> None:
    """Load weights from a distributed checkpoint of any layout. Errors: UserError for a damaged or foreign checkpoint."""
    with _readable(checkpoint):
        loaded = read(without_extra_state(_sharded_state(chunks)), checkpoint)
    for key, chunk in _named(chunks):
        load_weights(chunk, loaded[key])


def _checkpoint_tasks(
    chunks: Sequence[MegatronModule], checkpoint: Path, tasks: Iterable[WeightConversionTask]
) -> Iterator[WeightConversionTask]:
    """Yield the tasks with weights that are read from a checkpoint in small groups. Only for a single process.

    Errors: as load_checkpoint_weights.
    """

    def read_part(part: dict[str, Any]) -> dict[str, Any]:
        with _readable(checkpoint):
            return read({"model": part}, checkpoint, part=True)["model"]

    return checkpoint_tasks(tasks, _sharded_state(chunks)["model"], read_part)


@contextlib.contextmanager
def _readable(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, CheckpointingException, RuntimeError, KeyError, EOFError, ValueError) as error:
        raise UserError(
            f"checkpoint {checkpoint}: damaged, or not of the model in its hf folder ({one_line(error)})"
        ) from None


def _streams() -> bool:
    """Return True if weights are streamed: there is one process and no GPU, so no task needs tensors of other ranks."""
    return dist.get_world_size() == 1 and not torch.cuda.is_available()


def _named_tensors(chunks: Sequence[MegatronModule]) -> Iterator[tuple[str, torch.Tensor]]:
    for key, chunk in _named(chunks):
        for name, tensor in chunk.state_dict().items():
            if isinstance(tensor, torch.Tensor):
                yield name if len(chunks) == 1 else f"{key}.{name}", tensor


def _tell_verified(out: Path, checksums: Checksums) -> None:
    """Print on rank 0 the number of tensors that all ranks have read back and verified, and their digest. Collective."""
    everyones = [checksums] * dist.get_world_size()
    dist.all_gather_object(everyones, checksums)
    if dist.get_rank() == 0:
        whole = Checksums.of_ranks(everyones)
        print(f"{out}: read back as it was written, {len(whole.of)} tensors, digest {whole}")


def _model(hf_dir: Path, parallel: ParallelConfig) -> Model:
    """Return the model with weights in the dtype of config.json, so that nothing is rounded."""
    hf_config = read_hf_config(hf_dir)
    dtype = cast("torch.dtype | None", hf_config.dtype)  # transformers turns a name into a dtype
    precision = {torch.bfloat16: "bf16", torch.float32: "fp32"}.get(dtype or torch.float32)
    if precision is None:
        raise UserError(f"model folder {hf_dir}: dtype {hf_config.dtype} cannot be converted; use bfloat16 or float32")
    return load(
        hf_dir,
        parallel=parallel,
        precision=precision,
        value_head=is_classifier(hf_config),
        pooling=getattr(hf_config, "reward_pooling", "last"),
    )


def _named(chunks: Sequence[MegatronModule]) -> Iterator[tuple[str, MegatronModule]]:
    """Yield ('model', chunk), or with virtual stages ('model0', chunk), ('model1', chunk), ...

    Each virtual stage is Megatron's current stage when its chunk is yielded.
    """
    for index, chunk in enumerate(chunks):
        if len(chunks) > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(index)
        yield "model" if len(chunks) == 1 else f"model{index}", chunk


def _sharded_state(chunks: Sequence[MegatronModule]) -> dict[str, Any]:
    # Megatron adds the current process groups to this dict, so each call gets a copy.
    return {key: chunk.sharded_state_dict(metadata=dict(METADATA)) for key, chunk in _named(chunks)}


@contextlib.contextmanager
def _parallel_state(hf_dir: Path, parallel: ParallelConfig) -> Iterator[None]:
    check_parallel(read_hf_config(hf_dir), parallel, int(os.environ.get("WORLD_SIZE", "1")))
    timeout = timedelta(seconds=parallel.timeout_s)
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    own = not dist.is_initialized()
    if own:
        join(backend, timeout)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=expert_tensor_size(parallel),
        )
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        yield
    finally:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        if own:
            dist.destroy_process_group()


@contextlib.contextmanager
def _finished_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to fill; rename it when all ranks are done. Errors: UserError on all ranks if one failed."""
    partial = out.with_name(out.name + ".partial")
    main = dist.get_rank() == 0

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    _write_together(out, begin if main else None)
    problem: OSError | UserError | None = None
    try:
        yield partial
    except (OSError, UserError) as error:
        problem = error

    def filled() -> None:
        if problem:
            raise problem

    try:
        _write_together(out, filled)
        _write_together(out, (lambda: partial.rename(out)) if main else None)
    except UserError:
        if main:
            shutil.rmtree(partial, ignore_errors=True)  # it may have filled the disk
        raise


def _write_together(out: Path, work: Callable[[], object] | None) -> None:
    """Run `work` (None: nothing). If it fails on one rank, all ranks raise an error.

    An OSError, such as a full disk, becomes a UserError in one line.
    """

    def named() -> None:
        try:
            if work is not None:
                work()
        except OSError as error:
            raise UserError(f"checkpoint {out}: {error.strerror or error}") from None

    together(named if work else None)


@contextlib.contextmanager
def _bar(what: str, total: int | None = None) -> Iterator[Callable[[], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=dist.get_rank() != 0) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


def _progress(items: Iterator[Any], what: str) -> Iterator[Any]:
    with _bar(what) as advance:
        for item in items:
            yield item
            advance()
