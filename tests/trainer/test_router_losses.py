"""The routers' own losses and biases: by their definitions in fp64, whatever the share of prompts, and on every layout."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from covering import parallel_of
from ranks import NearTie, fresh_seed, run_ranks, without_ties
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from megatron_rl.algorithms.router_losses import load_balancing_terms, z_terms
from megatron_rl.data.sequence import Sequence

pytestmark = pytest.mark.timeout(600)

WEIGHT = 30.0
"""Coefficient of a loss: it then adds about as much to gradients as the task. The difference of two of them is right to 1e-6
of it."""
BOTH = {"model": {"moe_aux_loss": WEIGHT, "moe_z_loss": WEIGHT / 2}}
EACH_ALONE = {"batch": {"tokens_per_micro_batch": 39}}
"""A micro-batch for each of the sequences below; as in two data-parallel ranks."""
# ep2 is two data-parallel ranks too.
LAYOUTS = {name: {"parallel": parallel_of(name)} for name in ("tp2_sp", "cp2", "ep2", "pp2")}


@pytest.fixture(scope="module")
def model(tiny_model):
    return str(tiny_model("qwen3_moe", "--layers", "2"))


def with_prompt(sample: Sequence, prompt: int) -> Sequence:
    """The same tokens of which others are the response, all of which count."""
    length = len(sample.tokens) - prompt
    fields = {"loss_mask": np.ones(length, bool), "rollout_log_probs": np.full(length, -3.0, np.float32)}
    found = Sequence(tokens=sample.tokens, prompt_length=prompt, fields=fields)
    found["advantages"] = 0.7
    return found


def of_lengths(seed: int, *lengths: int) -> list[Sequence]:
    rng = np.random.default_rng(seed)
    return [with_prompt(Sequence.demonstration([], rng.integers(4, 64, n).tolist()), 3) for n in lengths]


def by_definition(path: str, samples: list[Sequence], aux: float, z: float) -> tuple[dict[str, np.ndarray], float]:
    """Gradients in fp64 of the mean over micro-batches of one sequence each, by their tokens; and Hugging Face's value of the
    first layer, the mean over these micro-batches."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    experts, k = model.config.num_experts, model.config.num_experts_per_tok
    total, theirs, tokens = torch.zeros((), dtype=torch.float64), 0.0, sum(sample.inputs for sample in samples)
    for sample in samples:
        logits: list[torch.Tensor] = []
        gates = [layer.mlp.gate for layer in model.model.layers]
        hooks = [gate.register_forward_hook(lambda *args, to=logits: to.append(args[2][0])) for gate in gates]
        inputs = torch.tensor(sample.tokens[None, :-1].astype(int))
        hidden = model.model(inputs).last_hidden_state
        assert hidden.shape[1] == sample.inputs and len(logits) == len(gates)
        for hook in hooks:
            hook.remove()
        for of_layer, gate in zip(logits, gates, strict=True):
            assert of_layer.sum(-1).sub(1).abs().max() > 1e-3, "these are probabilities, not logits"
            probabilities = of_layer.softmax(-1)
            chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(k, dim=1).indices, 1.0)
            f, p = chosen.sum(0) / (k * sample.inputs), probabilities.mean(0)
            loss = aux * experts * (f * p).sum() + z * of_layer.logsumexp(-1).square().mean()
            total = total + loss * sample.inputs / tokens
            if gate is gates[0]:
                theirs += load_balancing_loss_func((of_layer,), experts, k).item() * sample.inputs / tokens
    total.backward()
    return {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}, theirs


