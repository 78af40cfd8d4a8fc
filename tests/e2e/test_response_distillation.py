"""`megatron-rl rollout` with filters, then `sft` and `eval` on its file: the tokens, and what the engine said of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.cli import main
from megatron_rl.data.trajectory import Trajectory, file_of, load_trajectories
from megatron_rl.distributed import parallel
from megatron_rl.metrics.logger import read_json_lines
from tests.program import forked

K, PER_PROMPT = 56, 2
REWARD = """
def odd(response, answer):
    return float(len(response) % 2)
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_model) -> Path:
    folder = tmp_path_factory.mktemp("responses")
    (folder / "reward.py").write_text(REWARD)
    rng = np.random.default_rng()
    prompts = {f"<{' '.join(map(str, rng.integers(0, 10, 4)))}:" for _ in range(24)}
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p, "answer": "-"}) + "\n" for p in prompts))
    tree = {
        "name": "sampled",
        "runs_dir": str(folder / "runs"),
        "model": {"path": str(tiny_model("qwen3_moe", "--layers", "2", "--tokenizer", "numbers", "--vocab", "64"))},
        "data": {"path": str(folder / "prompts.jsonl"), "verifier": f"{folder / 'reward.py'}:odd"},
        "batch": {"prompts_per_step": 12, "samples_per_prompt": 12, "tokens_per_micro_batch": 256},
        "precision": {"train": "fp32", "rollout": "fp32"},
        "rollout": {
            "max_new_tokens": 40,
            "context_length": 64,
            "server": {"threads": 1, "max_total_tokens": 4096},
            "demonstrations": {"min_reward": 1.0, "per_prompt": PER_PROMPT, "min_tokens": 2, "top_log_probs": K},
        },
        "eval": {"prompts": 0},
        "logging": {"progress": False, "trackers": []},
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(tree))
    return path


@pytest.fixture(scope="module")
def sampled(config) -> tuple[Path, list[Trajectory], str]:
    """The file of demonstrations, all that was sampled, and what the program said."""
    said = forked("rollout", str(config), timeout=580).stdout
    folder = config.parent / "runs" / "sampled" / "rollouts"
    return folder / "demonstrations.jsonl", load_trajectories(file_of(folder, 0, 0)), said


def wanted(trajectories: list[Trajectory]) -> list[Trajectory]:
    """Those that end by themselves, are paid and are no single token: of each prompt the shortest two."""
    fine = [t for t in trajectories if t.finish_reason == "stop" and t.reward == 1.0 and t.response_length >= 2]
    kept: dict[str, dict[bytes, Trajectory]] = {}
    for t in sorted(fine, key=lambda t: t.response_length):
        of_prompt = kept.setdefault(t.prompt_id, {})
        if len(of_prompt) < PER_PROMPT:
            of_prompt.setdefault(t.tokens.tobytes(), t)
    chosen = [id(t) for of_prompt in kept.values() for t in of_prompt.values()]
    return [t for t in trajectories if id(t) in chosen]


@pytest.mark.timeout(900)
def test_the_file_has_what_is_wanted_to_the_token(sampled):
    path, trajectories, said = sampled
    rows, kept = [json.loads(line) for line in path.read_text().splitlines()], wanted(trajectories)
    # One of 64 tokens ends a response, half have an odd length: of twelve a quarter is fine, none of twelve with a chance of
    # 0.04; of twelve prompts four or fewer are kept in all with one of 1e-11, and two of each at most.
    assert 4 < len(kept) < len(trajectories) / 2, "filters had something to do"
    assert f"demonstrations: {len(kept)} of {len(trajectories)} responses are kept; left out: " in said
    assert all(f" {reason}" in said for reason in ("cut off", "below min_reward")) and str(path) in said
    told = 0
    for row, t in zip(rows, kept, strict=True):
        assert row["prompt_tokens"] + row["response_tokens"] == t.tokens.tolist()
        assert row["loss_mask"] == [1] * t.response_length and row["reward"] == 1.0 and row["response"] == t.text
        ids, log_probs = np.asarray(row["teacher_token_ids"]), np.asarray(row["teacher_log_probs"])
        assert ids.shape == log_probs.shape == (t.response_length, K)
        own = ids == np.asarray(row["response_tokens"])[:, None]  # of the sampled token the engine said the same
        found = np.where(own, log_probs, 0).sum(1)[own.any(1)]
        assert np.abs(found - t["rollout_log_probs"][own.any(1)]).max(initial=0) < 1e-6
        told += int(own.any(1).sum())
    # Of 80 tokens or more seven in eight and more: fewer than half with a chance below 1e-11.
    assert told > sum(t.response_length for t in kept) / 2, "of 64 tokens the likeliest 56 are told"


@pytest.mark.timeout(900)
def test_what_sft_learns_is_what_the_engine_sampled(config, sampled, capsys):
    """By the weights that sampled, the loss is that of the engine's own log-probs, and the recorded teacher is where it is."""
    path, trajectories, _ = sampled
    kept = {t.tokens.tobytes(): t for t in wanted(trajectories)}
    log_probs = np.concatenate([t["rollout_log_probs"] for t in kept.values()])
    tune = ["--data.path", str(path), "--data.verifier", "none"]
    try:
        scored = ["--data.eval_path", str(path), "--eval.prompts", "1000", "--eval.likelihood", "true"]
        assert main(["eval", str(config), *tune, *scored]) == 0
    finally:
        parallel.shutdown()
    printed = capsys.readouterr().out
    scores = json.loads(printed[printed.index("{") : printed.rindex("}") + 1])
    # fp32 on both sides; where two experts nearly tie, a token may go to either: 0.02 of one of a hundred tokens
    assert scores["eval/loss"] == pytest.approx(-log_probs.mean(), abs=1e-3)
    assert scores["eval/prompts"] == len(kept)

    learn = ["--steps", "2", "--batch.prompts_per_step", "64", "--optimizer.lr", "1e-2"]
    learn += ["--distillation.recorded", "true", "--distillation.task_coefficient", "1"]
    forked("sft", str(config), "--name", "tuned", *tune, *learn)
    lines = read_json_lines(config.parent / "runs" / "tuned" / "metrics.jsonl")
    first, second = (line for line in lines if line["step"] > 0)
    assert abs(first["distillation/kl"]) < 1e-4, "it begins as its own teacher"
    assert second["distillation/kl"] > 1e-3 and second["loss/policy"] < first["loss/policy"], "and has moved"
    assert first["loss/policy"] == pytest.approx(-log_probs.mean(), abs=0.5)  # of training rows, some more often


@pytest.mark.timeout(900)
def test_another_tokenizer_learns_the_texts_and_no_tokens(config, sampled, tiny_model, capsys):
    path, _, _ = sampled
    other = ["--model.path", str(tiny_model("qwen3")), "--data.path", str(path), "--data.verifier", "none"]
    try:
        assert main(["sft", str(config), "--name", "other", *other]) == 2
        refused = capsys.readouterr().err
        assert "demonstrations.jsonl:" in refused and "set data.tokens_key: null to learn from the texts" in refused
    finally:
        parallel.shutdown()
    forked("sft", str(config), "--name", "other", *other, "--data.tokens_key", "null", "--steps", "1")
    lines = read_json_lines(config.parent / "runs" / "other" / "metrics.jsonl")
    assert lines[-1]["loss/policy"] > 1
