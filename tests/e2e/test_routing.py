"""Routes on the real stack: the engine's predictors are those of the trainer, and its routes bring both sides together."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml

from megatron_rl.data.trajectory import file_of, load_trajectories
from megatron_rl.metrics.logger import METRICS_FILE, read_json_lines
from tests.program import forked

TIMEOUT = 420
STEPS = 3
PR3 = {
    "routing": {
        "source": "pr3",
        "features": "engine",
        "cached_tokens": 12,
        "predictor_lr_multiplier": 20.0,
        "predictor_decay": 0.0,
    }
}


def start(folder: Path, name: str, model: Path, changes: dict, steps: int) -> subprocess.CompletedProcess:
    """A run of one process, to its end."""
    config = {
        "name": name,
        "steps": steps,
        "runs_dir": str(folder),
        "model": {"path": str(model)},
        "data": {"task": "number_sorting"},
        "batch": {"prompts_per_step": 8, "samples_per_prompt": 8, "updates_per_step": 2, "tokens_per_micro_batch": 512},
        "optimizer": {"lr": 1e-3},
        "algorithm": {"entropy_coefficient": 0.1},  # a random model wins nothing that would move it
        "precision": {"train": "fp32", "rollout": "bf16"},
        "rollout": {"max_new_tokens": 24, "context_length": 64},
        "eval": {"prompts": 0},
        "logging": {"trackers": []},
    }
    for section, values in changes.items():
        config[section] = {**config.get(section, {}), **values}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return forked("train", str(path), timeout=TIMEOUT, check=False)


def train(folder: Path, name: str, model: Path, changes: dict, steps: int) -> list[dict]:
    """Lines of a run that must succeed."""
    done = start(folder, name, model, changes, steps)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return read_json_lines(folder / name / METRICS_FILE)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_model):
    """A Pr3 run whose predictors learn from the engine's features; its folder, model and lines."""
    folder = tmp_path_factory.mktemp("routing")
    model = tiny_model("qwen3_moe", "--layers", "2", "--tokenizer", "numbers")
    changes = PR3 | {
        "rollout": {"max_new_tokens": 24, "context_length": 64, "record": True, "routes": True, "gates": True}
    }
    return folder, model, train(folder, "pr3", model, changes, STEPS)


