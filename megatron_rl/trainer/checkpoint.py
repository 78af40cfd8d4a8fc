"""Checkpoints: Megatron's dist_checkpointing, in a folder that exists under its final name only when it is complete.

A checkpoint carries model, optimizer, scheduler, random states, data position and step, and can be loaded on any other
parallel layout. It is written to `step_N.tmp` with a SHA-256 manifest and renamed when all ranks are done, so that a crash
while saving never harms an older one; so is one that is written in the background. Files that do not match the manifest are
refused by name when it is loaded.
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
# Megatron writes process groups into the dict that it is given: each call gets a copy.
_NAME = re.compile(r"step_(\d+)")


def complete_checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints below `folder`, oldest first."""
    found = [p for p in folder.glob("step_*") if _NAME.fullmatch(p.name) and p.is_dir()]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The step after which a checkpoint was written, by its folder's name."""
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
    """A chunk's state; of a model with adapters without its weights, which stay as they are in the model's folder."""
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
    """State of every random generator of this process."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 (a verifier or a task may use it)
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": _tracker().get_states(),
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Be as they were."""
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
        # One object per process: it can be restored on the same number of processes alone.
        state["random"] = ShardedObject("random", random_states(), (ranks.world_size,), (ranks.rank,))
    if _scales_layout(trainer):
        scales = fp8.remembered(_with_reference(trainer))
        state["scales"] = ShardedObject("scales", scales, (ranks.world_size,), (ranks.rank,))
    return state


def _scales_layout(trainer: Trainer) -> dict[str, int]:
    """The layout to which scales by history belong, a process's to its layers and experts; nothing where there are none."""
    if trainer.model.recipe.fp8_recipe != "delayed":
        return {}
    parallel = trainer.config.parallel
    sizes = {name: getattr(parallel, name) for name in ("tensor", "pipeline", "virtual_pipeline", "expert", "context")}
    return sizes | {"expert_tensor": expert_tensor_size(parallel)}


def _with_reference(trainer: Trainer) -> list[GPTModel]:
    return [*trainer.chunks, *(trainer.reference or [])]


def _distributed_state(trainer: Trainer, state: dict[str, Any]) -> list[ShardedState]:
    """State of the distributed optimizers, which is also put into `state`; empty if there are none."""
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
    """State of all that trains, a companion's under its name; and the parts of their optimizers, the trainer's own under ''."""
    state = _state(trainer, ranks, loading=loading, with_random=with_random)
    parts = {"": _distributed_state(trainer, state)}
    for name, companion in _companions(trainer).items():
        own = _state(companion, ranks, loading=loading, with_random=False)
        parts[name] = _distributed_state(companion, own)
        add_prefix_for_sharding(own, f"{name}.")
        state[name] = own
    return state, parts


class Save:
    """A checkpoint under way: all ranks make one, and all call `finish`, which gives it its name.

    background: the files are written while training goes on, from a copy of the state on the host.
    Errors: UserError when the disk is full or the folder cannot be written; older checkpoints stay untouched.
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
        """extra: small picklable state, the same on all ranks. keep: how many of the newest stay, beside steps `best`."""
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
        """True if the files of all ranks are (all ranks call)."""
        return not self._ranks.maximum(int(not self._write.written()))

    def finish(self, timeout_s: float = 0.0) -> Path:
        """Wait until the files are written, and give the folder its name (all ranks call).

        Errors: UserError also where it takes longer than timeout_s.
        """
        deadline = time.monotonic() + timeout_s
        while not self.written():
            # No rank waits in a collective for one that still writes.
            if self._ranks.maximum(int(time.monotonic() > deadline)):
                raise UserError(f"checkpoint {self.path}: not written within {timeout_s:g} s (checkpoint.timeout_s)")
            time.sleep(0.05)
        self._attempt(self._ranks.all_do, self._write.finish)
        self._attempt(self._ranks.main_does, self._name)
        return self.path

    def _begin(self) -> None:
        try:
            for left in self.path.parent.glob("step_*.tmp"):  # by a run that died
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
        """`work` where it is to be done; after an error nothing is left of the folder, as the disk may be full of it."""

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
    """Remove a checkpoint; of one that was moved elsewhere, and left a link here, the link alone."""
    if checkpoint.is_symlink():
        checkpoint.unlink()
    else:
        shutil.rmtree(checkpoint)


def save(folder: Path, step: int, trainer: Trainer, ranks: Ranks, extra: dict[str, Any], keep: int) -> Path:
    """Write `folder`/step_N (all ranks call), as `Save` does, and wait for it."""
    return Save(folder, step, trainer, ranks, extra, keep).finish()


def load(path: Path, trainer: Trainer, ranks: Ranks) -> dict[str, Any]:
    """Restore everything from a checkpoint (all ranks call). Returns {'step', 'extra'}.

    Errors: UserError naming the file that is damaged or the tensor that is missing.
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
        learner.scheduler.num_steps = 0  # Megatron adds to what it finds, and Adam's bias correction goes by the sum
        learner.scheduler.load_state_dict(states[name]["scheduler"])
        _prepare_optimizers(learner)
    state, parts = _with_companions(trainer, ranks, loading=True, with_random=same_size)
    if not same_size or common.get("scales") != _scales_layout(trainer):  # or of another recipe: scales begin anew
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
    saved = state.get("optimizer", {"name": "adam", "states": ["exp_avg", "exp_avg_sq"]})  # in older ones it was Adam
    now = _optimizer_of(learner)
    if saved != now:
        one, other = (f"{found['name']} ({', '.join(found['states']) or 'no state'})" for found in (saved, now))
        raise UserError(
            f"checkpoint {path}: has the optimizer state of {one}, and the config's {key} is {other}; set it back, or start"
            " another run from its weights alone (checkpoint.load)"
        )


