"""What each rank does in the tests of memory: updates under a saver, through a checkpoint, and around a sleep."""

from __future__ import annotations

import gc
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from layouts import LATER, make_config, make_trainer
from ranks import end_layout

from megatron_rl.data.sequence import Sequence
from megatron_rl.trainer import checkpoint, offload, optimizer
from megatron_rl.trainer.objective import Policy
from megatron_rl.trainer.optimizer import torch_optimizers
from megatron_rl.trainer.trainer import Trainer

from megatron.core.distributed import DistributedDataParallelConfig  # isort: skip
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer  # isort: skip


MAY_STAY = 0.02
"""Part of the memory: buffers of the model, and counters of steps."""


def one_update(trainer: Trainer, samples: list[Sequence]) -> None:
    ranks = trainer.ranks
    batches = trainer.pack(samples[ranks.data_rank :: ranks.data_size])
    objective = Policy(trainer.config)
    trainer.compute_fields(batches, objective.needs, LATER)
    trainer.update(batches, objective, LATER)


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Exported weights, and the sharded optimizer's fp32 weights and moments, whole."""
    found = {f"weight/{name}": tensor.clone() for name, tensor in trainer.export_weights()}
    if not trainer.config.parallel.distributed_optimizer:
        for number, part in enumerate(trainer.optimizer.chained_optimizers):
            for group in part.optimizer.param_groups:
                for index, parameter in enumerate(group["params"]):
                    for key, value in part.optimizer.state[parameter].items():
                        found[f"{key}/{number}/{id(group)}/{index}"] = value.clone()
        return {key.replace(key.split("/")[2], "", 1) if key.count("/") == 3 else key: v for key, v in found.items()}
    for number, part in enumerate(trainer.optimizer.chained_optimizers):
        state = part.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
        for buffer, by_dtype in state.items():
            for tensors in by_dtype.values() if isinstance(by_dtype, dict) else ():
                keys = ("param", "exp_avg", "exp_avg_sq")
                found |= {f"{key}/{number}/{buffer}": tensors[key].clone() for key in keys}
    return found


def train(
    model: str, samples: list[Sequence], overrides: dict, folder: str | None, bucket_size: int | None, updates: int = 2
) -> dict:
    """Updates; folder: through a checkpoint, and into another trainer, after the first."""
    optimizer.DistributedDataParallelConfig = partial(DistributedDataParallelConfig, bucket_size=bucket_size)
    config = make_config(model, overrides)
    trainer = make_trainer(config)
    one_update(trainer, samples)
    if folder:
        path = checkpoint.save(Path(folder), 1, trainer, trainer.ranks, extra={}, keep=1)
        end_layout()
        trainer = make_trainer(config)
        checkpoint.load(path, trainer, trainer.ranks)
    for _ in range(updates - 1):
        one_update(trainer, samples)
    result = state_of(trainer)
    buffers = [b for ddp in trainer.ddp for b in ddp.buffers + ddp.expert_parallel_buffers]
    facts = {
        "gradients": {b.grad_data.dtype for b in buffers},
        "buckets": sum(len(b.buckets) for b in buffers),
        "fused": {g.get("fused") for a in torch_optimizers(trainer.optimizer) for g in a.param_groups},
    }
    end_layout()
    return {"state": result, **facts}


def train_all(model: str, samples: list[Sequence], runs: list[tuple]) -> list[dict]:
    return [train(model, samples, *run) for run in runs]


def device_storages() -> dict[int, torch.UntypedStorage]:
    """Memory of all live floating-point tensors: what would be on a GPU (copies for the host are bytes)."""
    gc.collect()
    tensors = (t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter) and t.is_floating_point())
    return {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}


def new_bytes(old: dict[int, torch.UntypedStorage]) -> int:
    """Bytes of what has come since; `old` is kept alive, so that nothing new takes its place."""
    return sum(storage.nbytes() for key, storage in device_storages().items() if key not in old)