def of_smooth_labels(path: str, samples: list[Sequence], smoothing: float) -> dict[str, np.ndarray]:
    """Gradients in fp64 of the mean over labels of (1 - e) x theirs + e x the mean of all tokens' negative log-likelihood."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    losses = []
    for sample in samples:
        tokens = torch.tensor(sample.tokens.astype(int))
        log_probs = model(tokens[None]).logits[0, sample.prompt_length - 1 : -1].log_softmax(-1)
        labels = log_probs.gather(1, tokens[sample.prompt_length :, None])[:, 0]
        losses.append(-(1 - smoothing) * labels - smoothing * log_probs.mean(1))
    torch.cat(losses).mean().backward()
    return {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}


def assert_alike(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], near: float) -> None:
    """All gradients that the losses reach, in units of the largest of the tensor; Transformers stacks those of experts."""
    reached = [name for name, grad in wanted.items() if np.abs(grad).max() > 1e-4 and ".experts." not in name]
    assert sum(name.endswith("mlp.gate.weight") for name in reached) == 2 and len(reached) > 10
    for name in reached:
        worst, size = np.abs(found[name] - wanted[name]).max(), np.abs(wanted[name]).max()
        assert worst < near * size, f"{name} of {size:.3g} differs by {worst:.3g}"


def test_the_terms_are_those_of_the_definitions():
    """Also by Hugging Face's function, which is k times as large."""
    torch.manual_seed(seed := fresh_seed())
    print(f"seed {seed}")
    logits = torch.randn(41, 6, dtype=torch.float64) * 3
    scores = logits.softmax(-1)
    chosen = torch.zeros_like(scores).scatter(1, scores.topk(3, dim=1).indices, 1.0)
    loss = sum(
        6 * float(chosen[:, e].sum()) / (3 * 41) * float(scores[:, e].sum()) / 41 for e in range(6)
    )  # E x sum of f_e P_e
    ours = load_balancing_terms(scores, chosen.sum(0).long()).mean()
    assert float(ours) == pytest.approx(loss, rel=1e-12)
    assert float(load_balancing_loss_func((logits,), 6, 3)) == pytest.approx(3 * loss, rel=1e-6)  # which counts in fp32
    assert float(z_terms(logits).mean()) == pytest.approx(float(logits.exp().sum(1).log().square().mean()), rel=1e-12)
    even = torch.full((7, 4), 0.25, dtype=torch.float64)
    one = torch.eye(4, dtype=torch.float64)[[0] * 7]
    assert float(load_balancing_terms(even, torch.tensor([28, 0, 0, 0])).mean()) == pytest.approx(1, abs=1e-15)
    assert float(load_balancing_terms(one, torch.tensor([7, 0, 0, 0])).mean()) == 4
    assert load_balancing_terms(even, torch.zeros(4, dtype=torch.int64)).tolist() == [0] * 7


def test_a_loss_weighs_the_same_whatever_the_share_of_prompts(model):
    """The same tokens, of which 1 to 36 of 40 are the prompt, in all that trains; and with a mask that has holes."""
    shares = [("sft", n) for n in (1, 10, 20, 30, 36)] + [
        (name, n) for name in ("policy", "sequence_sum", "given") for n in (1, 36)
    ]

    def attempt(seed: int):
        [sample] = of_lengths(seed, 41)
        cases = [(name, [with_prompt(sample, n)]) for name, n in shares]
        holes = copy.deepcopy(with_prompt(sample, 5))
        holes["loss_mask"] = np.random.default_rng(seed).random(holes.response_length) < 0.3
        holes["loss_mask"][0] = True
        cases.append(("sft", [holes]))
        return cases, run_ranks(1, "router_ranks:of_losses", (model, [BOTH], cases), refuse_ties=True)[0]

    cases, [found] = without_ties(attempt)
    expected, _ = by_definition(model, cases[0][1], WEIGHT, WEIGHT / 2)
    for grads, _ in found:
        assert_alike(grads, expected, 1e-5)


