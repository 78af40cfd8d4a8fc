"""What saves memory does not change what is learned: Megatron's savers against its plain optimizer, and a sleep in between."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from layouts import make_samples
from memory_ranks import MAY_STAY
from ranks import fresh_seed, run_ranks

from megatron_rl.trainer import offload

pytestmark = pytest.mark.timeout(900)  # the limits of the processes below are what ends a test

BF16 = {"precision": {"train": "bf16"}}
PLAIN = {"plain": {}, "overlapped": {"parallel": {"overlap_param_gather": True}}}
OFFLOADED = {
    "plain": BF16,
    "offloaded": {**BF16, "optimizer": {"cpu_offload": 1.0}},
    "half offloaded": {**BF16, "optimizer": {"cpu_offload": 0.5}},
}
ONE_MICRO_BATCH = {"batch": {"tokens_per_micro_batch": 4096}}
GRADIENTS = {
    "fp32": {**BF16, **ONE_MICRO_BATCH},
    "bf16": {"precision": {"train": "bf16", "gradients": "bf16"}, **ONE_MICRO_BATCH},
}
SGD = {"optimizer": {"name": "sgd", "lr": 0.5}, "parallel": {"distributed_optimizer": False}}
SGDS = {
    "fp32": SGD,
    "bf16": {**BF16, **SGD},
    "without momentum": {**SGD, "optimizer": {**SGD["optimizer"], "momentum": 0.0}},
}
SMALL_BUCKETS = 4000
WORLDS = [pytest.param(1, id="one rank", marks=pytest.mark.long), pytest.param(2, id="two ranks")]
"""Processes: on one the optimizer's state is whole, on two each has its part."""
SLEEPS = {
    "fp32": {},
    "bf16": BF16,
    "offloaded": OFFLOADED["offloaded"],
    "replicated optimizer": {"parallel": {"distributed_optimizer": False}},
    "replicated optimizer in bf16": {**BF16, "parallel": {"distributed_optimizer": False}},
    "sgd in bf16": SGDS["bf16"],
    "reference": {"algorithm": {"kl": {"coefficient": 0.1}}},
    "predictors": {"routing": {"source": "pr2"}},
    "overlapped": PLAIN["overlapped"],
}


@pytest.fixture(scope="module")
def model(tiny_model):
    return str(tiny_model("qwen3_moe", "--layers", "2"))


@pytest.fixture(scope="module")
def samples():
    seed = fresh_seed()
    return make_samples(seed, 8, 64)


@pytest.fixture(scope="module", params=WORLDS)
def trained(request, model, samples, tmp_path_factory):
    """(name, whether it went through a checkpoint) -> what two updates left."""
    runs = {}
    for name, overrides in PLAIN.items():
        runs["fp32", name, False] = (overrides, None, SMALL_BUCKETS)
        runs["fp32", name, True] = (overrides, str(tmp_path_factory.mktemp("checkpoints")), SMALL_BUCKETS)
    for name, overrides in OFFLOADED.items():
        runs["bf16", name, False] = (overrides, None, None)
        runs["bf16", name, True] = (overrides, str(tmp_path_factory.mktemp("checkpoints")), None)
    for name, overrides in GRADIENTS.items():
        runs["gradients", name, False] = (overrides, None, None)
        runs["one update", name, False] = (overrides, None, None, 1)
        runs["gradients", name, True] = (overrides, str(tmp_path_factory.mktemp("checkpoints")), None)
    for name, overrides in SGDS.items():
        runs["sgd", name, False] = (overrides, None, None)
        runs["sgd", name, True] = (overrides, str(tmp_path_factory.mktemp("checkpoints")), None)
    found = run_ranks(request.param, "memory_ranks:train_all", (model, samples, list(runs.values())), timeout=500.0)
    return request.param, dict(zip(runs, found[0], strict=True))


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        worst = (ours[name].float() - tensor.float()).abs().max()
        assert torch.equal(ours[name], tensor), f"{name} differs by {worst}"


@pytest.mark.parametrize("group", ["fp32", "bf16", "gradients", "sgd"])
def test_a_resumed_run_goes_on_as_one_that_was_not_stopped(trained, group):
    _, results = trained
    for (kind, name, resumed), result in results.items():
        if kind == group and resumed:
            same(result["state"], results[kind, name, False]["state"])


