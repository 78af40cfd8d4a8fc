"""Attribution finds the source that was planted, and only it; its shares and errors are what they say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import fresh_seed, nearly_ties, run_ranks

from megatron_rl.algorithms.segments import Segments
from megatron_rl.attribute import routed_otherwise
from megatron_rl.metrics import attribution
from megatron_rl.metrics.attribution import Attribution, Source
from megatron_rl.models.precision import Machine
from megatron_rl.report.page import write_report
from tests.report.page import Page

RHO = 0.5
STEP = 3
PLANTED = ("routes", "gates", "precision", "tail", "attention")


def planted(model: str, seed: int) -> dict[str, Attribution]:
    """Source -> what is found where the engine differs from the trainer in that alone. Runs in a process of its own.

    The engine is the trainer itself, in fp32 with its own routes, but for what is planted: other experts, other weights of the
    same experts, a trainer in bf16, wrong log-probs below the threshold of the safe set, or a trainer's attention that is a
    little wrong unless it is the reference. "predicted" is "routes" for a run with route predictors, which are zero.
    """

    from transformers import AutoModelForCausalLM

    from megatron_rl.algorithms.sampling_support import SamplingSupport
    from megatron_rl.attribute import attribute
    from megatron_rl.config.load import build_config
    from megatron_rl.data.sequence import Sequence
    from megatron_rl.data.trajectory import Trajectory, WeightSpan
    from megatron_rl.distributed import parallel
    from megatron_rl.hooks.routing_replay import RoutingReplay
    from megatron_rl.models.attention import CoreAttention
    from megatron_rl.trainer.trainer import build_trainer

    def config(precision, source="none"):
        return build_config(
            {
                "routing": {"source": source},
                "model": {"path": model},
                "batch": {"tokens_per_micro_batch": 64},
                "rollout": {"context_length": 64},
                "pruning": {"rho": RHO},
                "precision": {"train": precision},
            }
        )

    rng = np.random.default_rng(seed)
    ranks = parallel.initialize(config("fp32").parallel, 0)
    trainer = build_trainer(config("fp32"), ranks, total_updates=None, support=SamplingSupport())
    shape = trainer.layout.routes
    references = [AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in range(2)]
    for parameter in references[1].parameters():
        parameter.data.copy_(parameter.data.bfloat16())
    tokens = []
    while len(tokens) < 40:  # in other micro-batches, tokens whose experts tie but for rounding may go elsewhere
        sequence = rng.integers(4, 512, int(rng.integers(8, 33))).astype(np.int32)
        if not any(nearly_ties(reference, sequence) for reference in references):
            tokens.append(sequence)

    def score(routes=None, min_p=0.0, gates=None):
        """(log-probs, own routes) of each sequence, one micro-batch each."""
        trainer.support = SamplingSupport(min_p=min_p)
        hooks = [RoutingReplay("none" if routes is None else "r3", gates=gates is not None)]
        found = []
        for i, sequence in enumerate(tokens):
            sample = Sequence.demonstration(sequence[:2].tolist(), sequence[2:].tolist())
            sample.routes = None if routes is None else routes[i]
            sample.gates = None if gates is None else gates[i]
            [batch] = trainer.pack([sample])
            [own] = trainer.compute_log_probs([batch], hooks=hooks)
            table = [batch.routes.recorded[layer] for layer in shape.moe_layers] if routes is None else []
            chosen = torch.stack(table, 1).numpy()[: sample.inputs] if table else None
            found.append((own[batch.mask].float().numpy(), chosen))
        return found

    exact = score()
    for chunk in trainer.chunks:  # a bf16 trainer's engine has its rounded weights
        for parameter in chunk.parameters():
            parameter.data.copy_(parameter.data.bfloat16())
    rounded = score()
    trainer = build_trainer(config("fp32"), ranks, total_updates=None, support=SamplingSupport())
    in_set = [np.isfinite(x) for x, _ in score(min_p=RHO)]
    own_routes = [routes for _, routes in exact]
    other_routes = []
    for routes in own_routes:  # one expert in ten is another
        moved = routes.copy()
        change = rng.random(routes.shape[:2]) < 0.1
        for place in zip(*change.nonzero(), strict=True):
            moved[place] = rng.permutation(shape.experts)[: shape.topk]
        other_routes.append(moved)
    gates = [rng.random(routes.shape, np.float32) for routes in own_routes]
    gates = [g / g.sum(-1, keepdims=True) for g in gates]
    noise = [np.where(inside, 0.0, rng.choice([-0.3, 0.3], len(inside))) for inside in in_set]
    engines = {
        "routes": ("fp32", [x for x, _ in score(other_routes)], other_routes),
        "gates": ("fp32", [x for x, _ in score(own_routes, gates=gates)], own_routes),
        "precision": ("bf16", [x for x, _ in rounded], [routes for _, routes in rounded]),
        "tail": ("fp32", [x + e for (x, _), e in zip(exact, noise, strict=True)], own_routes),
        "attention": ("fp32", [x for x, _ in exact], own_routes),
    }
    forward = CoreAttention.forward

    def wrong(self, *args, **kw):
        return forward(self, *args, **kw) * (1.0 if self.in_fp64 else 1.05)

    found = {}
    for name, (precision, log_probs, routes) in engines.items():
        trajectories = [
            Trajectory(
                prompt_id="",
                group_id=i,
                tokens=sequence,
                prompt_length=2,
                fields={
                    "loss_mask": np.ones(len(sequence) - 2, bool),
                    "rollout_log_probs": log_probs[i].astype(np.float32),
                },
                routes=routes[i],
                gates=gates[i] if name == "gates" else None,
                weight_spans=[WeightSpan(str(STEP), 0, len(sequence) - 2)],
            )
            for i, sequence in enumerate(tokens)
        ]
        CoreAttention.forward = wrong if name == "attention" else forward
        found[name] = attribute(config(precision), ranks, trajectories, None, STEP, STEP)
        if name == "routes":
            found["predicted"] = attribute(config(precision, "pr2"), ranks, trajectories, None, STEP, STEP)
    return found


@pytest.fixture(scope="module")
def found(tiny_model):
    seed = fresh_seed()
    [result] = run_ranks(1, f"{__name__}:planted", (str(tiny_model("qwen3_moe", "--layers", "2")), seed))
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_the_planted_source_is_the_largest(name, found):
    result = found[name]
    print(attribution.table(result).title, {s.name: (s.share, s.error) for s in result.sources})
    sources = {s.name: s for s in result.sources}
    assert result.kl > 1e-8 and result.left_out == 0 and result.step == STEP
    # What is left is rounding: squares of 1e-6 in 1e-8 and more.
    assert sources[name].share == pytest.approx(1.0, abs=0.02), "removing it leaves (next to) nothing"
    assert sources["all"].share == pytest.approx(1.0, abs=0.02)
    if name == "gates":
        assert sources["routes"].share == pytest.approx(0.0, abs=0.02), "the experts are the same"
    for other in PLANTED:
        if other != name and sources[other].share is not None:
            assert sources[other].share < sources[name].share - 0.1


@pytest.mark.slow
def test_what_is_not_there_is_not_removed(found):
    routes, precision = (next(s for s in found["routes"].sources if s.name == n) for n in ("routes", "precision"))
    assert routes.kl is not None
    [gates] = [s for s in found["routes"].sources if s.name == "gates"]
    assert gates.kl is None and gates.removed_by == "not recorded: set rollout.gates: true"
    assert precision.kl is None and precision.removed_by == "the run already trains in fp32"


@pytest.mark.slow
def test_predictors_that_are_zero_change_nothing(found):
    assert found["predicted"] == found["routes"]


def test_only_what_both_measure_is_compared():
    nan = math.nan
    before = torch.tensor([1.0, nan, 2.0, 4.0, 8.0], dtype=torch.float64)
    after = torch.tensor([0.5, 3.0, nan, 1.0, 0.0], dtype=torch.float64)
    sums = attribution.common_sums(before, after, Segments(torch.tensor([0, 0, 0, 1, 1]), 3))
    assert sums.tolist() == [[1.0, 12.0, 0.0], [0.5, 1.0, 0.0], [1.0, 2.0, 0.0]]
    found = attribution.source("x", "", *sums)
    assert found.kl == 0.5 and found.share == pytest.approx(1 - 1.5 / 13)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31))
def test_the_shares_error_is_its_spread_over_batches(seed):
    """Against the standard deviation of the share over many batches of the same kind."""
    draw = torch.Generator().manual_seed(seed)
    before = torch.rand(400, 60, generator=draw, dtype=torch.float64) ** 2
    after = before * (0.3 + 0.4 * torch.rand(400, 60, generator=draw, dtype=torch.float64))
    found = [attribution.source("x", "", b, a, torch.ones(60)) for b, a in zip(before, after, strict=True)]
    shares = torch.tensor([f.share for f in found])
    errors = torch.tensor([f.error for f in found])
    assert float(shares.mean()) == pytest.approx(0.5, abs=0.02)
    # A standard deviation of 400 is right to 1 / sqrt(800) of itself: a quarter is seven of these.
    assert float(errors.mean()) == pytest.approx(float(shares.std()), rel=0.25)


def test_no_mismatch_has_no_shares():
    none = attribution.source("x", "", torch.zeros(3), torch.zeros(3), torch.ones(3))
    assert none.share is None and none.kl == 0.0


def test_the_engines_own_part_in_the_routes_is_named():
    """Which routers these are is SGLang's: tests/platform/test_dry_run.py sees them reached."""
    hopper, cpu = (Machine(gpu, None, None, None) for gpu in ((9, 0), None))
    moonlight, gpt_oss = ["DeepseekV3ForCausalLM"], ["GptOssForCausalLM"]
    assert "SGLang's own decode routes up to 16 tokens by another product" in routed_otherwise(moonlight, "fp8", hopper)
    assert "up to 128 tokens" in routed_otherwise(gpt_oss, "bf16", hopper)
    nothing = (moonlight, "fp32", hopper), (moonlight, "bf16", cpu), (["Qwen3MoeForCausalLM"], "bf16", hopper)
    assert [routed_otherwise(*case) for case in nothing] == [""] * 3


def test_table_page_and_file_say_the_same(tmp_path):
    found = Attribution(
        5, 1000, 40, 2, 1.5e-4,
        [Source("routes", "experts of the <engine>", 5e-5, 0.667, 0.02), Source("tail", "pruned already", None)],
    )  # fmt: skip
    attribution.save(found, tmp_path)
    assert attribution.load(tmp_path) == found
    (tmp_path / "config.yaml").write_text("name: run\n")
    page = Page(write_report(tmp_path))
    assert page.row("routes", 4) == ["routes", "experts of the <engine>", "5e-05", "+66.7% ± 2.0%"]
    assert "without 2 sequences of several weight versions" in page.text
    assert attribution.load(tmp_path / "nothing") is None
    assert math.isclose(found.sources[0].kl, 5e-5)
