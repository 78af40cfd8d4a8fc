"""DPO's parts beside the models: the SFT term of single responses, KTO's crossed prompts, and what is kept of a reference."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.config import DPOConfig
from megatron_rl.data.sequence import Sequence
from megatron_rl.dpo import dpo_loss, mismatched, whole_response
from megatron_rl.errors import UserError
from megatron_rl.metrics.reduce import figures
from megatron_rl.tasks.preferences import Comparison
from megatron_rl.trainer.scored_spans import Reference, ScoredSpans

ALONE: Any = SimpleNamespace(main_does=lambda work: work())


def response(rng: np.random.Generator, label: float, tools: int = 0) -> Comparison:
    prompt, length = int(rng.integers(1, 6)), int(rng.integers(2 + tools, 9 + tools))
    sequence = Sequence.demonstration(rng.integers(4, 60, prompt).tolist(), rng.integers(4, 60, length).tolist())
    mask = np.ones(length, bool)
    mask[1 : 1 + tools] = False
    sequence["loss_mask"] = mask
    return Comparison("p", "label", [sequence], [label])


def test_the_sft_term_of_kto_is_of_desirable_responses():
    """Its gradient is -coefficient / tokens of all desirable responses at each of these, and 0 at the others."""
    rng = np.random.default_rng()
    labels = rng.permutation([1.0, 0.0, *rng.integers(0, 2, 6)])
    table = ScoredSpans.of([response(rng, label) for label in labels], whole_response)
    lengths = torch.tensor([s.response_length for s in table.sequences], dtype=torch.float64)
    policy = torch.from_numpy(rng.normal(-9, 2, len(labels))).requires_grad_()
    reference, baseline = torch.from_numpy(rng.normal(-9, 2, len(labels))), torch.tensor(0.1)
    found = []
    for coefficient in (0.0, 0.7):
        config = DPOConfig(loss="kto", sft_coefficient=coefficient)
        loss, metrics = dpo_loss(config, table, reference, baseline, {"old_log_probs": policy, "labels": lengths})
        found.append(torch.autograd.grad(loss, policy)[0])
    good = torch.from_numpy(labels) > 0.5
    expected = torch.where(good, -0.7 / lengths[good].sum(), 0.0)
    assert torch.allclose(found[1] - found[0], expected, rtol=1e-12, atol=1e-14)
    values = figures(metrics)
    assert values["preference/chosen_log_probs"] == pytest.approx(policy.detach()[good].mean().item())
    assert values["preference/rejected_log_probs"] == pytest.approx(policy.detach()[~good].mean().item())


def test_tokens_of_tools_are_none_of_a_crossed_response_either():
    rng = np.random.default_rng()
    comparisons = [response(rng, 1.0, tools=int(rng.integers(0, 4))) for _ in range(5)]
    for one, other, crossed in zip(
        comparisons, [*comparisons[1:], comparisons[0]], mismatched(comparisons), strict=True
    ):
        [prompt], [theirs], [made] = one.sequences, other.sequences, crossed.sequences
        assert made.tokens[: made.prompt_length].tolist() == prompt.tokens[: prompt.prompt_length].tolist()
        length = made.response_length
        assert made.tokens[made.prompt_length :].tolist() == theirs.tokens[theirs.prompt_length :][:length].tolist()
        assert made["loss_mask"].tolist() == theirs["loss_mask"][:length].tolist()


def test_what_is_kept_of_a_reference_is_of_its_weights_and_precision(tmp_path):
    """Weights that are written anew in its place, or another precision, are another model; a damaged file is named."""
    weights = tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"0")
    table = ScoredSpans.of([response(np.random.default_rng(), 1.0)], whole_response)

    def name(precision: str = "bf16", file: Path = tmp_path / "kept.npz") -> str:
        return Reference(str(weights.parent), file, ALONE, precision=precision)._name(table)

    first = name()
    assert name() == first != name("fp32")
    state = weights.stat()
    os.utime(weights, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert name() != first
    (damaged := tmp_path / "damaged.npz").write_bytes(b"PK no archive")
    reference = Reference(str(weights.parent), damaged, ALONE, precision="bf16")
    with pytest.raises(UserError, match=r"damaged\.npz: damaged \(.*\); remove it"):
        reference.precompute([table], lambda: pytest.fail("no model is asked"))
