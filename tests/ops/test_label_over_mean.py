"""Label smoothing of a head's cross entropy against its definition in fp64: values and gradients, over ranks too."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from megatron_rl.data.packing import Layout, pack
from megatron_rl.data.sequence import Sequence
from megatron_rl.ops import linear_log_probs
from megatron_rl.ops.token_terms import label_over_mean
from megatron_rl.trainer.objective import SFT, HeadOutputs


def head(seed: int, tokens: int = 23, rows: int = 40, dtype: torch.dtype = torch.float64):
    """Hidden states, a weight of which the last rows are padding, and labels, some of them twice."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, 16, generator=generator, dtype=torch.float64) for n in (tokens, rows))
    targets = torch.randint(0, 37, (tokens,), generator=generator)
    targets[1] = targets[0]
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def definition(hidden, weight, targets, smoothing: float) -> torch.Tensor:
    """[n]: (1 - e) x negative log-likelihood + e x the mean over the 37 tokens of theirs."""
    log_probs = (hidden.double() @ weight.double().t())[:, :37].log_softmax(-1)
    picked = torch.stack([log_probs[i, label] for i, label in enumerate(targets.tolist())])
    return -(1 - smoothing) * picked - smoothing * log_probs.sum(-1) / 37


def smoothed(hidden, weight, targets, smoothing: float, **options) -> torch.Tensor:
    log_probs = linear_log_probs(hidden, weight, targets, log_rho=None, vocab_size=37, chunk_tokens=7, **options)
    return smoothing * label_over_mean(hidden, weight, targets, vocab_size=37, **options) - log_probs.log_probs


@pytest.mark.parametrize("smoothing", [0.1, 0.8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients(smoothing, dtype):
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    hidden, weight, targets = head(seed, dtype=dtype)
    sent = torch.randn(len(targets), generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    ours, expected = (make(hidden, weight, targets, smoothing) for make in (smoothed, definition))
    # Logits of about 4, at most 20: rounded to the type before the softmax; sums of 40 products in fp32 or better.
    near = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.15}[dtype]
    assert (ours.double() - expected).abs().max() < near
    found = torch.autograd.grad((ours * sent).sum(), (hidden, weight))
    for grad, wanted in zip(found, torch.autograd.grad((expected * sent).sum(), (hidden, weight)), strict=True):
        assert grad.dtype == dtype and (grad.double() - wanted.double()).abs().max() < near * (1 + wanted.abs().max())
    assert (found[1][37:] == 0).all()  # padding belongs to no mean


def test_the_objective_is_that_of_its_labels():
    """Over those that count; all alike are the mean of the vocabulary, without smoothing nothing is asked for."""
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    torch.manual_seed(seed)
    one = Sequence.demonstration([1, 2], torch.randint(0, 37, (9,)).tolist())
    one["loss_mask"][3] = False
    batch = pack([one], [0], Layout())
    hidden, weight = torch.randn(len(batch.labels), 16).double(), torch.randn(37, 16).double()
    labels = batch.labels.clamp(min=0)
    found = linear_log_probs(hidden, weight, labels, log_rho=None).log_probs
    zero = torch.zeros_like(found)
    outputs = HeadOutputs(found, zero, zero + 1, above_mean=label_over_mean(hidden, weight, labels))
    result = SFT(label_smoothing=0.2)(batch, outputs)
    expected = definition(hidden, weight, labels, 0.2)[batch.mask]
    assert len(expected) == 8 and float(result.loss) == pytest.approx(float(expected.sum()), rel=1e-12)
    sums, count = result.metrics["loss/smoothed"].parts
    assert float(sums) == pytest.approx(float(expected.sum())) and int(count) == 8
    assert float(result.metrics["loss/policy"].parts[0]) == pytest.approx(-float(found[batch.mask].sum()), rel=1e-12)
    plain = SFT()(batch, outputs._replace(above_mean=None))
    assert float(plain.loss) == pytest.approx(-float(found[batch.mask].sum()), rel=1e-12)
    assert "loss/smoothed" not in plain.metrics and SFT().label_smoothing == 0


def on_ranks(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, the sum over ranks of the gradient of hidden, and the whole weight's."""
    dist.init_process_group("gloo")
    hidden, weight, targets = head(seed)
    share = weight.detach().chunk(2)[dist.get_rank()].clone().requires_grad_()
    values = smoothed(hidden, share, targets, 0.3, tp_group=dist.group.WORLD)
    of_hidden, of_weight = torch.autograd.grad(values.sum(), (hidden, share))
    dist.all_reduce(of_hidden)
    parts = [torch.zeros_like(of_weight) for _ in range(2)]
    dist.all_gather(parts, of_weight)
    return values.detach(), of_hidden, torch.cat(parts)


def test_over_a_vocabulary_in_two():
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    hidden, weight, targets = head(seed)
    expected = definition(hidden, weight, targets, 0.3)
    wanted = (expected.detach(), *torch.autograd.grad(expected.sum(), (hidden, weight)))
    for found in run_ranks(2, "ops.test_label_over_mean:on_ranks", (seed,), timeout=120):
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_arguments_that_do_not_fit():
    hidden, weight, targets = head(0)
    with pytest.raises(ValueError, match=r"must be \[n, H\], \[V, H\], \[n\]"):
        label_over_mean(hidden, weight[:, :3], targets)
    with pytest.raises(ValueError, match=r"must be \[n, H\], \[V, H\], \[n\]"):
        label_over_mean(hidden, weight, targets[:4])
    with pytest.raises(ValueError, match="int64"):
        label_over_mean(hidden, weight, targets.int())
    with pytest.raises(ValueError, match="must be alike"):
        label_over_mean(hidden.float(), weight, targets)