def test_the_engine_routes_with_the_predictors_of_the_trainer(finished):
    """Each push compares the checksums of all that is served, predictors too; what they change shows in the routes."""
    lines = finished[2]
    steps = [line for line in lines if line["step"] > 0]
    assert [line["step"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert line["routing/fallback_tokens"] == 0
        assert line["routing/update_2/predictor_loss"] > 0 and "routing/update_1/predictor_loss" not in line
        assert {f"routing/layer_0{layer}/update_2/agreement" for layer in (0, 1)} <= line.keys()
    # The engine's bf16 features of a token against the trainer's fp32 ones; of another token they are apart by 1e-2.
    apart = [f"{line['routing/update_1/kl_unpredicted']:.1e}" for line in steps]
    print(f"KL between the engine's routers and the trainer's, without prediction, by step: {', '.join(apart)}")
    assert 0 < steps[0]["routing/update_1/kl"] < 1e-4
    assert steps[0]["routing/engine_agreement"] > 0.98  # zero predictors: what bf16 turns over
    # Both sides predict from here on. Weights by the prediction in the engine alone set later layers apart.
    assert all(line["routing/engine_agreement"] > 0.9 for line in steps)
    assert steps[1]["routing/update_1/agreement"] < 0.95, "the predictors are too small to show anything"
    assert steps[0]["mismatch/abs_median"] < 0.01 and steps[2]["mismatch/abs_median"] < 0.05


def test_the_engine_exports_the_features_that_were_asked_for(finished):
    """Router inputs of the second update's responses, from which predictors learn, and of no others."""
    for number, t in enumerate(load_trajectories(file_of(finished[0] / "pr3" / "rollouts", 0, 0))):
        assert bool(t.features.hidden.shape[-1]) == (number >= 32)
        assert t.features.positions.tolist() == list(range(0, t.response_length, 2))  # 24 tokens, 12 of them
        assert t.routes.shape == (len(t.tokens) - 1, 2, 2) and t.routes.dtype == np.uint8


def offline(rollouts: Path, source: str) -> dict:
    rollout = {"max_new_tokens": 24, "context_length": 64, "load": str(rollouts)}
    return {"rollout": rollout, "routing": {"source": source}}


def test_a_replayed_run_is_the_run_again(finished):
    """From its rollouts, with no engine: the same updates to the last bit, so that the routes of all steps are its own."""
    folder, model, lines = finished
    again = train(folder, "again", model, PR3 | {"rollout": offline(folder / "pr3" / "rollouts", "")["rollout"]}, STEPS)
    names = ("loss/policy", "routing/kl", "routing/kl_unpredicted", "routing/agreement", "routing/fallback_tokens")
    for now, before in zip(again, lines[-STEPS:], strict=True):
        assert {name: now[name] for name in names} == {name: before[name] for name in names}


def test_replayed_routes_bring_the_trainer_to_the_engine(finished):
    """The same rollouts, bf16 in the engine and fp32 in the trainer, with the trainer's own routes and the engine's."""
    folder, model, _ = finished
    apart = {}
    for source, steps in (("none", 1), ("r3", 2)):
        changes = offline(folder / "pr3" / "rollouts", source) | {"optimizer": {"lr": 5e-4}}
        line, *after = train(folder, source, model, changes, steps)
        apart[source] = line["mismatch/abs_median"], line["mismatch/abs_p99"]
    print(f"median and 99 % of |dlogp|: {apart}")
    assert apart["r3"][0] < apart["none"][0] and apart["r3"][1] < apart["none"][1]
    assert line["routing/fallback_tokens"] == 0
    # This run's second step has moved elsewhere: its weights are not those that the second rollouts came from.
    [line] = after
    trajectories = load_trajectories(file_of(folder / "pr3" / "rollouts", 1, 0))
    assert line["routing/fallback_tokens"] == sum(len(t.tokens) - 1 for t in trajectories) > 0
    assert line["routing/agreement"] is None and "routing/engine_agreement" not in line, "nothing was replayed"


def test_a_run_replays_gates_and_gives_experts_up_as_its_config_says(finished):
    folder, model, _ = finished
    for t in load_trajectories(file_of(folder / "pr3" / "rollouts", 0, 0)):
        assert t.gates.shape == t.routes.shape and np.abs(t.gates.sum(-1) - 1).max() < 1e-5
    lines = {}
    for name, keys in {"ids": {}, "gates": {"replay_gates": True}, "some": {"give_up_below": 0.98}}.items():
        changes = offline(folder / "pr3" / "rollouts", "r3")
        changes["routing"] |= keys
        [lines[name]] = train(folder, name, model, changes, 1)
    assert lines["gates"]["mismatch/abs_mean"] != lines["ids"]["mismatch/abs_mean"]
    assert 0 < lines["some"]["routing/given_up"] < 1 and "routing/given_up" not in lines["gates"]
    assert all(line["routing/fallback_tokens"] == 0 for line in lines.values())


def test_routes_of_another_model_are_refused_by_name(finished, tiny_model):
    folder, _, _ = finished
    other = tiny_model("qwen3_moe", "--layers", "4", "--tokenizer", "numbers")
    done = start(folder, "other", other, offline(folder / "pr3" / "rollouts", "r3"), 1)
    assert done.returncode == 2
    errors = [
        line for line in done.stderr.splitlines() if "trajectory 0: routes have 2 MoE layers, the model wants 4" in line
    ]
    assert len(errors) == 1 and "step_000000.rank0.npz" in errors[0]
