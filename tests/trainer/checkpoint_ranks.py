"""What each rank does in test_checkpoint.py."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from layouts import make_config, make_trainer
from ranks import end_layout
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_rl.errors import UserError
from megatron_rl.models.distributed_checkpoint import write
from megatron_rl.trainer import checkpoint
from megatron_rl.trainer.optimizer import allocate_states
from megatron_rl.trainer.trainer import Trainer

from megatron.core import parallel_state  # isort: skip (after megatron_rl, which makes it importable without a GPU)

LAYOUTS = {
    "one": {},
    "data": {"expert": 2},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
    "mixed": {"tensor": 2, "expert": 2},
    "whole": {"distributed_optimizer": False},
}


def new_trainer(model: str, layout: str, precision: str = "bf16") -> Trainer:
    return make_trainer(make_config(model, {"parallel": LAYOUTS[layout], "precision": {"train": precision}}))


def local_state(trainer: Trainer) -> list[torch.Tensor]:
    """This rank's fp32 weights and moments, and the model's weights."""
    inner = [part.optimizer for part in trainer.optimizer.chained_optimizers]
    allocate_states(trainer.config.optimizer, trainer.optimizer)
    main = [p for optimizer in inner for group in optimizer.param_groups for p in group["params"]]
    moments = [
        optimizer.state[p][name]
        for optimizer in inner
        for group in optimizer.param_groups
        for p in group["params"]
        for name in ("exp_avg", "exp_avg_sq")
    ]
    return [*main, *moments, *(p for chunk in trainer.chunks for p in chunk.parameters())]


@torch.no_grad()
def randomize(trainer: Trainer) -> None:
    """Another number in every element; model weights alike where data-parallel ranks hold the same."""
    generator = torch.Generator().manual_seed(trainer.ranks.rank)
    for tensor in local_state(trainer):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    place = (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank())
    for index, parameter in enumerate(p for chunk in trainer.chunks for p in chunk.parameters()):
        is_expert = not getattr(parameter, "allreduce", True)
        expert = parallel_state.get_expert_model_parallel_rank() if is_expert else 0
        generator.manual_seed(hash((index, *place, expert)))
        parameter.copy_(torch.randn(parameter.shape, generator=generator))


def as_megatron_saves_it(model: str, layout: str, folder: str) -> None:
    """The same random state twice: as ours, and with the optimizer's as Megatron's `fully_reshardable`."""
    trainer = new_trainer(model, layout)
    randomize(trainer)
    ranks = trainer.ranks
    checkpoint.save(Path(folder) / "ours", 1, trainer, ranks, extra={}, keep=1)
    state = checkpoint._state(trainer, ranks, loading=False)
    state["optimizer"] = trainer.optimizer.sharded_state_dict(
        state, is_loading=False, metadata=dict(checkpoint._METADATA)
    )
    state["run"] = {}
    theirs = Path(folder) / "theirs"
    if ranks.rank == 0:
        theirs.mkdir()
    ranks.barrier()
    write(state, theirs)


def load_as(model: str, layout: str, path: str, again: str) -> None:
    """Load a checkpoint of any layout into a trainer that holds something else, and save it once more."""
    trainer = new_trainer(model, layout)
    randomize(trainer)
    checkpoint.load(Path(path), trainer, trainer.ranks)
    checkpoint.save(Path(again), 1, trainer, trainer.ranks, extra={}, keep=1)


class NewStorage(TorchDispatchMode):
    """Counts the bytes of all storages that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.bytes += tensor.untyped_storage().nbytes()
        return result


def bytes_made_by_a_save(model: str, layout: str, precision: str, folder: str) -> tuple[int, int, int]:
    """(bytes of new tensors in a save, of the largest tensor of the state, of the state)."""
    trainer = new_trainer(model, layout, precision)
    state = local_state(trainer)
    with NewStorage() as made:
        checkpoint.save(Path(folder), 1, trainer, trainer.ranks, extra={}, keep=1)
    sizes = [tensor.numel() * tensor.element_size() for tensor in state]
    return made.bytes, max(sizes), sum(sizes)


