"""A critic's state beside the policy's: in checkpoints, on other layouts, and off the device and back."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from ranks import fresh_seed, run_ranks
from safetensors.torch import load_file
from test_checkpoint import tensors_of
from weights import classifier

from tests.preloaded import PYTHON_WITH_TRAINER

pytestmark = pytest.mark.timeout(900)  # a fixture runs all layouts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def given(tiny_model, tmp_path_factory):
    """Folders of models, and seeds of trajectories."""
    seeds = [fresh_seed(), fresh_seed()]
    models = [str(tiny_model("qwen3_moe", "--layers", "2", *more)) for more in ((), ("--seed", "1"))]
    models.append(str(classifier(Path(models[1]), tmp_path_factory.mktemp("models") / "classifier", seeds[0])))
    return models, seeds


@pytest.fixture(scope="module")
def outcomes(folder, given):
    models, seeds = given
    return run_ranks(2, "critic_state_ranks:everything", (models, str(folder), seeds), timeout=540.0)


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_a_resumed_run_goes_on_bit_for_bit(outcomes, layout):
    assert all(outcome[f"resumed {layout}"] for outcome in outcomes)


@pytest.mark.long
def test_so_does_one_whose_optimizer_is_whole_on_each_rank(folder, given):
    models, seeds = given
    assert all(run_ranks(2, "critic_state_ranks:resume", (models, "replicated", str(folder), seeds), timeout=540.0))


def test_a_critic_is_loaded_on_another_layout(outcomes, folder):
    """Weights and moments of both, written under tensor parallelism and again under pipeline parallelism."""
    first, second = (tensors_of(folder / layout / "step_000001") for layout in ("tp2", "pp2"))
    assert first.keys() == second.keys()
    of_critic = {name for name in first if name.startswith("critic.")}
    assert len(of_critic) > 20 and any("exp_avg" in name for name in of_critic)
    assert all(torch.equal(second[name], value) for name, value in first.items())


def test_a_critic_that_a_checkpoint_has_and_the_run_has_not_and_the_other_way_round(outcomes):
    for outcome in outcomes:
        assert outcome["loaded without"]
        assert (
            "has no critic, as the run had none; start another run from its weights alone (checkpoint.load)"
            in (outcome["refused"])
        )
        assert "\n" not in outcome["refused"]


def test_a_checkpoint_with_a_critic_becomes_a_folder_of_the_policy(outcomes, folder, tmp_path):
    command = [
        PYTHON_WITH_TRAINER,
        "-m",
        "megatron_rl.cli",
        "convert",
        str(folder / "tp2" / "step_000001"),
        str(tmp_path / "hf"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr[-3000:]
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert weights.keys() == outcomes[0]["weights"].keys() and "lm_head.weight" in weights
    assert all(torch.equal(weights[name], value) for name, value in outcomes[0]["weights"].items())


def test_a_sleep_takes_the_critic_along(outcomes):
    for outcome in outcomes:
        sizes = outcome["sleep"]
        assert sizes["same"] and "call wake() first" in sizes["refused"]
        assert sizes["asleep"] < 0.02 * sizes["awake"], f"{sizes['asleep']} of {sizes['awake']} bytes stay"
        for when in ("with weights", "with weights again"):
            assert sizes[when] < 1.05 * sizes["policy's weights"] + 0.02 * sizes["awake"], (
                "more than the policy's weights"
            )
