"""`megatron-rl eval` and `rollout`: they survive their server, keep what they got, and touch no run's files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_rl import evaluate
from megatron_rl.cli import main
from megatron_rl.data.trajectory import file_of, load_trajectories
from megatron_rl.distributed import parallel
from megatron_rl.metrics.reduce import figures
from megatron_rl.rollout.engine import Engine
from tests.judge_server import Scripted, fenced, nonce_of


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_model) -> Path:
    folder = tmp_path_factory.mktemp("ask")
    tree = {
        "name": "trained",
        "runs_dir": str(folder / "runs"),
        "model": {"path": str(tiny_model("qwen3_moe", "--layers", "2", "--tokenizer", "numbers"))},
        "data": {"task": "number_sorting"},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 4},
        "precision": {"train": "fp32", "rollout": "fp32"},
        "rollout": {"max_new_tokens": 12, "context_length": 64, "server": {"threads": 1, "max_total_tokens": 4096}},
        "pruning": {"enabled": True, "rho": 1.0},  # the likeliest token alone
        "eval": {"prompts": 5, "samples": 3, "unpruned": True},
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(tree))
    run = folder / "runs" / "trained"
    run.mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl", "samples.jsonl"):
        (run / name).write_text(f"{name} of the training run\n")
    return path


def rows_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_eval_of_a_run_whose_server_dies(config, monkeypatch, capsys):
    """Twice: the first server is killed when it is first asked. Both times the same responses, by the requests' seeds."""
    asked, restarts = [], []

    class Killing(Engine):
        def ask(self, *args, **options):
            if not asked:
                self._children.servers[0]._process.kill()  # with it the whole of this server
                self._children.servers[0]._process.wait(20)
            asked.append(options["seed"])
            found = super().ask(*args, **options)
            restarts.append(figures(self.metrics())["rollout/restarts"])
            return found

    monkeypatch.setattr(evaluate, "Engine", Killing)
    run = config.parent / "runs" / "trained"
    kept = []
    for _ in range(2):
        try:
            assert main(["eval", str(config)]) == 0
        finally:
            parallel.shutdown()
        kept.append(rows_of(run / "evals" / "step_000000.jsonl"))
        said = capsys.readouterr().out
        assert f"responses are in {run / 'evals' / 'step_000000.jsonl'}" in said
        assert all(f'"eval/{name}"' in said for name in ("score", "score_unpruned", "pass@3", "pass_unpruned@3"))
        [scores] = rows_of(run / "evals" / "scores.jsonl")
        assert scores.pop("step") == 0 and json.dumps(scores, indent=2) in said
    assert asked == ["eval/0", "eval/0", "greedy"] * 2 and restarts == [1, 1, 1, 0, 0, 0]
    for name in ("config.yaml", "metrics.jsonl", "samples.jsonl"):
        assert (run / name).read_text() == f"{name} of the training run\n"
    first, second = kept
    assert [(row["greedy"], row.get("unpruned", False)) for row in first] == [
        *[(False, False)] * 15,
        *[(False, True)] * 15,
        *[(True, False)] * 5,
    ]
    greedy = {row["prompt_id"]: row["response"] for row in first[30:]}
    alike = [row["response"] == greedy[row["prompt_id"]] for row in first]
    assert all(alike[:15]) and not all(alike[15:30]), "one sampler prunes and the other does not"
    assert len({row["prompt_id"] for row in first}) == 5
    for row in first:
        assert {"prompt", "response", "reward", "reward/correct", "finish", "weights"} <= set(row)
        assert row["finish"] in ("stop", "length")
    assert sum(a == b for a, b in zip(first, second, strict=True)) >= 34, "a draw in 100,000 falls on a border"


def test_rollout_writes_for_people_and_for_machines(config, capsys):
    """With what a judge says of each response, by its length."""
    judge = Scripted(lambda text: f"VERDICT {nonce_of(text)}: {len(fenced(text)) % 10}")
    try:
        assert main(["rollout", str(config)]) == 2
        assert "trained is the folder of a training run; choose another --name" in capsys.readouterr().err
        where = ["--rewards.judges.wise.address", judge.url, "--rewards.judges.wise.model", "m"]
        assert main(["rollout", str(config), "--name", "sampled", *where]) == 0
    finally:
        parallel.shutdown()
        judge.die()
    folder = config.parent / "runs" / "sampled" / "rollouts"
    rows = rows_of(folder / "step_000000.jsonl")
    trajectories = load_trajectories(file_of(folder, 0, 0))
    assert [row["response"] for row in rows] == [t.text for t in trajectories]
    for row in rows:
        assert row["reward/wise"] == pytest.approx(len(row["response"]) % 10 / 10)
        assert row["reward"] == pytest.approx(row["reward/correct"] + row["reward/wise"])
    assert len(rows) == 16 and (folder.parent / "config.yaml").exists()