def test_weights_gathered_during_the_next_forward(trained):
    """In buckets, of which there are more: the norm of the gradients is summed in another order."""
    _, results = trained
    assert results["fp32", "overlapped", False]["buckets"] > 5
    plain = results["fp32", "plain", False]["state"]
    for resumed in (False, True):
        state = results["fp32", "overlapped", resumed]["state"]
        for name in (name for name in plain if name.startswith("weight/")):
            # Weights that were not gathered would be off by the learning rate, 1e-3.
            assert (state[name] - plain[name]).abs().mean() < 1e-5, name


@pytest.mark.parametrize("name", ["offloaded", "half offloaded"])
def test_optimizer_state_on_the_host(trained, name):
    """fp32 weights, both moments and bf16 weights, to the bit: the arithmetic is that of the same kernel."""
    _, results = trained
    for resumed in (False, True):
        same(results["bf16", name, resumed]["state"], results["bf16", "plain", resumed]["state"])


def test_gradients_in_bf16(trained):
    """Two ranks' sum and its division by the tokens are rounded to 8 bits, and so is the norm that they are clipped by."""
    _, results = trained
    ours, theirs = results["one update", "bf16", False], results["one update", "fp32", False]
    assert ours["gradients"] == {torch.bfloat16}
    assert theirs["gradients"] == {torch.float32}
    for name, tensor in theirs["state"].items():
        if name.startswith("exp_avg/"):  # of one update: the gradient, times a number
            assert (ours["state"][name] - tensor).norm() <= 3 * 2**-8 * tensor.norm(), name


def test_torchs_optimizers_are_fused(trained):
    """Else it keeps temporaries of the size of all its weights on a GPU."""
    _, results = trained
    assert all(result["fused"] == {True} for result in results.values())


@pytest.fixture(scope="module", params=WORLDS)
def slept(request, model, samples):
    found = run_ranks(request.param, "memory_ranks:sleep_all", (model, samples, list(SLEEPS.values())), timeout=500.0)
    return dict(zip(SLEEPS, found[0], strict=True))


@pytest.mark.parametrize("name", SLEEPS)
def test_a_sleep_changes_nothing(slept, name):
    result = slept[name]
    same(result["after"], result["before"])
    weights = {key: tensor for key, tensor in result["before"].items() if key.startswith("weight/")}
    same(result["pushed"], weights)
    same(result["kept"], weights)
    assert result["same_place"]
    assert result["gradients"]
    assert not any(result["gradients"])
    same(result["last"], result["expected"])


def test_copies_on_the_host_lie_one_behind_another(monkeypatch):
    """As many bytes as the storages have, in whole pieces; each storage once, and back where it was."""
    rng = np.random.default_rng()
    monkeypatch.setattr(offload, "PIECE_BYTES", int(rng.integers(1, 4000)))
    tensors = [torch.from_numpy(rng.normal(size=int(size))) for size in rng.integers(1, 900, 12)]
    tensors = [t.to(dtype) for t, dtype in zip(tensors, [torch.float32, torch.bfloat16, torch.int8] * 4, strict=True)]
    before, total = [t.clone() for t in tensors], sum(t.nbytes for t in tensors)
    copy = offload.HostCopy([*tensors, *(t[1:] for t in tensors)], torch.device("cpu"))
    sizes = [piece.nbytes for piece in copy.pieces]
    assert sum(sizes) == total and {*sizes[:-1]} <= {offload.PIECE_BYTES} and sizes[-1] <= offload.PIECE_BYTES
    copy.release()
    assert all(t.untyped_storage().nbytes() == 0 for t in tensors)
    copy.restore()
    assert all(torch.equal(t, old) for t, old in zip(tensors, before, strict=True))


@pytest.mark.parametrize("name", SLEEPS)
def test_a_sleep_gives_the_memory_back(slept, name):
    sizes, weights = slept[name]["sizes"], slept[name]["weights"]
    assert sizes["awake"] > 3 * weights, "weights, gradients, and a part of the moments"
    for when in ("asleep", "asleep again"):
        assert sizes[when] < MAY_STAY * sizes["awake"], f"{sizes[when]} of {sizes['awake']} bytes stay"
    assert weights <= sizes["with weights"] < 1.05 * weights + MAY_STAY * sizes["awake"]


@pytest.mark.parametrize("name", SLEEPS)
def test_a_sleeping_trainer_refuses_to_work(slept, name):
    weights, all_, update = slept[name]["refused"]
    assert "call wake(weights_only=True) first" in weights
    assert "call wake() first" in all_
    assert "call wake() first" in update