def _lora_of(trainer: Trainer) -> dict[str, Any]:
    """The base model that the adapters of a checkpoint belong to; nothing where there are none. Collective."""
    lora, folder = trainer.model.lora, trainer.model.path
    if not lora.rank:
        return {}
    settings = {"rank": lora.rank, "alpha": lora.alpha, "kind": lora.kind, "targets": sorted(lora.targets)}
    return settings | {"model": trainer.ranks.main_does(lambda: weights_digest(folder))}


def _check_lora(path: Path, saved: dict[str, Any], trainer: Trainer) -> None:
    """Errors: UserError where the checkpoint's adapters are of other settings, or of another model."""
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
                f"checkpoint {path}: its adapters belong to other weights than those now in {trainer.model.path}; put the"
                " model back with which the run began"
            )
        raise UserError(
            f"checkpoint {path}: has adapters of lora.{key} = {saved.get(key)}, and the config says {now.get(key)}; set it"
            " back, or start another run"
        )


def load_weights(path: Path, trainer: Trainer, *, hooks: bool = False) -> None:
    """Restore the model's weights alone; the optimizer starts anew.

    hooks: the parameters too that hooks give the model, where the checkpoint has them; else they start anew.
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
    """The part of a checkpoint that is the same on all ranks. Errors: UserError, also for a key that an older one lacks."""
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
                f"checkpoint {path}: has no {part}.{name}, as another version of megatron_rl wrote it; train anew, or from its"
                " weights alone (checkpoint.load)"
            )


def _prepare_optimizers(trainer: Trainer) -> None:
    """Have distributed optimizers make the tensors that are loaded into, with parameter groups of the layout at hand.

    Expert parallelism has parameter groups (and an optimizer) of its own, so those of the checkpoint need not fit. They
    hold nothing that is not elsewhere: rates come from the scheduler, and every update advanced it by one.
    """
    if not trainer.config.parallel.distributed_optimizer:
        return
    allocate_states(trainer.config.optimizer, trainer.optimizer)
    for optimizer in trainer.optimizer.chained_optimizers:
        if not any(group["params"] for group in optimizer.param_groups):
            continue  # all of a stage's weights may be frozen: there is nothing to load into, and no step
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
    """The largest of each number over the ranks: a pipeline stage may have none of what a hook counts."""
    parts = ranks.gather(mine)
    return {name: max(part[name] for part in parts if name in part) for name in {n for part in parts for n in part}}


def _leave_out(state: dict[str, Any], hooks: Iterable[UpdateHook]) -> None:
    """Ask the checkpoint for nothing of these hooks: it has nothing, or not for this run. They stay as they are."""
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
            raise RuntimeError(f"the checkpoint's adapters are not those of the model: {wrong[0]}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _sync_folder(folder: Path) -> None:
    """Fsync all files, so that the rename never names data that a power cut would lose."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
