"""The sampling contract with the real engine: what SGLang samples from is what the trainer's log-probs are over."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl.algorithms.sampling_support import SamplingSupport
from tests.forked_servers import output_of_script
from tests.rollout.conftest import Question, assert_agree, client_of, collect
from tests.rollout.test_agreement import ask_trainer

SUPPORTS = {
    "pruned": SamplingSupport(temperature=0.8, min_p=0.8),
    "top_p": SamplingSupport(temperature=0.8, top_p=0.6, top_k=512),
    "top_k": SamplingSupport(temperature=1.3, top_k=40),
}


@pytest.fixture(scope="module")
def sampled(server):
    """support -> trajectories of random prompts, at a width of the vocabulary that each support cuts in two."""
    rng = np.random.default_rng(np.random.SeedSequence().entropy)
    prompts = [Question(str(i), rng.integers(3, 512, int(rng.integers(4, 30))).tolist()) for i in range(12)]
    return {
        name: collect(client_of(server), prompts, support, samples_per_prompt=3, max_new_tokens=24)[0]
        for name, support in SUPPORTS.items()
    }


@pytest.fixture(scope="module")
def trained(sampled, reference):
    """(support, kind) -> the trainer's log-probs; kind: same, or whole: over the whole vocabulary at that temperature."""
    asked = {}
    for name, trajectories in sampled.items():
        asked[name, "same"] = "fp32", trajectories, SUPPORTS[name]
        whole = [replace(t, kept=None) for t in trajectories]
        asked[name, "whole"] = "fp32", whole, SamplingSupport(SUPPORTS[name].temperature)
    return dict(zip(asked, ask_trainer(reference.folder, *asked.values()), strict=True))


@pytest.mark.parametrize("name", SUPPORTS)
def test_trainer_and_engine_agree_under_the_support(name, sampled, trained, reference):
    engine = [t["rollout_log_probs"] for t in sampled[name]]
    ours = trained[name, "same"]
    tied = reference.tied(sampled[name])
    if SUPPORTS[name].min_p:  # the trainer is given no set, and draws the border itself
        border = [reference.on_the_border(t, SUPPORTS[name]) for t in sampled[name]]
        assert np.concatenate(border).mean() < 0.05, "a border that lies in many tokens says nothing"
        ours, engine = ([np.where(on, 0.0, x) for x, on in zip(side, border, strict=True)] for side in (ours, engine))
    kept = [np.isfinite(x).all() for x in ours]
    assert all(k or out for k, out in zip(kept, tied, strict=True)), "sampled tokens outside the trainer's set"
    pairs = [[x for x, ok in zip(side, kept, strict=True) if ok] for side in (ours, engine, tied)]
    assert_agree(*pairs[:2], median=1e-5, largest=1e-5, tied=pairs[2])
    # The bug that this is about: engine's log-probs over the support, trainer's over everything.
    apart = np.concatenate([t["rollout_log_probs"] for t in sampled[name]]) - np.concatenate(trained[name, "whole"])
    assert np.median(apart) > 0.1


def test_no_sampled_token_lies_outside_the_engines_set(sampled, reference):
    """By the definition, from transformers' logits: z / T >= max(z) / T + log rho."""
    support = SUPPORTS["pruned"]
    margins, sizes, tied = [], [], reference.tied(sampled["pruned"])
    for t in sampled["pruned"]:
        scaled = reference.logits(t.tokens)[t.prompt_length - 1 : -1] / support.temperature
        chosen = scaled.gather(-1, torch.as_tensor(t.tokens[t.prompt_length :], dtype=torch.long)[:, None])[:, 0]
        threshold = scaled.amax(-1) + math.log(support.min_p)
        margins.append(chosen - threshold)
        sizes.append((scaled >= threshold[:, None]).float().mean(-1))
    # Logits below 1 are right to 1e-6, a sequence's in which two experts tie to what an expert adds: below 0.05, of 0.8 here.
    print(f"smallest margin {min(float(m.min()) for m in margins):.2g}")
    assert all(float(m.min()) >= -1e-5 for m, out in zip(margins, tied, strict=True) if not out)
    assert all(float(m.min()) > -0.1 for m in margins), "further outside than a tie can move a logit"
    share = float(torch.cat(sizes).mean())
    assert 0.01 < share < 0.5, f"{share:.2f} of the vocabulary kept: the draw says nothing"


