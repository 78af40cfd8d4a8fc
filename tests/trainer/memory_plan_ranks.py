"""What ranks measure for the tests of the memory plan: bytes of real Megatron buffers, and of what a real forward keeps."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import torch
from ranks import end_layout
from trainer.layouts import make_config, make_trainer

from benchmarks.peak_memory import forward_and_backward, peak_bytes
from megatron_rl.data.sequence import Sequence
from megatron_rl.trainer.trainer import Trainer

from megatron.core import parallel_state  # isort: skip (after megatron_rl, which makes it importable without a GPU)

SEQUENCES, LENGTH, PROMPT = 4, 256, 64
TOKENS = SEQUENCES * LENGTH


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of all storages behind them, each once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    return sum(storages.values())


def parameter_figures(trainer: Trainer) -> dict[str, int]:
    """Bytes that this rank has allocated, and its parameters, those of experts apart."""
    named = [item for chunk in trainer.chunks for item in chunk.named_parameters()]
    buffers = [b for ddp in trainer.ddp for b in (*ddp.buffers, *ddp.expert_parallel_buffers)]
    state = []
    for part in trainer.optimizer.chained_optimizers:
        inner = part.optimizer
        state += [t for one in inner.state.values() for t in one.values() if torch.is_tensor(t) and t.ndim]
        state += [p for group in inner.param_groups for p in group["params"]]  # fp32 copies, or views of fp32 weights
    weights = {p.untyped_storage().data_ptr() for _, p in named}
    owned = [t for t in state if t.untyped_storage().data_ptr() not in weights]
    apart = trainer.reference if trainer.reference is not trainer.chunks else None  # the model without its adapters
    reference = [p for chunk in apart or [] for p in chunk.parameters()]
    return {
        "weights": storage_bytes(p for _, p in named),
        "gradients": storage_bytes(b.grad_data for b in buffers),
        "optimizer": storage_bytes(owned),
        "reference": storage_bytes(reference),
        "experts": sum(p.numel() for name, p in named if ".experts." in name and ".shared_" not in name),
        "parameters": sum(p.numel() for _, p in named),
    }


def one_batch(vocab: int, sequences: int = SEQUENCES) -> list[Sequence]:
    rng = np.random.default_rng()
    samples = []
    for _ in range(sequences):
        tokens = rng.integers(4, vocab, LENGTH + 1).tolist()
        sample = Sequence.demonstration(tokens[:PROMPT], tokens[PROMPT:])
        sample["rollout_log_probs"], sample["advantages"] = -3.0, float(rng.normal())
        samples.append(sample)
    return samples


class Kept:
    """Bytes that a forward saves for its backward, those of `known` storages left out."""

    def __init__(self, known: set[int]) -> None:
        self._known = set(known)
        self._alive: list[torch.Tensor] = []
        self.counting = True
        self.bytes = 0

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if self.counting and storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self._alive.append(tensor)  # so that its address is not given away again
            self.bytes += storage.nbytes()
        return tensor


def measure_passes(trainer: Trainer, sequences: int, names: Collection[str]) -> dict[str, int]:
    """Of one micro-batch: what its forward keeps before the head, and the most that is held at a time in an update's passes
    and in one for log-probs."""
    from megatron_rl.trainer import model_pass as module

    batches = trainer.pack(one_batch(trainer.model.hf_config.vocab_size, sequences))
    assert len(batches) == 1 and batches[0].tokens.shape[1] * trainer.config.parallel.context == sequences * LENGTH
    run = forward_and_backward(trainer, batches)
    own = [t for chunk in trainer.chunks for t in (*chunk.parameters(), *chunk.buffers())]
    own += [b.grad_data for ddp in trainer.ddp for b in (*ddp.buffers, *ddp.expert_parallel_buffers)]
    known = {t.untyped_storage().data_ptr() for t in own}
    found = {"peak": peak_bytes(run)}
    kept, head = Kept(known), module.log_prob_head

    def log_prob_head(**arguments):
        kept.counting = False
        return head(**arguments)

    if "kept" in names:
        module.log_prob_head = log_prob_head
        try:
            with torch.autograd.graph.saved_tensors_hooks(kept.save, lambda tensor: tensor):
                run()
        finally:
            module.log_prob_head = head
        found["kept"] = kept.bytes
    if "log_probs" in names:
        found["log_probs"] = peak_bytes(lambda: trainer.compute_log_probs(batches))
    return found


def token_slopes(models: list[str], recompute: str, names: Collection[str]) -> list[dict[str, float]]:
    """Bytes per token of each model: the peak of an update's passes, and those of `measure_passes` that are named."""
    found = []
    for model in models:
        batch = {"tokens_per_micro_batch": 2 * TOKENS, "updates_per_step": 1}
        trainer = make_trainer(make_config(model, {"batch": batch, "model": {"recompute": recompute}}))
        measure_passes(trainer, 1, names)  # what is made once
        few, many = (measure_passes(trainer, sequences, names) for sequences in (SEQUENCES, 2 * SEQUENCES))
        found.append({name: (many[name] - few[name]) / TOKENS for name in few})
        end_layout()
    return found


def measure(runs: list[tuple[str, dict]]) -> list[dict[str, int]]:
    """Figures of this rank for each model and layout; with 'passes' in one those of a forward and backward too."""
    found = []
    for model, overrides in runs:
        sections = {section: values for section, values in overrides.items() if section != "passes"}
        batch = {"tokens_per_micro_batch": TOKENS, "updates_per_step": 1}
        trainer = make_trainer(make_config(model, {"batch": batch, **sections}))
        allocate(trainer)
        figures = parameter_figures(trainer)
        if overrides.get("passes"):
            figures |= measure_passes(trainer, SEQUENCES, ("kept",))
        figures["stage"] = parallel_state.get_pipeline_model_parallel_rank()
        found.append(figures)
        end_layout()  # the next layout starts on the same processes
    return found


def allocate(trainer: Trainer) -> None:
    """The optimizer's state, which torch's Adam makes in its first step."""
    trainer.optimizer.zero_grad()
    for ddp in trainer.ddp:
        ddp.zero_grad_buffer()
    trainer.optimizer.step()
