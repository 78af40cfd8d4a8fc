"""What ranks measure for the tests of the memory plan: bytes of real Megatron buffers, and of what a real forward keeps."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np
import torch
from trainer.layouts import make_config, make_trainer

from megatron_rl.trainer.objective import is_pointwise, policy_objective
from megatron_rl.trainer.packing import Sample
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
    reference = [p for chunk in trainer.reference or [] for p in chunk.parameters()]
    return {
        "weights": storage_bytes(p for _, p in named),
        "gradients": storage_bytes(b.grad_data for b in buffers),
        "optimizer": storage_bytes(owned),
        "reference": storage_bytes(reference),
        "experts": sum(p.numel() for name, p in named if ".experts." in name and ".shared_" not in name),
        "parameters": sum(p.numel() for _, p in named),
    }


def one_batch(vocab: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    response = LENGTH + 1 - PROMPT
    return [
        Sample(
            rng.integers(4, vocab, LENGTH + 1).astype(np.int32),
            PROMPT,
            np.ones(response, bool),
            np.full(response, -3.0, np.float32),
            float(rng.normal()),
        )
        for _ in range(SEQUENCES)
    ]


class Kept:
    """Bytes that a forward saves for its backward, parameters and buffers left out; the head's apart."""

    def __init__(self, trainer: Trainer) -> None:
        chunks = [*trainer.chunks]
        own = [t for c in chunks for t in (*c.parameters(), *c.buffers())]
        self._known = {t.untyped_storage().data_ptr() for t in own}
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


def kept_by_forward(trainer: Trainer) -> int:
    """Of one micro-batch of TOKENS tokens: what lies before the head."""
    from megatron_rl.trainer import trainer as module

    batches = trainer.pack(one_batch(trainer.model.hf_config.vocab_size))
    assert len(batches) == 1 and batches[0].tokens.shape[1] * trainer.config.parallel.context == TOKENS
    kept = Kept(trainer)
    head = module.log_prob_head

    def log_prob_head(**arguments):
        kept.counting = False
        return head(**arguments)

    objective = partial(policy_objective, trainer.config, trainer.scale(batches), all_reduce=trainer.context_sum)
    options = {"with_entropy": True, "pointwise": is_pointwise(trainer.config), "pruned": True}
    module.log_prob_head = log_prob_head
    try:
        with torch.autograd.graph.saved_tensors_hooks(kept.save, lambda tensor: tensor):
            trainer._run(
                trainer.ddp, batches, trainer._passes(batches, "update"), objective, forward_only=False, **options
            )
    finally:
        module.log_prob_head = head
    return kept.bytes


def measure(model: str, layouts: list[dict]) -> list[dict[str, int]]:
    """Figures of this rank under each layout: {'kept': True} in one measures a forward too."""
    found = []
    for overrides in layouts:
        sections = {k: v for k, v in overrides.items() if k != "kept"}
        batch = {"tokens_per_micro_batch": TOKENS, "updates_per_step": 1}
        trainer = make_trainer(make_config(model, {"batch": batch, **sections}))
        allocate(trainer)
        figures = parameter_figures(trainer)
        if overrides.get("kept"):
            figures["kept"] = kept_by_forward(trainer)
        figures["stage"] = parallel_state.get_pipeline_model_parallel_rank()
        found.append(figures)
        parallel_state.destroy_model_parallel()  # the next layout starts on the same processes
    return found


def allocate(trainer: Trainer) -> None:
    """The optimizer's state, which torch's Adam makes in its first step."""
    trainer.optimizer.zero_grad()
    for ddp in trainer.ddp:
        ddp.zero_grad_buffer()
    trainer.optimizer.step()