def test_several_micro_batches_on_every_layout(model):
    """Each micro-batch balances its own tokens, and padding is none of them: lengths are odd, and layouts pad them."""

    def attempt(seed: int):
        cases = [("sft", of_lengths(seed, 38, 22)), ("given", of_lengths(seed + 1, 24, 36))]
        cases.append(("smoothed", cases[0][1]))
        one = run_ranks(1, "router_ranks:of_losses", (model, [BOTH | EACH_ALONE], cases), refuse_ties=True)[0]
        return cases, one[0]

    cases, one = without_ties(attempt)
    layouts = [BOTH | EACH_ALONE | layout for layout in LAYOUTS.values()]
    more = {"recompute": "full", "head_chunk_tokens": 7}
    layouts += [layouts[0] | {"model": BOTH["model"] | more}]  # tp2_sp
    two = run_ranks(2, "router_ranks:of_losses", (model, layouts, cases), timeout=400)[0]
    for place, (name, samples) in enumerate(cases):
        if name == "smoothed":  # the head's vocabulary in two, and in chunks
            expected = of_smooth_labels(model, samples, 0.3)
            for of_cases in (one, *two):
                assert_alike(of_cases[place][0], expected, 1e-4)
            continue
        expected, theirs = by_definition(model, samples, WEIGHT, WEIGHT / 2)
        for of_cases in (one, *two):
            grads, figures = of_cases[place]
            assert_alike(grads, expected, 1e-5)
            assert figures["routing/layer_00/aux_loss"] == pytest.approx(theirs / 2, rel=1e-5)  # k = 2
            assert figures["routing/z_loss"] == pytest.approx(one[place][1]["routing/z_loss"], rel=1e-5)
            assert figures["routing/load_max"] == pytest.approx(one[place][1]["routing/load_max"], rel=1e-6)
            assert 1 <= figures["routing/load_max"] <= 8 and figures["routing/aux_loss"] >= 0.9


def directions(maps: np.ndarray) -> np.ndarray:
    """How the biases of each layer's experts move by choices [layer, sequence, T, E]."""
    loads = maps.sum((1, 2))
    return np.sign(loads.sum(1, keepdims=True) - loads.shape[1] * loads)


def test_biases_move_toward_even_loads(tiny_model):
    """They move by the rate after each update, on every layout alike; they are exported and saved."""
    deepseek = str(tiny_model("deepseek_v3"))
    rate = {"model": {"moe_bias_update_rate": 1e-3}} | EACH_ALONE

    def attempt(seed: int):
        rng = np.random.default_rng(seed)
        samples = [with_prompt(Sequence.demonstration([], rng.integers(4, 64, 33).tolist()), 3) for _ in range(2)]
        one = run_ranks(1, "router_ranks:biases", (deepseek, [rate], samples, 2), refuse_ties=True)[0][0]
        maps = np.stack([np.stack(of_layer) for of_layer in one["maps"].values()]).astype(float)
        assert maps.shape[1:3] == (2, 32)
        parts = {"tp2_sp": maps[:, :, :16], "cp2": maps[:, :, np.r_[:8, 24:32]], "ep2": maps[:, :1]}
        whole = directions(maps)
        for name, part in parts.items():
            if np.array_equal(directions(part), whole):
                raise NearTie(f"{name}: the loads of one rank move the biases as those of all do")
        return samples, one

    samples, one = without_ties(attempt)
    first, second = one["after"]
    assert len(first) == len(one["saved"]) > 0
    moved = {name: second[name].astype(float) - first[name] for name in first}
    for layer, chosen in one["chosen"].items():
        loads = chosen.astype(float)
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        assert loads.sum() == 2 * sum(sample.inputs for sample in samples) and len(set(loads)) > 1
        # fp32 biases of about 1e-3 are right to 1e-10.
        assert np.array_equal(one["last"][name], second[name])  # where nothing was learned none moves
        assert np.abs(moved[name] - 1e-3 * np.sign(loads.mean() - loads)).max() < 1e-9
    two = run_ranks(2, "router_ranks:biases", (deepseek, [rate | layout for layout in LAYOUTS.values()], samples, 2))
    for found in two[0]:
        assert found["after"][0].keys() == first.keys()
        for name, bias in first.items():
            assert np.array_equal(found["after"][0][name], bias)