def staying_bytes(old: dict[int, torch.UntypedStorage], awake: int) -> int:
    """Bytes of what has come since and does not go: gloo's threads let go of a collective's tensors a moment after it."""
    deadline = time.monotonic() + 5
    while (found := new_bytes(old)) >= MAY_STAY * awake and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def host_gradients(trainer: Trainer) -> dict[int, torch.UntypedStorage]:
    """What an optimizer of two devices keeps in host memory, where there is a device."""
    inner = [part.optimizer for part in trainer.optimizer.chained_optimizers]
    kept = [g for one in inner if isinstance(one, HybridDeviceOptimizer) for g in one.cpu_copy_map_grad.values()]
    return {t.untyped_storage()._cdata: t.untyped_storage() for t in kept}


def places(trainer: Trainer) -> list[tuple[int, int]]:
    """Where parameters and gradients are in Megatron's buffers, as far as they are views of them."""
    found = []
    for ddp in trainer.ddp:
        for buffer in ddp.buffers + ddp.expert_parallel_buffers:
            for parameter in buffer.params:
                start = 0 if buffer.param_data is None else buffer.param_data.data_ptr()
                at = parameter.data_ptr() - start if start else 0
                found.append((at, parameter.main_grad.data_ptr() - buffer.grad_data.data_ptr()))
    return found


def sleep_between(model: str, samples: list[Sequence], overrides: dict) -> dict[str, Any]:
    """Two updates without a sleep, and two with one between them."""
    config = make_config(model, overrides)
    trainer = make_trainer(config)
    one_update(trainer, samples)
    one_update(trainer, samples)
    expected = state_of(trainer)
    end_layout()
    del trainer

    old = device_storages()
    trainer = make_trainer(config)
    one_update(trainer, samples)
    old |= host_gradients(trainer)
    sizes = {"awake": new_bytes(old)}
    before, at = state_of(trainer), places(trainer)
    old |= {t.untyped_storage()._cdata: t.untyped_storage() for t in before.values()}
    trainer.sleep()
    sizes["asleep"], refused = staying_bytes(old, sizes["awake"]), []
    for verb in (trainer.export_weights, lambda: trainer.compute_log_probs(trainer.pack(samples))):
        try:
            verb()
        except RuntimeError as error:
            refused.append(str(error))
    trainer.sleep()  # again: nothing happens
    trainer.wake(weights_only=True)
    sizes["with weights"] = new_bytes(old)
    pushed = {f"weight/{name}": tensor.clone() for name, tensor in trainer.export_weights()}
    old |= {t.untyped_storage()._cdata: t.untyped_storage() for t in pushed.values()}
    try:
        one_update(trainer, samples)
    except RuntimeError as error:
        refused.append(str(error))
    trainer.sleep()
    sizes["asleep again"] = staying_bytes(old, sizes["awake"])
    trainer.wake()
    same_place = places(trainer) == at
    parameters = [p for chunk in trainer.chunks for p in chunk.parameters() if p.requires_grad]
    gradients = [float(p.main_grad.abs().sum()) for p in parameters]
    after = state_of(trainer)
    trainer.sleep(keep_weights=True)
    kept = {f"weight/{name}": tensor.clone() for name, tensor in trainer.export_weights()}
    trainer.sleep()
    trainer.wake()
    one_update(trainer, samples)
    result = {
        "expected": expected,
        "before": before,
        "after": after,
        "pushed": pushed,
        "kept": kept,
        "last": state_of(trainer),
        "sizes": sizes,
        "weights": sum(p.nbytes for chunk in trainer.chunks for p in chunk.parameters()),
        "refused": refused,
        "same_place": same_place,
        "gradients": gradients,
    }
    end_layout()
    return result


def sleep_all(model: str, samples: list[Sequence], overrides: list[dict]) -> list[dict]:
    offload.PIECE_BYTES = 50_000  # storages go over several
    return [sleep_between(model, samples, one) for one in overrides]
