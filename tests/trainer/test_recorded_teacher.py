"""Distillation from a teacher's recorded log-probs: loss and gradients by hand on transformers' models, and every layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from distillation_ranks import LAYOUTS, check_teacher, update_once
from layouts import make_config, make_samples
from ranks import fresh_seed, run_ranks, without_ties
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_rl.config.load import build_config
from megatron_rl.data.packing import Layout, pack
from megatron_rl.data.sequence import Sequence, TopLogProbs
from megatron_rl.distributed import parallel
from megatron_rl.errors import UserError
from megatron_rl.models.parallel_check import read_hf_config

pytestmark = pytest.mark.timeout(600)  # a test runs all layouts

VOCAB = 512


@pytest.fixture(scope="module")
def student(tiny_model):
    return str(tiny_model("qwen3"))


@pytest.fixture(autouse=True)
def _torn_down():
    yield
    parallel.shutdown()


def random_samples(k: int, count: int = 6, seed: int | None = None) -> list[Sequence]:
    """With random log-probs of k random tokens at each label, and places without any; some labels do not count."""
    rng = np.random.default_rng(seed)
    samples = make_samples(int(rng.integers(2**32)), count, 200)
    for sample in samples:
        m = sample.response_length
        ids = rng.permuted(np.tile(np.arange(VOCAB, dtype=np.int32), (m, 1)), axis=1)[:, :k]
        classes = rng.dirichlet(np.ones(k + (k < VOCAB)), m)[:, :k]
        log_probs = np.maximum(np.log(classes), -80).astype(np.float32)
        if k < VOCAB:  # what an engine calls impossible
            ids = np.where(rng.random((m, k)) < 0.1, -1, ids)
        sample.top = TopLogProbs(ids, np.where(ids < 0, np.float32(0), log_probs))
    return samples


def by_hand(logits: Tensor, top: TopLogProbs, direction: str) -> Tensor:
    """Sum over n labels with logits [n, V], a label and a class at a time, by the definition; fp64."""
    total = torch.zeros((), dtype=torch.float64)
    for row, ids, log_probs in zip(logits.double().softmax(-1), top.token_ids, top.log_probs, strict=True):
        known = {
            int(token): float(np.exp(np.float64(x))) for token, x in zip(ids, log_probs, strict=True) if token >= 0
        }
        others = [token for token in range(len(row)) if token not in known]
        ours = [*(row[token] for token in known), *([row[others].sum()] if others else [])]
        theirs = [*known.values(), *([1 - sum(known.values())] if others else [])]
        for b, a in zip(ours, theirs, strict=True):
            total = total + (a * (np.log(a) - b.log()) if direction == "forward" else b * (b.log() - np.log(a)))
    return total


def top_of(logits: Tensor, k: int) -> TopLogProbs:
    found = logits.double().log_softmax(-1).topk(k)
    return TopLogProbs(found.indices.numpy().astype(np.int32), found.values.numpy().astype(np.float32))


def assert_same_gradients(ours: dict[str, np.ndarray], grads: dict[str, Tensor]) -> None:
    """As far as two fp32 backwards through the same layers agree."""
    largest = max(float(grad.abs().max()) for grad in grads.values())
    assert largest > 1e-5, "gradients too small to compare"
    for name, grad in grads.items():
        assert np.abs(ours[name] - grad.numpy()).max() < 3e-4 * largest, name


@pytest.mark.parametrize("task", [0.0, 0.7])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_an_update_descends_the_loss_written_out_by_hand(direction, task, student):
    """coefficient KL of k + 1 classes + task_coefficient NLL, a mean over the counted labels: value and every gradient."""
    settings = {"recorded": True, "direction": direction, "coefficient": 0.6, "task_coefficient": task}
    samples = random_samples(7)
    ours = update_once(make_config(student, {"distillation": settings, "model": {"head_chunk_tokens": 7}}), samples)
    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32, attn_implementation="eager")
    kl, nll, count = torch.zeros(()).double(), torch.zeros(()), 0
    for sample in samples:
        tokens, mask = torch.as_tensor(sample.tokens).long(), torch.as_tensor(sample["loss_mask"])
        logits = model(tokens[None]).logits[0, sample.prompt_length - 1 : -1][mask]
        assert sample.top is not None
        counted = TopLogProbs(sample.top.token_ids[mask.numpy()], sample.top.log_probs[mask.numpy()])
        kl = kl + by_hand(logits, counted, direction)
        nll = nll - logits.log_softmax(-1).gather(1, tokens[sample.prompt_length :][mask][:, None]).sum()
        count += int(mask.sum())
    loss = (0.6 * kl + task * nll) / count
    loss.backward()
    assert ours["metrics"]["distillation/kl"] == pytest.approx(float(kl) / count, rel=1e-4)
    assert ours["metrics"]["loss/policy"] == pytest.approx(float(nll) / count, rel=1e-4)
    assert_same_gradients(ours["grads"], {n: p.grad for n, p in model.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_the_whole_vocabulary_recorded_is_the_teacher_itself(direction, student, tiny_model):
    """The value and gradients of distillation.teacher, of which the record holds all log-probs."""
    teacher = str(tiny_model("qwen3", "--seed", "5"))
    samples = make_samples(fresh_seed(), 6, 200)
    theirs = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32, attn_implementation="eager")
    settings = {"direction": direction, "task_coefficient": 0.3}
    running = update_once(make_config(student, {"distillation": settings | {"teacher": teacher}}), samples)
    for sample in samples:
        with torch.no_grad():
            logits = theirs(torch.as_tensor(sample.tokens).long()[None]).logits[0, sample.prompt_length - 1 : -1]
        sample.top = top_of(logits, VOCAB)
    recorded = update_once(make_config(student, {"distillation": settings | {"recorded": True}}), samples)
    for name in ("distillation/kl", "loss/policy"):
        assert recorded["metrics"][name] == pytest.approx(running["metrics"][name], rel=1e-4, abs=1e-6)
    grads = {name: torch.from_numpy(grad) for name, grad in running["grads"].items()}
    assert_same_gradients(recorded["grads"], grads)


def test_layouts_learn_from_a_record_as_one_process(tiny_model):
    """The divergence and every gradient of a MoE student."""
    model = str(tiny_model("qwen3_moe"))
    base = {
        "distillation": {"recorded": True, "direction": "reverse", "task_coefficient": 0.5},
        "batch": {"updates_per_step": 1},
    }

    def attempt(seed: int):
        samples = random_samples(9, 12, seed)
        for sample in samples[::3]:  # rows of another record
            assert sample.top is not None
            sample.top = TopLogProbs(sample.top.token_ids[:, :4], sample.top.log_probs[:, :4])
        return samples, run_ranks(1, "distillation_ranks:updates", (model, samples, [base]), refuse_ties=True)

    samples, [[one]] = without_ties(attempt)
    layouts = [base | {"parallel": parallel} for parallel in LAYOUTS.values()]
    others = run_ranks(2, "distillation_ranks:updates", (model, samples, layouts), timeout=400.0)[0]
    largest = max(np.abs(grad).max() for grad in one["grads"].values())
    for name, other in zip(LAYOUTS, others, strict=True):
        for figure in ("distillation/kl", "loss/policy", "update/grad_norm"):
            assert other["metrics"][figure] == pytest.approx(one["metrics"][figure], rel=2e-5, abs=1e-6), (name, figure)
        worst = max(np.abs(other["grads"][tensor] - grad).max() for tensor, grad in one["grads"].items())
        assert worst < 1e-5 * max(1.0, float(largest)), name


@pytest.mark.parametrize("context", [1, 2])
def test_packing_brings_each_label_its_own_row(context):
    """Of those that count, on whichever rank; narrower records are filled up, and sequences without one have none."""
    samples = random_samples(5, 7)
    samples[2].top = None
    narrow = samples[3].top
    assert narrow is not None
    samples[3].top = TopLogProbs(narrow.token_ids[:, :2], narrow.log_probs[:, :2])
    seen = 0
    for rank in range(context):
        batch = pack(samples, list(range(7)), Layout(context=context, context_rank=rank, vocabulary=400))
        assert batch.top_token_ids is not None and batch.top_log_probs is not None
        taken = batch.take(torch.arange(3))
        assert taken.top_token_ids is None and taken.top_log_probs is None
        for row, ids, log_probs in zip(batch.label_rows, batch.top_token_ids, batch.top_log_probs, strict=True):
            sample = samples[int(batch.segments.ids[row])]
            label = int(batch.position_ids[0, row]) + 1 - sample.prompt_length
            assert sample["loss_mask"][label]
            expected = np.full(5, -1)
            if sample.top is not None:
                wide = sample.top.token_ids.shape[1]
                expected[:wide] = np.where(sample.top.token_ids[label] < 400, sample.top.token_ids[label], -1)
                assert np.array_equal(log_probs[:wide], sample.top.log_probs[label])
            assert ids.tolist() == expected.tolist()
            seen += 1
    assert seen == sum(int(sample["loss_mask"].sum()) for sample in samples)


BAD = {
    r"distillation\.teacher and distillation\.recorded are both set": ("sft", {"recorded": True, "teacher": "X"}),
    r"distillation\.address and distillation\.recorded are both set": (
        "sft",
        {"recorded": True, "address": "http://x"},
    ),
    r"distillation\.recorded: recorded log-probs belong to demonstrations.*set distillation\.teacher": (
        "train",
        {"recorded": True},
    ),
    r"distillation\.temperature = 2\.0: recorded log-probs have": ("sft", {"recorded": True, "temperature": 2.0}),
    r"distillation\.direction = jensen_shannon: recorded": ("sft", {"recorded": True, "direction": "jensen_shannon"}),
    r"distillation\.mix = 0\.2 does nothing with distillation\.direction = forward": (
        "sft",
        {"recorded": True, "mix": 0.2},
    ),
    r"distillation\.placement = advantage: demonstrations have": ("sft", {"recorded": True, "placement": "advantage"}),
    r"distillation\.coefficient = 0: the teacher would have no effect": ("sft", {"recorded": True, "coefficient": 0.0}),
    r"only megatron-rl sft and train use a teacher, not dpo": ("dpo", {"recorded": True}),
}


@pytest.mark.parametrize("message", BAD)
def test_a_choice_that_cannot_be_is_refused_by_one_line(message, student):
    kind, settings = BAD[message]
    config = build_config({"model": {"path": student}, "distillation": settings})
    with pytest.raises(UserError, match=message):
        check_teacher(config, read_hf_config(student), kind, 1)


def test_a_record_without_its_tokens_is_refused(student):
    tree = {"model": {"path": student}, "distillation": {"recorded": True}}
    with pytest.raises(UserError, match=r"data\.tokens_key: null leaves them out"):
        check_teacher(build_config(tree | {"data": {"tokens_key": None}}), read_hf_config(student), "sft", 1)
    check_teacher(build_config(tree), read_hf_config(student), "sft", 1)
