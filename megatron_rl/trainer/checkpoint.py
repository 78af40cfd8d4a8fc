"""Checkpoints in Megatron's dist_checkpointing format. A checkpoint folder has its final name only when it is complete.

A checkpoint holds model, optimizer, scheduler, random states, data position and step. A run with any other parallel layout can
load it. The files are written to `step_N.tmp` with a SHA-256 manifest. The folder is renamed when all ranks have finished, also
after a background write. So a crash while saving never damages an older checkpoint. Loading checks the files against the
manifest, and an error names each file that does not match.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

from megatron_rl.config.optimizers import OPTIMIZERS
from megatron_rl.config.plan import expert_tensor_size
from megatron_rl.distributed.parallel import Ranks
from megatron_rl.errors import UserError
from megatron_rl.models import distributed_checkpoint, fp8
from megatron_rl.models.checkpoint_reader import untrusted
from megatron_rl.models.distributed_checkpoint import Write, read
from megatron_rl.models.freeze import ADAPTER, HEAD
from megatron_rl.models.hf_folder import weights_digest
from megatron_rl.trainer.hooks import UpdateHook
from megatron_rl.trainer.optimizer import allocate_states, gather_parameters, separate_steps
from megatron_rl.trainer.sharded_state import ShardedState
from megatron_rl.trainer.trainer import Trainer

T = TypeVar("T")

_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
# Megatron writes process groups into this dict, so each call gets a copy.
_NAME = re.compile(r"step_(\d+)")


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest first."""
    found = [p for p in folder.glob("step_*") if _NAME.fullmatch(p.name) and p.is_dir()]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """Return the step after which a checkpoint was written, from the name of its folder."""
    return int(path.name.removeprefix("step_"))


def _model_state(trainer: Trainer) -> dict[str, Any]:
    if len(trainer.chunks) == 1:
        return {"model": _trained(trainer, trainer.chunks[0].sharded_state_dict(metadata=dict(_METADATA)))}
    states = {}
    for index, chunk in enumerate(trainer.chunks):
        parallel_state.set_virtual_pipeline_model_parallel_rank(index)
        states[f"model{index}"] = _trained(trainer, chunk.sharded_state_dict(metadata=dict(_METADATA)))
    return states