def save_in_background(model: str, folder: str) -> dict[str, Any]:
    """Save while the state changes; then one that cannot be written, and one that takes too long."""
    trainer = new_trainer(model, "data")
    ranks, outcome = trainer.ranks, {}
    randomize(trainer)
    before = [tensor.detach().clone() for tensor in local_state(trainer)]

    def start(step: int) -> checkpoint.Save:
        return checkpoint.Save(Path(folder), step, trainer, ranks, {}, 2, background=True)

    saving = start(1)
    with torch.no_grad():
        for tensor in local_state(trainer):
            tensor.zero_()
    ranks.barrier()
    outcome["named before it is finished"] = saving.path.exists()
    path = saving.finish(60.0)
    outcome["complete"] = sorted(p.name for p in Path(folder).iterdir())
    ranks.barrier()
    checkpoint.load(path, trainer, ranks)
    outcome["restored"] = all(map(torch.equal, before, local_state(trainer)))

    # Files of more than 20 kB cannot be written now, on rank 1 alone: a failure of the writer itself.
    import resource

    if ranks.rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    try:
        start(2).finish(60.0)
    except UserError as error:
        outcome["failed"] = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    ranks.barrier()
    outcome["after the failure"] = sorted(p.name for p in Path(folder).iterdir())
    ranks.barrier()

    late = start(3)
    if ranks.rank == 1:
        late._write.written = lambda: False
    began = time.monotonic()
    with suppress(UserError):
        late.finish(0.2)
    try:
        late.finish(0.2)
    except UserError as error:
        outcome["late"] = str(error)
    outcome["gave up"] = time.monotonic() - began < 60
    ranks.barrier()
    return outcome


def frozen_state(model: str, folder: str) -> dict[str, Any]:
    """Save and load where a stage has nothing to train, sleep and wake, and load into a run that freezes something else."""
    outcome: dict[str, Any] = {}
    for layout, patterns in (
        ("pipeline", ["embedding.*", "decoder.layers.0.*", "*.local_experts.3.*"]),
        ("data", ["embedding.*", "output_layer.*", "decoder.layers.*"]),
    ):

        def trainer_of(layout: str, freeze: list[str]) -> Trainer:
            return make_trainer(make_config(model, {"parallel": LAYOUTS[layout], "model": {"freeze": freeze}}))

        trainer = trainer_of(layout, patterns)
        randomize(trainer)
        before = [tensor.detach().clone() for tensor in local_state(trainer)]
        trainer.sleep()
        trainer.wake()
        outcome[f"{layout} woke"] = all(map(torch.equal, before, local_state(trainer)))
        path = checkpoint.save(Path(folder) / layout, 1, trainer, trainer.ranks, extra={}, keep=1)
        end_layout()
        again = trainer_of(layout, patterns)
        checkpoint.load(path, again, again.ranks)
        outcome[f"{layout} restored"] = all(map(torch.equal, before, local_state(again)))
        end_layout()
    other = trainer_of("data", ["*.router.*"])
    try:
        checkpoint.load(path, other, other.ranks)
    except UserError as error:
        outcome["refused"] = str(error)
    end_layout()
    sgd = {"optimizer": {"name": "sgd"}, "parallel": {"distributed_optimizer": False}, "model": {"freeze": patterns}}
    try:
        trainer = make_trainer(make_config(model, sgd))
        checkpoint.load(path, trainer, trainer.ranks)
    except UserError as error:
        outcome["of another optimizer"] = str(error)
    end_layout()
    other = trainer_of("data", ["*.router.*"])
    checkpoint.load_weights(path, other)
    outcome["weights alone"] = all(
        map(torch.equal, before[-len(list(other.chunks[0].parameters())) :], other.chunks[0].parameters())
    )
    return outcome
