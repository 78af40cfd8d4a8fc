"""What each rank does in test_lora.py."""

from __future__ import annotations

from pathlib import Path

import torch
from layouts import gather_log_probs, make_config, make_trainer, reduce_whole, score
from ranks import end_layout
from safetensors.torch import load_file

from megatron_rl.data.sequence import Sequence
from megatron_rl.metrics.reduce import figures
from megatron_rl.trainer import checkpoint
from megatron_rl.trainer.objective import Policy
from megatron_rl.trainer.trainer import Trainer


def write_starts(starts: list[tuple[str, dict, str]]) -> None:
    """Folders of adapters whose B is not zero, so that A has a gradient too."""
    for model, lora, out in starts:
        trainer = make_trainer(make_config(model, {"lora": lora}))
        for adapter in trainer.model.adapters(trainer.chunks):
            adapter.set(adapter.down(), 0.1 * torch.randn(adapter.up().shape))
        trainer.save_adapter(Path(out))
        end_layout()


def adapters_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """In PEFT's format, on rank 0."""
    return trainer.model.gather_adapters(trainer.chunks)


def gradients_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Reduced gradients in the adapters' place, gathered like them."""
    trained = [p for chunk in trainer.chunks for p in chunk.parameters() if p.requires_grad]
    weights = [p.data.clone() for p in trained]
    for p in trained:
        p.data.copy_(p.main_grad)  # pyright: ignore[reportAttributeAccessIssue]: DDP adds it
    found = adapters_of(trainer)
    for p, weight in zip(trained, weights, strict=True):
        p.data.copy_(weight)
    return found


def learn(trainer: Trainer, samples: list[Sequence], updates: int, *, moved: bool = True) -> dict:
    """`updates` updates -> log-probs before, figures and gradients of the first."""
    mine = list(range(len(samples)))[trainer.ranks.data_rank :: trainer.ranks.data_size]
    found: dict = {}
    for update in range(updates):
        batches = trainer.pack([samples[i] for i in mine])
        score(trainer, batches)
        if update == 0:
            found["log_probs"] = gather_log_probs(trainer, batches, mine)
        step, caught = trainer._step, {}
        if update == 0 and moved:
            trainer._step = lambda caught=caught, step=step: (caught.update(grads=gradients_of(trainer)), step())[1]
        done = trainer.update(batches, Policy(trainer.config))
        trainer._step = step
        if update == 0:
            found |= {"metrics": figures(done.metrics), **caught}
    return found


def train_as(samples: list[Sequence], layouts: list[dict]) -> list[dict]:
    """Two updates under each layout, one after the other; the last adapters, as they are and in the exported weights."""
    results = []
    for overrides in layouts:
        trainer = make_trainer(make_config("", overrides))
        reduce_whole(trainer)
        found = learn(trainer, samples, 2)
        found["adapters"] = adapters_of(trainer)
        found["weights"] = {name: tensor.clone() for name, tensor in trainer.export_weights()}
        found["fingerprints"] = trainer.fingerprints()
        results.append(found if trainer.ranks.rank == 0 else {})
        end_layout()
    return results


def go_on(model: str, samples: list[Sequence], overrides: dict, folder: str) -> tuple[dict, dict, list[str]]:
    """Adapters after four updates: at one go, and with a save, another trainer, and a load after two; the files' names."""
    at_once = make_trainer(make_config(model, overrides))
    learn(at_once, samples, 4, moved=False)
    expected = adapters_of(at_once)
    end_layout()
    first = make_trainer(make_config(model, overrides))
    learn(first, samples, 2, moved=False)
    path = checkpoint.save(Path(folder), 2, first, first.ranks, extra={}, keep=1)
    end_layout()
    second = make_trainer(make_config(model, overrides))
    checkpoint.load(path, second, second.ranks)
    learn(second, samples, 2, moved=False)
    files = [str(file.relative_to(path)) for file in sorted(path.rglob("*"))]
    return expected, adapters_of(second), files


def load_as(model: str, overrides: dict, path: str) -> tuple[dict, dict]:
    """A checkpoint of another layout: the adapters in the model, and those of its PEFT folder."""
    trainer = make_trainer(make_config(model, overrides))
    checkpoint.load(Path(path), trainer, trainer.ranks)
    return adapters_of(trainer), load_file(Path(path) / "adapter" / "adapter_model.safetensors")