def _trained(trainer: Trainer, state: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a model chunk's state that a checkpoint stores: with adapters, all but the frozen weights.

    The model folder contains the frozen weights.
    """
    if not trainer.model.lora.rank:
        return state
    endings = tuple(hook.parameters for hook in trainer.hooks if hook.parameters)
    head = (HEAD,) if trainer.model.value_head else ()
    return {name: part for name, part in state.items() if ADAPTER in name or name.endswith((*endings, *head))}


def _tracker() -> CudaRNGStatesTracker:
    found = tensor_parallel.get_cuda_rng_tracker()
    assert found is not None
    return found


def random_states() -> dict[str, Any]:
    """Return the state of every random generator of this process."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 (a verifier or a task may use this generator)
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": _tracker().get_states(),
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Restore the state of every random generator of this process."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and states["device"] is not None:
        torch.cuda.set_rng_state(states["device"])
    _tracker().set_states(states["tracker"])


def _state(trainer: Trainer, ranks: Ranks, *, loading: bool, with_random: bool = True) -> dict[str, Any]:
    trainer.residence.require("all")
    gather_parameters(trainer.ddp)
    allocate_states(trainer.config.optimizer, trainer.optimizer)
    state = _model_state(trainer)
    state |= {hook.name: found for hook in trainer.hooks if (found := hook.state_dict(state))}
    if not trainer.config.parallel.distributed_optimizer:
        state["optimizer"] = trainer.optimizer.sharded_state_dict(state, is_loading=loading, metadata=dict(_METADATA))
    if with_random:
        # One object per process: it can only be restored on the same number of processes.
        state["random"] = ShardedObject("random", random_states(), (ranks.world_size,), (ranks.rank,))
    if _scales_layout(trainer):
        scales = fp8.remembered(_with_reference(trainer))
        state["scales"] = ShardedObject("scales", scales, (ranks.world_size,), (ranks.rank,))
    return state


def _scales_layout(trainer: Trainer) -> dict[str, int]:
    """Return the parallel layout of the saved FP8 scales; empty without delayed scaling.

    Each process saves the scales of its own layers, so they fit only this layout.
    """
    if trainer.model.recipe.fp8_recipe != "delayed":
        return {}
    parallel = trainer.config.parallel
    sizes = {name: getattr(parallel, name) for name in ("tensor", "pipeline", "virtual_pipeline", "expert", "context")}
    return sizes | {"expert_tensor": expert_tensor_size(parallel)}


def _with_reference(trainer: Trainer) -> list[GPTModel]:
    return [*trainer.chunks, *(trainer.reference or [])]


def _distributed_state(trainer: Trainer, state: dict[str, Any]) -> list[ShardedState]:
    """Put the distributed optimizers' state into `state`, and return its parts; empty without distributed optimizers."""
    if not trainer.config.parallel.distributed_optimizer:
        return []
    model = {key: value for key, value in state.items() if key.startswith("model")}
    optimizers: list[Any] = trainer.optimizer.chained_optimizers
    parts = [ShardedState(part, model, apart=_has_holes(trainer)) for part in optimizers]
    state["optimizer"] = {index: part.sharded for index, part in enumerate(parts)}
    return parts


def _has_holes(trainer: Trainer) -> bool:
    return bool(trainer.config.model.freeze)


def _companions(trainer: Trainer) -> dict[str, Trainer]:
    return {name: companion for name, companion in trainer.companions.items() if companion.trains}


def _with_companions(
    trainer: Trainer, ranks: Ranks, *, loading: bool, with_random: bool = True
) -> tuple[dict[str, Any], dict[str, list[ShardedState]]]:
    """Return the states of all trained models, and {name of companion, '' for the trainer: parts of its optimizer's state}."""
    state = _state(trainer, ranks, loading=loading, with_random=with_random)
    parts = {"": _distributed_state(trainer, state)}
    for name, companion in _companions(trainer).items():
        own = _state(companion, ranks, loading=loading, with_random=False)
        parts[name] = _distributed_state(companion, own)
        add_prefix_for_sharding(own, f"{name}.")
        state[name] = own
    return state, parts


class Save:
    """A checkpoint that is being written. All ranks create one and call `finish`, which gives the folder its final name.

    background: copy the state to host memory and write the files from there, while training goes on.
    Errors: UserError if the disk is full or the folder cannot be written. Older checkpoints stay untouched.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        trainer: Trainer,
        ranks: Ranks,
        extra: dict[str, Any],
        keep: int,
        *,
        best: Collection[int] = (),
        background: bool = False,
    ) -> None:
        """Start to write the checkpoint of `step`.

        extra: small picklable state, the same on all ranks. keep: number of newest checkpoints to keep. best: steps whose
        checkpoints are kept in addition.
        """
        self.path = folder / f"step_{step:06d}"
        self._partial = self.path.with_name(self.path.name + ".tmp")
        self._trainer, self._ranks, self._keep, self._best = trainer, ranks, keep, frozenset(best)
        ranks.main_does(self._begin)
        state, _ = _with_companions(trainer, ranks, loading=False)
        state["run"] = {
            "step": step,
            "world_size": ranks.world_size,
            "scheduler": trainer.scheduler.state_dict(),
            "freeze": sorted(trainer.config.model.freeze),
            "lora": _lora_of(trainer),
            "optimizer": _optimizer_of(trainer),
            "scales": _scales_layout(trainer),
            "hooks": {hook.name: _largest(ranks, hook.progress()) for hook in trainer.hooks if hook.name},
            "companions": {
                name: {
                    "scheduler": one.scheduler.state_dict(),
                    "freeze": sorted(one.config.model.freeze),
                    "lora": _lora_of(one),
                    "optimizer": _optimizer_of(one),
                }
                for name, one in _companions(trainer).items()
            },
            "extra": extra,
        }
        self._adapters = trainer.model.gather_adapters(trainer.chunks) if trainer.model.lora.rank else {}
        self._write = self._attempt(ranks.all_do, lambda: Write(state, self._partial, background=background))

    def written(self) -> bool:
        """Return True if all ranks have written their files. All ranks call this method."""
        return not self._ranks.maximum(int(not self._write.written()))

    def finish(self, timeout_s: float = 0.0) -> Path:
        """Wait until the files are written, then give the folder its final name. All ranks call this method.

        Errors: UserError if a file cannot be written, or if the files are not written within timeout_s seconds.
        """
        deadline = time.monotonic() + timeout_s
        while not self.written():
            # A rank must not wait in a collective for a rank that is still writing.
            if self._ranks.maximum(int(time.monotonic() > deadline)):
                raise UserError(f"checkpoint {self.path}: not written within {timeout_s:g} s (checkpoint.timeout_s)")
            time.sleep(0.05)
        self._attempt(self._ranks.all_do, self._write.finish)
        self._attempt(self._ranks.main_does, self._name)
        return self.path

    def _begin(self) -> None:
        try:
            for left in self.path.parent.glob("step_*.tmp"):  # left by a run that died
                shutil.rmtree(left, ignore_errors=True)
            self._partial.mkdir(parents=True)
        except OSError as error:
            raise UserError(f"checkpoint {self.path}: {error.strerror}") from None

    def _name(self) -> None:
        self._trainer.model.save_hf_metadata(self._partial / "hf")
        if self._adapters:
            self._trainer.model.write_adapters(self._adapters, self._partial / "adapter")
        _sync_folder(self._partial)
        shutil.rmtree(self.path, ignore_errors=True)
        os.replace(self._partial, self.path)
        for old in complete_checkpoints(self.path.parent)[: -self._keep]:
            if step_of(old) not in self._best:
                _remove(old)

    def _attempt(self, everywhere: Callable[[Callable[[], T]], T], work: Callable[[], T]) -> T:
        """Run `work` on the ranks that `everywhere` selects.

        After an error, remove the incomplete checkpoint: it may fill the disk.
        """

        def named() -> T:
            try:
                return work()
            except OSError as error:
                raise UserError(f"checkpoint {self.path}: {error.strerror}; older checkpoints are intact") from None

        try:
            return everywhere(named)
        except UserError:
            if self._ranks.rank == 0:
                shutil.rmtree(self._partial, ignore_errors=True)
            raise


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint. If it is a link to a folder elsewhere, remove only the link."""
    if checkpoint.is_symlink():
        checkpoint.unlink()
    else:
        shutil.rmtree(checkpoint)


def save(folder: Path, step: int, trainer: Trainer, ranks: Ranks, extra: dict[str, Any], keep: int) -> Path:
    """Write the checkpoint `folder`/step_N like `Save`, and wait until it is complete. All ranks call this function."""
    return Save(folder, step, trainer, ranks, extra, keep).finish()


def load(path: Path, trainer: Trainer, ranks: Ranks) -> dict[str, Any]:
    """Restore the trainer from a checkpoint and return {'step', 'extra'}. All ranks call this function.

    Errors: UserError that names the damaged file or the missing tensor.
    """
    common = read_common(path)
    learners = {"": trainer, **_companions(trainer)}
    states = {"": common, **common.get("companions", {})}
    for name, learner in learners.items():
        if name not in states:
            raise UserError(
                f"checkpoint {path}: has no {name}, as the run had none; start another run from its weights alone"
                " (checkpoint.load)"
            )
        _check_frozen(path, f"{name}.freeze" if name else "model.freeze", states[name], learner)
        _check_lora(path, states[name].get("lora", {}), learner)
        _check_optimizer(path, f"{name}.optimizer" if name else "optimizer", states[name], learner)
    same_size = common["world_size"] == ranks.world_size
    for name, learner in learners.items():
        learner.scheduler.num_steps = 0  # Megatron adds to it, and Adam's bias correction uses the sum
        learner.scheduler.load_state_dict(states[name]["scheduler"])
        _prepare_optimizers(learner)
    state, parts = _with_companions(trainer, ranks, loading=True, with_random=same_size)
    if not same_size or common.get("scales") != _scales_layout(trainer):  # else new scales are calibrated
        for name in learners:
            (state[name] if name else state).pop("scales", None)
    known = [hook for hook in trainer.hooks if hook.name in common["hooks"]]
    for hook in known:
        _require(path, f"run.hooks.{hook.name}", common["hooks"][hook.name], _largest(ranks, hook.progress()))
    _leave_out(state, (hook for hook in trainer.hooks if hook not in known))
    loaded = _load(state, path)
    for name, learner in learners.items():
        own = loaded[name] if name else loaded
        _load_model(learner, own)
        for part in parts[name]:
            part.loaded()
        if not parts[name]:
            learner.optimizer.load_state_dict(own["optimizer"])
        separate_steps(learner.optimizer)
        if "scales" in own:
            fp8.restore(_with_reference(learner), own["scales"], learner.model.config)
    for hook in known:
        hook.load_state_dict(loaded.get(hook.name, {}), common["hooks"][hook.name])
    if same_size:
        set_random_states(loaded["random"])
    return {"step": common["step"], "extra": common["extra"]}


def _check_frozen(path: Path, key: str, state: dict[str, Any], learner: Trainer) -> None:
    frozen, now = state.get("freeze", []), sorted(learner.config.model.freeze)
    if frozen != now:
        raise UserError(
            f"checkpoint {path}: has optimizer state for {key} = {frozen}, and the config says {now}; set it back, or"
            " start another run from its weights alone (checkpoint.load)"
        )


def _optimizer_of(trainer: Trainer) -> dict[str, Any]:
    opt = trainer.config.optimizer
    return {"name": opt.name, "states": list(OPTIMIZERS[opt.name].states(opt))}


def _check_optimizer(path: Path, key: str, state: dict[str, Any], learner: Trainer) -> None:
    saved = state.get("optimizer", {"name": "adam", "states": ["exp_avg", "exp_avg_sq"]})  # older checkpoints: Adam
    now = _optimizer_of(learner)
    if saved != now:
        one, other = (f"{found['name']} ({', '.join(found['states']) or 'no state'})" for found in (saved, now))
        raise UserError(
            f"checkpoint {path}: has the optimizer state of {one}, and the config's {key} is {other}; set it back, or start"
            " another run from its weights alone (checkpoint.load)"
        )


def _lora_of(trainer: Trainer) -> dict[str, Any]:
    """Return the adapter settings and the digest of the base model; empty without adapters. Collective."""
    lora, folder = trainer.model.lora, trainer.model.path
    if not lora.rank:
        return {}
    settings = {"rank": lora.rank, "alpha": lora.alpha, "kind": lora.kind, "targets": sorted(lora.targets)}
    return settings | {"model": trainer.ranks.main_does(lambda: weights_digest(folder))}


def _check_lora(path: Path, saved: dict[str, Any], trainer: Trainer) -> None:
    """Raise UserError if the checkpoint's adapters have other settings, or belong to another model."""
    now = _lora_of(trainer)
    for key in sorted(saved.keys() | now.keys()):
        if saved.get(key) == now.get(key):
            continue
        if not saved or not now:
            what = "adapters" if saved else "all weights"
            raise UserError(
                f"checkpoint {path}: has {what}, and the config says lora.rank = {trainer.config.lora.rank}; set it back, or"
                f" start another run from its weights: megatron-rl convert {path} OUT, and model.path: OUT"
            )
        if key == "model":
            raise UserError(
                f"checkpoint {path}: its adapters belong to other weights than those now in {trainer.model.path}; put back"
                " the model with which the run began"
            )
        raise UserError(
            f"checkpoint {path}: has adapters of lora.{key} = {saved.get(key)}, and the config says {now.get(key)}; set it"
            " back, or start another run"
        )


def load_weights(path: Path, trainer: Trainer, *, hooks: bool = False) -> None:
    """Restore only the model's weights; the optimizer starts from scratch.

    hooks: also restore the parameters that hooks add to the model, if the checkpoint has them.
    """
    trainer.residence.require("all")
    state = _model_state(trainer)
    common = read_common(path)
    _check_lora(path, common.get("lora", {}), trainer)
    known = common["hooks"] if hooks else {}
    _leave_out(state, (hook for hook in trainer.hooks if hook.name not in known))
    _load_model(trainer, _load(state, path))
    if trainer.trains:
        trainer.optimizer.reload_model_params()


def read_common(path: Path) -> dict[str, Any]:
    """Return the data of a checkpoint that is the same for all ranks. Errors: UserError, also for a missing key."""
    try:
        with untrusted():
            run = dist_checkpointing.load_common_state_dict(str(path))["run"]
    except (OSError, KeyError, CheckpointingException, RuntimeError, EOFError, ValueError) as error:
        raise UserError(
            f"checkpoint {path}: not a checkpoint of megatron_rl, or damaged ({_one_line(error)})"
        ) from None
    _require(path, "run", run, ("step", "world_size", "scheduler", "hooks", "extra"))
    return run


def _require(path: Path, part: str, found: Collection[str], names: Iterable[str]) -> None:
    for name in names:
        if name not in found:
            raise UserError(
                f"checkpoint {path}: has no {part}.{name}, as another version of megatron_rl wrote it; start a new run, or"
                " load its weights alone (checkpoint.load)"
            )


def _prepare_optimizers(trainer: Trainer) -> None:
    """Create the distributed optimizers' state tensors before loading, with the parameter groups of the current layout.

    Parameter groups depend on the parallel layout: expert parallelism adds groups and a separate optimizer. So the groups in
    the checkpoint may not fit and are not loaded. No information is lost: the scheduler provides learning rates and step
    counts.
    """
    if not trainer.config.parallel.distributed_optimizer:
        return
    allocate_states(trainer.config.optimizer, trainer.optimizer)
    for optimizer in trainer.optimizer.chained_optimizers:
        if not any(group["params"] for group in optimizer.param_groups):
            continue  # all weights of a stage may be frozen: nothing to load, no step
        state: Any = optimizer.state_dict()
        for group in state["optimizer"]["param_groups"]:
            group["step"] = trainer.scheduler.num_steps
        optimizer.load_state_dict(state)


def _load(state: dict[str, Any], path: Path) -> dict[str, Any]:
    try:
        return read(distributed_checkpoint.without_extra_state(state), path)
    except (OSError, CheckpointingException, RuntimeError, KeyError, EOFError, ValueError) as error:
        raise UserError(
            f"checkpoint {path}: damaged or of another model ({_one_line(error)}); remove it to go on from an older one"
        ) from None


def _largest(ranks: Ranks, mine: dict[str, int]) -> dict[str, int]:
    """Return the largest value over all ranks for each name. A name may be missing on some pipeline stages."""
    parts = ranks.gather(mine)
    return {name: max(part[name] for part in parts if name in part) for name in {n for part in parts for n in part}}


def _leave_out(state: dict[str, Any], hooks: Iterable[UpdateHook]) -> None:
    """Remove all entries of these hooks from `state` before loading, because the checkpoint does not contain them."""
    for hook in hooks:
        state.pop(hook.name, None)
        for part in (value for key, value in state.items() if key.startswith("model") and hook.parameters):
            for name in [name for name in part if name.endswith(hook.parameters)]:
                del part[name]


def _load_model(trainer: Trainer, loaded: dict[str, Any]) -> None:
    names = ["model"] if len(trainer.chunks) == 1 else [f"model{index}" for index in range(len(trainer.chunks))]
    for index, (name, chunk) in enumerate(zip(names, trainer.chunks, strict=True)):
        if len(names) > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(index)
        endings = tuple(hook.parameters for hook in trainer.hooks if hook.parameters)
        frozen = bool(trainer.model.lora.rank)  # a checkpoint of adapters has no other weights
        own = {key: value for key, value in chunk.state_dict().items() if key.endswith(endings)}
        lost = distributed_checkpoint.load_weights(chunk, {**own, **loaded[name]}, strict=not frozen)
        if wrong := [*lost.unexpected_keys, *(key for key in lost.missing_keys if ADAPTER in key)]:
            raise RuntimeError(f"the checkpoint's adapters do not match the model's: {wrong[0]}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _sync_folder(folder: Path) -> None:
    """Call fsync on the folder and all its files, so that a power cut after the rename loses no data."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
