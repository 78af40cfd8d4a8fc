"""Feature distillation: loss and gradients by hand on transformers' models, ModelOpt's losses, layouts, and what is refused."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from distillation_ranks import check_teacher, update_once
from layouts import make_config, make_samples, samples_without_ties
from ranks import run_ranks, without_ties
from transformers import AutoModelForCausalLM

from megatron_rl.config.load import build_config
from megatron_rl.distributed import parallel
from megatron_rl.errors import UserError
from megatron_rl.models.parallel_check import read_hf_config
from megatron_rl.trainer.features import FEATURE_LOSSES

pytestmark = pytest.mark.timeout(600)  # a fixture runs all layouts

PAIRS = [[0, 2], [1, 0], [1, 2]]
"""Layers of model and teacher; one of the model's is drawn to two."""
LAYOUTS = {
    "recompute": {"model": {"recompute": "full"}},
    "tp2_sp": {"parallel": {"tensor": 2, "expert_tensor": 1}},
    "ep2": {"parallel": {"expert": 2}},
    "cp2": {"parallel": {"context": 2}},
    "dp2": {"parallel": {"distributed_optimizer": True}},
}


@pytest.fixture(scope="module")
def teacher(tiny_model):
    """Deeper than the model, of another family, and as wide."""
    return str(tiny_model("qwen3_moe", "--layers", "3", "--seed", "5"))


@pytest.fixture(autouse=True)
def _torn_down():
    yield
    parallel.shutdown()


def layer_outputs(model, tokens):
    """[layers, T, hidden] of a model of transformers, and its logits [T, V]."""
    found, hooks = [], []
    for layer in model.model.layers:
        hooks.append(
            layer.register_forward_hook(lambda _, __, out: found.append(out if torch.is_tensor(out) else out[0]))
        )
    logits = model(tokens[None]).logits[0]
    for hook in hooks:
        hook.remove()
    return [out[0] for out in found], logits


@pytest.mark.parametrize(("loss", "family"), [("mse", "qwen3"), ("cosine", "qwen3"), ("mse", "qwen3_moe")])
def test_an_update_descends_the_loss_written_out_by_hand(loss, family, tiny_model, teacher):
    """coefficient KL + feature_coefficient sum over pairs: a mean over the counted labels, value and every gradient.

    Routers have losses of layers, too, whose scale is another one.
    """
    model = str(tiny_model(family))
    ours_of, theirs_of = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        for folder in (model, teacher)
    )
    samples = samples_without_ties(theirs_of, *([ours_of] if family == "qwen3_moe" else []))
    assert sum(len(sample.tokens) for sample in samples) > 1.2 * sum(sample["loss_mask"].sum() for sample in samples)
    settings = {"teacher": teacher, "feature_layers": PAIRS, "feature_loss": loss, "coefficient": 0.3}
    ours = update_once(make_config(model, {"distillation": settings | {"feature_coefficient": 1.9}}), samples)
    drawn, kl, count = torch.zeros(()), torch.zeros(()), 0
    for sample in samples:
        tokens = torch.as_tensor(sample.tokens).long()
        rows = torch.arange(sample.prompt_length - 1, len(tokens) - 1)[torch.as_tensor(sample["loss_mask"])]
        own, logits = layer_outputs(ours_of, tokens)
        with torch.no_grad():
            theirs, target = layer_outputs(theirs_of, tokens)
        log_probs, target = logits[rows].log_softmax(-1), target[rows].log_softmax(-1)
        kl = kl + (target.exp() * (target - log_probs)).sum()
        for mine, other in PAIRS:
            a, b = own[mine][rows], theirs[other][rows]
            if loss == "mse":
                drawn = drawn + ((a - b) ** 2).mean(-1).sum()
            else:
                drawn = drawn + (1 - (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))).sum()
        count += len(rows)
    ((0.3 * kl + 1.9 * drawn) / count).backward()
    assert ours["metrics"]["distillation/features"] == pytest.approx(float(drawn.detach()) / count, rel=1e-4)
    assert ours["metrics"]["distillation/kl"] == pytest.approx(float(kl.detach()) / count, rel=1e-4)
    grads = {name: p.grad for name, p in ours_of.named_parameters() if p.grad is not None}
    largest = max(float(grad.abs().max()) for grad in grads.values())
    assert largest > 1e-5, "gradients too small to compare"
    compared = {name: grad for name, grad in grads.items() if ".experts." not in name}  # which transformers stacks
    assert len(compared) > 10
    for name, grad in compared.items():  # two fp32 backwards through the same layers
        assert np.abs(ours["grads"][name] - grad.numpy()).max() < 3e-4 * largest, name


