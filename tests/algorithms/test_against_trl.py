"""Our losses against those of TRL's own trainers, on one tiny model: the loss, and the gradients of all of its parameters."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from megatron_rl.algorithms import preference

pytestmark = pytest.mark.slow
VOCABULARY = 64
PAIRS = 6
BETA = 0.1


@pytest.fixture(scope="module")
def trl():
    import trl  # here: it takes seconds, and a run without slow tests collects this file too

    return trl


@pytest.fixture
def rng():
    entropy = np.random.SeedSequence().entropy
    print("entropy", entropy)
    torch.manual_seed(entropy % 2**63)
    return np.random.default_rng(entropy)


def tokenizer():
    words = {"<pad>": 0, "<end>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")


def tiny(kind):
    """In fp64: what differs then is the rounding of TRL's head alone, which computes log-probs in fp32 for any model."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,  # so that log-ratios and scores are not all alike
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        num_labels=1,
        attn_implementation="eager",
    )
    return kind(config).double()


def options(kind, tmp_path, **more):
    plain = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "max_length": None}
    quiet = {"report_to": "none", "disable_tqdm": True}
    return kind(str(tmp_path), per_device_train_batch_size=PAIRS, **plain, **quiet, **more)


def moved(model):
    """A copy that is a little off: the reference."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.02 * torch.randn_like(weight)
    return other


def texts(rng, count):
    return [" ".join(f"w{i}" for i in rng.integers(2, VOCABULARY, rng.integers(1, 5))) for _ in range(count)]


def collated(trainer):
    return trainer.data_collator([trainer.train_dataset[i] for i in range(PAIRS)])


def same(model, theirs, ours):
    """Losses to 5e-6, gradients to 5e-6 of the largest.

    TRL's log-prob of a token is wrong by four roundings of fp32 of numbers below 8, 1e-6, and that of a response, of at most
    five tokens that add up to some 30, by 7e-6; so a pair's d of four of them by 3e-5, and the factor beta sigmoid(-beta d) of
    a gradient, or a loss, by at most beta times that: 3e-6, robust's by 1 / 0.6 of it. The head's backward adds 2e-7.
    """
    torch.testing.assert_close(ours, theirs, rtol=5e-6, atol=5e-6, check_dtype=False)
    parameters = [p for p in model.parameters() if p.requires_grad]
    expected, found = (torch.autograd.grad(loss, parameters, retain_graph=True) for loss in (theirs, ours))
    largest = max(float(g.abs().max()) for g in expected)
    assert largest > 1e-4, "a loss that moves nothing shows nothing"
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=5e-6 * largest)


def log_probs(model, batch, prefix=""):
    """Log-probs of completion tokens [B, T - 1], and where they are."""
    ids, where = batch[f"{prefix}input_ids"], batch[f"{prefix}completion_mask"][:, 1:].bool()
    logits = model(input_ids=ids, attention_mask=batch[f"{prefix}attention_mask"]).logits[:, :-1]
    found = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return torch.where(where, found, 0.0), where


@pytest.mark.parametrize("center", [None, 0.1])
@pytest.mark.parametrize("margins", [False, True])
def test_reward_trainer(trl, rng, tmp_path, margins, center):
    prompts, chosen, rejected = (texts(rng, PAIRS) for _ in range(3))
    margin = rng.uniform(0.1, 2.0, PAIRS).astype(np.float32)
    rows = [
        {"chosen": f"{p} {c}", "rejected": f"{p} {r}"} | ({"margin": float(m)} if margins else {})
        for p, c, r, m in zip(prompts, chosen, rejected, margin, strict=True)
    ]
    model = tiny(LlamaForSequenceClassification)
    arguments = options(trl.RewardConfig, tmp_path, center_rewards_coefficient=center)
    trainer = trl.RewardTrainer(model, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer())
    batch = collated(trainer)
    theirs = trainer.compute_loss(model, dict(batch))
    scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0].view(2, PAIRS)
    ours = preference.bradley_terry(*scores, margin=torch.tensor(margin) if margins else None, center=center or 0.0)
    same(model, theirs, ours)


@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo", "robust", "sigmoid_norm", "sft"])
def test_dpo_trainer(trl, rng, tmp_path, kind):
    rows = [
        {"prompt": p, "chosen": f" {c}", "rejected": f" {r}"}
        for p, c, r in zip(*(texts(rng, PAIRS) for _ in range(3)), strict=True)
    ]
    model = tiny(LlamaForCausalLM)
    reference = moved(model)
    terms = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7]} if kind == "sft" else {"loss_type": [kind]}
    smoothing = 0.2 if kind == "robust" else 0.0
    arguments = options(trl.DPOConfig, tmp_path, beta=BETA, label_smoothing=smoothing, **terms)
    data = Dataset.from_list(rows)
    trainer = trl.DPOTrainer(model, reference, arguments, train_dataset=data, processing_class=tokenizer())
    batch = collated(trainer)
    theirs = trainer.compute_loss(model, dict(batch))

    found, where = log_probs(model, batch)
    with torch.no_grad():
        held, _ = log_probs(reference, batch)
    sides = [side for x in (found, held) for side in x.sum(1).view(2, PAIRS)]
    lengths = {}
    if kind in ("ipo", "sigmoid_norm"):
        lengths = dict(zip(("chosen_lengths", "rejected_lengths"), where.sum(1).view(2, PAIRS), strict=True))
    name = {"sigmoid_norm": "sigmoid", "sft": "sigmoid"}.get(kind, kind)
    ours = preference.dpo(*sides, beta=BETA, kind=name, label_smoothing=smoothing, **lengths)
    sft = -found[:PAIRS][where[:PAIRS]].mean()
    same(model, theirs, ours.loss + 0.7 * sft if kind == "sft" else ours.loss)
    if not lengths:  # TRL's rewards are sums also where its loss is of means
        for side in ("chosen", "rejected"):
            told = trainer._metrics["train"][f"rewards/{side}"][0]
            assert float(getattr(ours, f"{side}_rewards").mean()) == pytest.approx(told, abs=1e-5)


def test_kto_trainer(trl, rng, tmp_path):
    desirable = rng.permutation(np.arange(PAIRS) % 2 == 0)
    rows = [
        {"prompt": p, "completion": f" {c}", "label": bool(d)}
        for p, c, d in zip(texts(rng, PAIRS), texts(rng, PAIRS), desirable, strict=True)
    ]
    model = tiny(LlamaForCausalLM)
    reference = moved(model)
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.8}
    arguments = options(trl.KTOConfig, tmp_path, beta=BETA, **weights)
    data = Dataset.from_list(rows)
    trainer = trl.KTOTrainer(model, reference, arguments, train_dataset=data, processing_class=tokenizer())
    batch = collated(trainer)
    theirs = trainer.compute_loss(model, dict(batch))

    policy, _ = log_probs(model, batch)
    with torch.no_grad():
        held, _ = log_probs(reference, batch)
        mismatched = [log_probs(which, batch, "KL_")[0].sum(1) for which in (model, reference)]
    baseline = preference.kto_baseline(*mismatched)
    assert float(baseline) == pytest.approx(trainer._metrics["train"]["kl"][0], abs=1e-5)
    ours = preference.kto(policy.sum(1), held.sum(1), batch["label"], beta=BETA, baseline=baseline, **weights)
    same(model, theirs, ours.loss)
