"""Norm and clipping of gradients without Transformer Engine and Apex: Megatron's bits in fp32, the norm's own in bf16."""

from __future__ import annotations

import pytest
import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads

from megatron_rl.platform.megatron import gradients

SHAPES = [(), (1,), (1000,), (33, 257), (7,), (0,), (16, 5000)]


def grads(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Parts of a buffer, as Megatron's are, of sizes from 1e-3 to 1e3."""
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    buffer = torch.cat([10 ** float(6 * torch.rand(()) - 3) * torch.randn(size) for size in sizes]).to(dtype)
    return [part.view(shape) for part, shape in zip(buffer.split(sizes), SHAPES, strict=True)]


def test_megatron_takes_them():
    assert clip_grads.l2_norm_impl is gradients.l2_norm
    assert clip_grads.multi_tensor_scale_impl is gradients.scale


def test_in_fp32_on_a_cpu_norm_and_clipping_are_megatrons_own_to_the_bit():
    flag, found = torch.zeros(1, dtype=torch.int), grads()
    ours, _ = clip_grads.multi_tensor_applier(gradients.l2_norm, flag, [found], False)
    theirs, _ = utils.local_multi_tensor_applier(utils.local_multi_tensor_l2_norm, flag, [found], False)
    assert torch.equal(ours, theirs) and ours.shape == (1,)
    factor, copies = float(torch.rand(())), [g.clone() for g in found]
    utils.local_multi_tensor_scale(0, flag, [copies, copies], factor)
    gradients.scale(0, flag, [found, found], factor)
    assert all(torch.equal(a, b) for a, b in zip(found, copies, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_that_of_fp64(dtype):
    """Sums of at most 80,000 squares in fp32 blocks: far below 1e-5, where a norm that is rounded to bf16 is 2e-3 off."""
    found = grads(dtype)
    exact = torch.cat([g.flatten().double() for g in found]).norm()
    ours, _ = gradients.l2_norm(0, torch.zeros(1), [found], False)
    assert ours.dtype == torch.float32 and abs(float(ours) / float(exact) - 1) < 1e-5