@pytest.mark.parametrize("rho", [1.0, 1 - 1e-7])
def test_a_set_of_one_token_is_greedy_at_any_temperature(rho, server):
    """Rounding would lift its threshold above the largest logit, and leave nothing to sample from."""
    questions = [Question(str(i), [5 + i, 6, 7]) for i in range(8)]
    best, *sampled = (
        collect(client_of(server), questions, support, samples_per_prompt=1, max_new_tokens=24)[0]
        for support in (
            SamplingSupport(temperature=0.0),
            *(SamplingSupport(temperature=t, min_p=rho) for t in (0.7, 1.3)),
            SamplingSupport(temperature=1.3, min_p=1e-6, engine_min_p=rho),  # the engine prunes by its own
        )
    )
    for trajectories in sampled:
        assert [t.tokens.tolist() for t in trajectories] == [t.tokens.tolist() for t in best]
        assert all((t["rollout_log_probs"] == 0).all() for t in trajectories)


def test_no_token_falls_below_a_planted_floor(server, reference):
    """The engine's log-probs are those of the floored distribution, from transformers' logits, pruned above it too."""
    questions = [Question(str(i), [5 + i, 6, 7]) for i in range(8)]
    for support in (SamplingSupport(temperature=0.8, tail_floor=0.8), SamplingSupport(tail_floor=0.5, min_p=0.8)):
        found, floored, tied = [], 0, []
        for t in collect(client_of(server), questions, support, samples_per_prompt=2, max_new_tokens=24)[0]:
            scaled = reference.logits(t.tokens)[t.prompt_length - 1 : -1] / support.temperature
            largest = scaled.amax(-1, keepdim=True)
            floor = largest + math.log(support.tail_floor)
            floored += int((scaled < floor).sum())
            scaled = torch.maximum(scaled, floor)
            if support.min_p:
                scaled = scaled.masked_fill(scaled < largest + math.log(support.min_p), -torch.inf)
            chosen = torch.as_tensor(t.tokens[t.prompt_length :], dtype=torch.long)[:, None]
            expected = scaled.log_softmax(-1).gather(-1, chosen)[:, 0].numpy()
            apart = np.abs(expected - t["rollout_log_probs"][-len(expected) :])
            if support.min_p:
                apart = apart[~reference.on_the_border(t, support)]
            found.append(apart.max(initial=0.0))
            tied += reference.tied([t])
        # All but sequences in which experts tie agree to rounding.
        clear = [d for d, out in zip(found, tied, strict=True) if not out]
        assert floored > 1000 and len(clear) >= 8 and max(clear) < 1e-5, found


def test_greedy_needs_no_support(server, reference):
    questions = [Question("a", [5, 6, 7])]
    plain, pruned, kept = (
        collect(client_of(server), questions, replace(s, temperature=0.0), samples_per_prompt=1, max_new_tokens=8)[0][0]
        for s in (SamplingSupport(), SUPPORTS["pruned"], SUPPORTS["top_k"])
    )
    assert plain.tokens.tolist() == pruned.tokens.tolist() == kept.tokens.tolist() and kept.kept is None


@pytest.mark.parametrize("name", ["top_p", "top_k"])
def test_the_kept_sets_are_the_samplers(name, sampled, reference):
    support = SUPPORTS[name]
    # Where experts tie, probabilities differ by percents.
    clear = [t for t in sampled[name] if not reference.tied([t])[0]]
    for t in clear[:6]:
        probs = (reference.logits(t.tokens)[t.prompt_length - 1 : -1] / support.temperature).softmax(-1)
        assert len(t.kept) == t.response_length
        for row, ids in zip(probs, t.kept, strict=True):
            if name == "top_k":
                assert len(ids) == support.top_k
            else:
                # Sums of 512 numbers of fp32, and probabilities that differ by 1e-6 of themselves.
                mass = float(row[torch.as_tensor(ids, dtype=torch.long)].sum())
                assert support.top_p - 1e-4 <= mass <= support.top_p + float(row.max()) + 1e-4


def test_the_pruning_processor_makes_nothing_at_a_token_whose_batch_it_knows():
    """In SGLang's own environment. Anew are the parameters of a batch whose requests differ, when it changes."""
    script = Path(__file__).with_name("processor_calls.py")
    found = json.loads(output_of_script(script).splitlines()[-1])
    assert all(found["right"]), found
    assert found["made"] == [1, 0, 0, 0, 1, 0, 1, 0, 1]