@pytest.mark.filterwarnings("ignore")
def test_the_losses_are_modelopts():
    """Of its plugin for Megatron, token by token."""
    from modelopt.torch.distill.plugins import megatron

    own, target = torch.randn(2, 7, 1, 24, generator=torch.Generator().manual_seed(int.from_bytes(os.urandom(4))))
    settings = SimpleNamespace(sequence_parallel=False, tensor_model_parallel_size=1)
    for name, theirs in (("mse", megatron.MSELoss), ("cosine", megatron.HiddenStateCosineLoss)):
        expected, *_ = theirs(settings)(own, target)
        torch.testing.assert_close(FEATURE_LOSSES[name](own[:, 0], target[:, 0]), expected[0], rtol=1e-5, atol=1e-6)


def test_layouts_distill_as_one_process(tiny_model, teacher):
    """The features' loss and every gradient of a MoE model, on its own samples."""
    model = str(tiny_model("qwen3_moe"))
    base = {"distillation": {"teacher": teacher, "feature_layers": PAIRS, "feature_loss": "cosine"}}

    def attempt(seed: int):
        samples, runs = make_samples(seed, 12, 200), [base, base | LAYOUTS["recompute"]]
        return samples, run_ranks(1, "distillation_ranks:updates", (model, samples, runs), refuse_ties=True)[0]

    samples, (one, again) = without_ties(attempt)
    two = [base | layout for name, layout in LAYOUTS.items() if name != "recompute"]
    others = [again, *run_ranks(2, "distillation_ranks:updates", (model, samples, two), timeout=400.0)[0]]
    largest = max(1.0, *(float(np.abs(grad).max()) for grad in one["grads"].values()))
    for name, other in zip(LAYOUTS, others, strict=True):
        for figure in ("distillation/features", "distillation/kl", "update/grad_norm"):
            assert other["metrics"][figure] == pytest.approx(one["metrics"][figure], rel=2e-5, abs=1e-6), (name, figure)
        worst = max(np.abs(other["grads"][tensor] - grad).max() for tensor, grad in one["grads"].items())
        assert worst < 1e-5 * largest, name


BAD = {
    r"feature_loss = cosine does nothing without distillation\.feature_layers": {"feature_loss": "cosine"},
    r"feature_layers = \[\[0, 0\]\]: with feature_coefficient = 0": {
        "feature_layers": [[0, 0]],
        "feature_coefficient": 0.0,
    },
    r"feature_layers = \[\[9, 0\]\]: model\.path has layers 0 to \d, but not 9": {"feature_layers": [[9, 0]]},
    r"feature_layers = \[\[0, 3\]\]: distillation\.teacher has layers 0 to 2, but not 3": {"feature_layers": [[0, 3]]},
    r"feature_layers = \[\[0, 0\]\]: this needs a teacher that the trainer runs": {
        "feature_layers": [[0, 0]],
        "teacher": None,
        "recorded": True,
    },
}


@pytest.mark.parametrize("message", BAD)
def test_features_that_cannot_be_are_refused_by_one_line(message, tiny_model, teacher):
    """By the key, with the remedy."""
    student = str(tiny_model("qwen3"))
    config = build_config({"model": {"path": student}, "distillation": {"teacher": teacher} | BAD[message]})
    with pytest.raises(UserError, match=message):
        check_teacher(config, read_hf_config(student), "sft", 1)


def test_layers_that_cannot_be_compared_are_refused(tiny_model, teacher):
    """Of other widths, on other stages, or beside a teacher that is looked at in advantages alone."""
    student, wide = str(tiny_model("qwen3")), str(tiny_model("qwen3_moe", "--hidden", "96", "--layers", "2"))
    for message, sections, kind, world in (
        ("the model's hidden size is 64 and the teacher's 96", {"distillation": {"teacher": wide}}, "sft", 1),
        (r"different stages of parallel\.pipeline = 2", {"parallel": {"pipeline": 2}}, "sft", 2),
        ("placement = advantage cannot use them", {"distillation": {"placement": "advantage"}}, "train", 1),
    ):
        settings = {"teacher": teacher, "feature_layers": [[0, 0]]} | sections.pop("distillation", {})
        config = build_config({"model": {"path": student}, "distillation": settings, **sections})
        with pytest.raises(UserError, match=message):
            check_teacher(config, read_hf_config(student), kind, world)
