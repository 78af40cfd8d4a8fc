"""Distillation: loss and gradients written out by hand on transformers' models, every layout, and advantages by a teacher."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from distillation_ranks import LAYOUTS, check_teacher, update_once
from layouts import make_config, make_samples, samples_without_ties
from ranks import run_ranks, without_ties
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_rl.algorithms.advantages import distillation
from megatron_rl.config.load import build_config
from megatron_rl.distributed import parallel
from megatron_rl.errors import UserError
from megatron_rl.models.parallel_check import read_hf_config

pytestmark = pytest.mark.timeout(600)  # a fixture runs all layouts

DIRECTIONS = ("forward", "reverse", "jensen_shannon")


@pytest.fixture(scope="module")
def student(tiny_model):
    return str(tiny_model("qwen3"))


@pytest.fixture(scope="module")
def teacher(tiny_model):
    """Of another family and width."""
    return str(tiny_model("qwen3_moe", "--hidden", "96", "--layers", "2", "--seed", "5"))


@pytest.fixture(autouse=True)
def _torn_down():
    yield
    parallel.shutdown()


def divergence(student: Tensor, teacher: Tensor, direction: str, mix: float) -> Tensor:
    """[n] of logits [n, V], by the definitions."""
    s, t = student.log_softmax(-1), teacher.log_softmax(-1)
    if direction == "forward":
        return (t.exp() * (t - s)).sum(-1)
    if direction == "reverse":
        return (s.exp() * (s - t)).sum(-1)
    m = (mix * t.exp() + (1 - mix) * s.exp()).log()
    return mix * (t.exp() * (t - m)).sum(-1) + (1 - mix) * (s.exp() * (s - m)).sum(-1)


@pytest.mark.parametrize("task", [0.0, 0.7])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_an_update_descends_the_loss_written_out_by_hand(direction, task, student, teacher):
    """sft: coefficient T^2 divergence + task_coefficient NLL, a mean over the counted labels: value and every gradient."""
    settings = {
        "teacher": teacher,
        "direction": direction,
        "temperature": 1.7,
        "coefficient": 0.6,
        "task_coefficient": task,
    }
    settings |= {"mix": 0.3} if direction == "jensen_shannon" else {}
    ours_of, theirs_of = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        for folder in (student, teacher)
    )
    samples = samples_without_ties(theirs_of)
    ours = update_once(make_config(student, {"distillation": settings, "model": {"head_chunk_tokens": 7}}), samples)
    kl, nll, count = torch.zeros(()), torch.zeros(()), 0
    for sample in samples:
        tokens = torch.as_tensor(sample.tokens).long()
        mask = torch.as_tensor(sample["loss_mask"])
        rows = slice(sample.prompt_length - 1, len(tokens) - 1)
        logits = ours_of(tokens[None]).logits[0, rows][mask]
        with torch.no_grad():
            target = theirs_of(tokens[None]).logits[0, rows][mask]
        kl = kl + divergence(logits / 1.7, target / 1.7, direction, 0.3).sum()
        nll = nll - logits.log_softmax(-1).gather(1, tokens[sample.prompt_length :][mask][:, None]).sum()
        count += int(mask.sum())
    loss = (0.6 * 1.7**2 * kl + task * nll) / count
    loss.backward()
    assert ours["metrics"]["distillation/kl"] == pytest.approx(float(kl) / count, rel=1e-4)
    grads = {name: p.grad for name, p in ours_of.named_parameters() if p.grad is not None}
    largest = max(float(grad.abs().max()) for grad in grads.values())
    assert largest > 1e-5, "gradients too small to compare"
    for name, grad in grads.items():  # two fp32 backwards through the same layers
        assert np.abs(ours["grads"][name] - grad.numpy()).max() < 3e-4 * largest, name


@pytest.mark.parametrize("placement", ["loss", "advantage"])
def test_layouts_distill_as_one_process(placement, tiny_model, teacher):
    """Divergence, advantages, and every gradient of a MoE student."""
    model = str(tiny_model("qwen3_moe"))
    settings = {"teacher": teacher, "placement": placement, "task_coefficient": 0.5}
    settings |= {"direction": "reverse"} if placement == "loss" else {}
    base = {"distillation": settings, "batch": {"updates_per_step": 1}}

    def attempt(seed: int):
        samples = make_samples(seed, 12, 200)
        return samples, run_ranks(1, "distillation_ranks:updates", (model, samples, [base], True), refuse_ties=True)

    samples, [[one]] = without_ties(attempt)
    layouts = [base | {"parallel": parallel} for parallel in LAYOUTS.values()]
    others = run_ranks(2, "distillation_ranks:updates", (model, samples, layouts, True), timeout=400.0)[0]
    metric = "distillation/kl" if placement == "loss" else "distillation/reverse_kl"
    largest = max(np.abs(grad).max() for grad in one["grads"].values())
    for name, other in zip(LAYOUTS, others, strict=True):
        for figure in (metric, "loss/policy", "update/grad_norm"):
            assert other["metrics"][figure] == pytest.approx(one["metrics"][figure], rel=2e-5, abs=1e-6), (name, figure)
        worst = max(np.abs(other["grads"][tensor] - grad).max() for tensor, grad in one["grads"].items())
        assert worst < 1e-5 * max(1.0, float(largest)), name
    for result in (one, *others):  # a later epoch still has what the teacher said, and the student has moved
        if placement == "loss":
            assert result["later"][metric] != result["metrics"][metric] and result["later"][metric] > 0.01
    if placement == "advantage":  # half of what the rewards said, and the teacher's whole say
        old, taught = one["old"], one["teacher"]
        given = torch.cat([torch.as_tensor(sample["advantages"]) for sample in samples])
        mask = torch.cat([torch.as_tensor(sample["loss_mask"]) for sample in samples])
        expected = torch.where(mask, 0.5 * given + (taught - old), 0.5 * given)
        assert torch.allclose(one["advantages"][mask], expected[mask].to(one["advantages"].dtype), atol=1e-6)


def test_its_mean_gradient_is_that_of_the_exact_reverse_kl():
    """Over the whole vocabulary: sum p grad log p A = - grad KL(policy || teacher)."""
    logits = torch.randn(5, 11, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(5, 11, dtype=torch.float64).log_softmax(-1)
    log_probs = logits.log_softmax(-1)
    exact = (log_probs.exp() * (log_probs - teacher)).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    surrogate = -(log_probs.detach().exp() * log_probs * distillation(log_probs, teacher, 2.0)).sum()
    (found,) = torch.autograd.grad(surrogate, logits)
    assert torch.allclose(found, 2.0 * wanted, atol=1e-13)


BAD = {
    r"distillation\.direction = reverse does nothing without .*; set distillation\.teacher": {"direction": "reverse"},
    r"distillation\.teacher = /gone: does not exist": {"teacher": "/gone"},
    r"distillation\.teacher and distillation\.address are both set": {"teacher": "X", "address": "http://x"},
    r"distillation\.placement = advantage: demonstrations have no advantages": {
        "teacher": "X",
        "placement": "advantage",
    },
    r"distillation\.address: a server returns only the log-probs of sampled tokens.*set distillation\.teacher": {
        "address": "http://x"
    },
    r"distillation\.mix = 0\.2 does nothing with .*direction = forward; set .*direction: jensen_shannon": {
        "teacher": "X",
        "mix": 0.2,
    },
    r"distillation\.coefficient = 0: the teacher would have no effect": {"teacher": "X", "coefficient": 0.0},
}


@pytest.mark.parametrize("message", BAD)
def test_a_choice_that_cannot_be_is_refused_by_one_line(message, student):
    """By the key, with the remedy."""
    config = build_config({"model": {"path": student}, "distillation": BAD[message]})
    with pytest.raises(UserError, match=message):
        check_teacher(config, read_hf_config(student), "sft", 1)


def test_a_teacher_with_another_tokenizer_is_refused(student, tiny_model):
    """Its tokens are others."""
    other = str(tiny_model("qwen3", "--tokenizer", "numbers"))
    config = build_config({"model": {"path": student}, "distillation": {"teacher": other}})
    with pytest.raises(UserError, match=r"distillation\.teacher = .*: has another tokenizer"):
        check_teacher(config, read_hf_config(student), "sft", 1)


def test_what_advantages_would_leave_out_is_refused(student, teacher):
    """train: the sampled tokens' log-probs are looked at as they are, and rewards may not count; reward has no teacher."""
    settings = {"teacher": teacher, "placement": "advantage", "temperature": 2.0}
    config = build_config({"model": {"path": student}, "distillation": settings})
    with pytest.raises(
        UserError,
        match=r"distillation\.temperature = 2 does nothing with .*placement = advantage; set .*placement: loss",
    ):
        check_teacher(config, read_hf_config(student), "train", 1)
    for message, other in {
        r"placement = advantage compares .* set rollout\.sampling\.temperature: 1": {
            "rollout": {"sampling": {"temperature": 0.8}}
        },
        r"placement = advantage compares the teacher's": {"pruning": {"enabled": True}},
        r"algorithm\.entropy_reward with distillation\.task_coefficient = 0": {"algorithm": {"entropy_reward": 0.1}},
        r"algorithm\.kl\.placement = reward with distillation\.task_coefficient = 0": {
            "algorithm": {"kl": {"coefficient": 0.1, "placement": "reward"}}
        },
    }.items():
        settings = {"teacher": teacher, "placement": "advantage"}
        config = build_config({"model": {"path": student}, "distillation": settings, **other})
        with pytest.raises(UserError, match=message):
            check_teacher(config, read_hf_config(student), "train", 1)
    config = build_config({"model": {"path": student}, "distillation": {"teacher": teacher}})
    with pytest.raises(UserError, match="only megatron-rl sft and train use a teacher, not reward"):
        check_teacher(config, read_hf_config(student), "reward", 1)
