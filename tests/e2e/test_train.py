"""The whole step on the real stack: Megatron-Core trains, SGLang rolls out, and the server dies in between."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from megatron_rl.cli import main
from megatron_rl.metrics.logger import read_json_lines
from tests.forked_servers import supervisors_of
from tests.program import Program, await_while_running, forked

STEPS = 4
TIMEOUT = 420
LOADED = ("--rollout.load", "RUN/rollouts", "--rollout.over_sample_rate", "0")
ZIGZAG = {"task": "number_zigzag", "prompts": 5, "samples": 3, "greedy": False}
NAMES = {
    *("step", "reward/mean", "eval/score", "loss/policy", "entropy", "routing/agreement"),
    *("mismatch/kl", "mismatch/ess", "mismatch/ratio_max"),
    *("time/rollout_s", "time/train_s", "time/sync_s", "throughput/tokens_per_s"),
}


def scheduler_of(process: subprocess.Popen | Program) -> psutil.Process | None:
    """Below the process, or below the supervisors of servers that it has had forked."""
    below = []
    for pid in (process.pid, *supervisors_of(process.pid)):
        with contextlib.suppress(psutil.NoSuchProcess):
            below += psutil.Process(pid).children(recursive=True)
    for child in below:
        try:
            if "sglang::scheduler" in " ".join(child.cmdline()) or child.name().startswith("sglang::schedul"):
                return child
        except psutil.NoSuchProcess:
            continue
    return None


def written_config(folder: Path, model: Path) -> Path:
    config = {
        "name": "killed",
        "steps": STEPS,
        "runs_dir": str(folder),
        "model": {"path": str(model)},
        "data": {"task": "number_sorting"},
        "batch": {"prompts_per_step": 8, "samples_per_prompt": 8, "updates_per_step": 2, "tokens_per_micro_batch": 256},
        # A random model earns nothing: without the entropy its weights would not move, and any would be the newest.
        "algorithm": {"kl": {"coefficient": 0.01}, "entropy_coefficient": 0.01},
        "pruning": {"enabled": True},
        "correction": {"mode": "mask", "low": 0.5, "high": 2.0, "veto": 1e-4, "denominator": "weights"},
        "optimizer": {"lr": 1e-3, "warmup_steps": 2},
        "parallel": {"expert": 2},
        "precision": {"train": "fp32", "rollout": "fp32"},
        "rollout": {
            "max_new_tokens": 24,
            "context_length": 64,
            "routes": True,
            "record": True,
            "over_sample_rate": 0.5,
        },
        "eval": {"prompts": 6, "samples": 2, "pass_at": [1], "sets": {"own": {}, "zigzag": ZIGZAG}},
        "checkpoint": {"every": 2},
        "logging": {"trackers": [], "profile_steps": [2]},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def kill_server(process: subprocess.Popen | Program, run_dir: Path, log: Path) -> None:
    """With -9 after the run's first step; then wait for the run's end."""
    try:
        first = lambda: any(r["step"] == 1 for r in read_json_lines(run_dir / "metrics.jsonl"))  # noqa: E731
        await_while_running(process, first, TIMEOUT, log, "its first step")
        victim = scheduler_of(process)
        assert victim is not None, "no scheduler process below the trainer"
        assert victim.pid in processes_of(run_dir)
        victim.send_signal(signal.SIGKILL)
        assert process.wait(TIMEOUT) == 0, log.read_text()[-4000:]
    finally:
        process.kill()


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_model) -> Path:
    model = tiny_model("qwen3_moe", "--layers", "2", "--tokenizer", "numbers")
    return written_config(tmp_path_factory.mktemp("train"), model)


@pytest.fixture(scope="module")
def finished(config):
    """A finished run of two trainer processes whose server was killed with -9 after its first step."""
    run_dir, log = config.parent / "killed", config.parent / "log.txt"
    kill_server(Program("train", str(config), ranks=2, log=log), run_dir, log)
    return run_dir, log


def test_the_run_goes_on_when_the_server_is_killed(finished):
    look_at_steps(*finished)


@pytest.mark.timeout(900)
def test_so_does_one_that_is_started_as_users_do(config):
    """No process of it is forked from another one's imports, and torchrun starts the two of the trainer."""
    run_dir, log = config.parent / "as-users-do", config.parent / "as-users-do.txt"
    command = [sys.executable, "-m", "megatron_rl.cli", "train", str(config), "--name", run_dir.name, "--nproc", "2"]
    with open(log, "a") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | {"OMP_NUM_THREADS": "1"})
    kill_server(process, run_dir, log)
    look_at_steps(run_dir, log)
    left_no_process(run_dir)


def look_at_steps(run_dir: Path, log: Path) -> None:
    rows = [r for r in read_json_lines(run_dir / "metrics.jsonl") if r["step"] > 0]
    assert [r["step"] for r in rows] == list(range(1, STEPS + 1)), log.read_text()[-3000:]
    assert rows[-1]["rollout/restarts"] >= 1
    for row in rows:
        assert set(row) >= NAMES
        assert row["rollout/aborted"] + row["rollout/dropped"] == pytest.approx(1 / 3), "of 12 groups 8 are taken"
        assert row["update/skipped"] == 0


def test_what_a_run_writes_is_its_owners_alone(finished):
    run_dir, _ = finished
    written = [run_dir, *run_dir.rglob("*")]
    kinds = {"config.yaml", "metrics.jsonl", "samples.jsonl", "sglang.log", ".metadata", "hf"}
    assert kinds <= {path.name for path in written} and any(path.suffix == ".npz" for path in written)
    assert [str(path) for path in written if path.stat().st_mode & 0o077] == []


def test_engine_and_trainer_agree_in_fp32(finished):
    """Log-probs of sampled tokens: SGLang's decode against the trainer's pass over the packed sequences."""
    for row in read_json_lines(finished[0] / "metrics.jsonl"):
        if row["step"] > 0:
            assert row["update/grad_norm"] > 0
            assert row["mismatch/abs_median"] <= 1e-4
            assert row["mismatch/kl"] <= 1e-6
            assert row["mismatch/ess"] > 0.999
            assert row["pruning/coverage"] > 0.99 and row["pruning/out_of_set"] <= 1
            assert row["corrected/kl"] <= 1e-6 and row["corrected/vetoed"] < 0.1


def test_nothing_was_lost_and_weights_are_the_newest(finished):
    from megatron_rl.data.trajectory import file_of, load_trajectories

    for step in range(STEPS):
        parts = [load_trajectories(file_of(finished[0] / "rollouts", step, rank)) for rank in range(2)]
        groups = [t.group_id for part in parts for t in part]
        assert groups == [group for group in range(8) for _ in range(8)], "8 of the 12 groups that were asked for"
        for part in parts:
            for t in part:
                assert {span.version for span in t.weight_spans} == {str(step)}
                assert t.routes.shape == (len(t.tokens) - 1, 2, 2)
                assert 1 <= t.response_length <= 24


def test_numbers_of_gpus_are_null_without_one_and_the_step_is_traced(finished):
    run_dir, _ = finished
    for row in read_json_lines(run_dir / "metrics.jsonl"):
        for name in ("memory/peak_gb", "memory/reserved_gb", "throughput/mfu", "throughput/tokens_per_s_per_gpu"):
            assert row[name] is None
    assert [path.name for path in (run_dir / "profile").iterdir()] == ["step_2.json.gz"]
    with gzip.open(run_dir / "profile" / "step_2.json.gz", "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"rollout", "train", "sync"} <= names


def test_each_evaluation_set_has_scores_and_responses(finished):
    """The run's own held-out prompts by name, and another task's, which judges its answers itself."""
    run_dir, _ = finished
    sizes = {"own": (6, 2, True), "zigzag": (5, 3, False)}
    for row in read_json_lines(run_dir / "metrics.jsonl"):
        if row["step"] not in (0, STEPS):
            continue
        rows = [json.loads(line) for line in (run_dir / "evals" / f"step_{row['step']:06d}.jsonl").open()]
        for name, (prompts, samples, greedy) in sizes.items():
            mine = [one for one in rows if one["set"] == name]
            sampled = [one["reward"] for one in mine if not one["greedy"]]
            assert len(sampled) == prompts * samples and len(mine) - len(sampled) == prompts * greedy
            assert {one["prompt_id"].partition(":")[0] for one in mine} == {f"number_{'sorting' if greedy else name}"}
            assert row[f"eval/{name}/score"] == pytest.approx(sum(sampled) / len(sampled))
            assert {f"eval/{name}/pass@1", f"eval/{name}/pass@{samples}", f"eval/{name}/response_length"} <= row.keys()
            assert (f"eval/{name}/greedy" in row) == greedy and row[f"eval/{name}/prompts"] == prompts
        assert row["eval/score"] == pytest.approx((row["eval/own/score"] + row["eval/zigzag/score"]) / 2)
        assert not any(name.startswith("eval/") and name.count("/") == 1 for name in row.keys() - {"eval/score"})


def test_no_process_is_left(finished):
    left_no_process(finished[0])


def left_no_process(run_dir: Path) -> None:
    assert not processes_of(run_dir)


def processes_of(run_dir: Path) -> list[int]:
    """Ids of processes with the run's folder in their command, or with a file of it open, as a server has its log."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            paths = [*process.cmdline(), *(file.path for file in process.open_files())]
            if any(str(run_dir) in path for path in paths):
                found.append(process.pid)
    return found


def test_report_is_one_page(finished):
    run_dir, _ = finished
    forked("report", str(run_dir), timeout=120)
    page = (run_dir / "report.html").read_text()
    samples = read_json_lines(run_dir / "samples.jsonl")
    sample = samples[0]
    assert all(s["count"] >= 1 for s in samples)
    assert len({s["prompt"] for s in samples if s["step"] == 1}) > 1, "samples are spread over prompts"
    assert sample["prompt"].strip("<>: ") in page
    entropy = read_json_lines(run_dir / "metrics.jsonl")[-1]["entropy"]
    assert f"{entropy:.3f}"[:4] in page, "the curves' numbers are in the page"
    assert not re.search(r"""(src|href)=["']?http""", page), "the page needs nothing from outside"


def test_the_mismatch_is_attributed(finished, capsys):
    """Two expert-parallel ranks of the run, one process here: what is recorded does not depend on the layout.

    It is the newest step with both its rollouts and its weights, from a checkpoint; with other weights nothing would agree.
    """
    run_dir, _ = finished
    done = forked("report", str(run_dir), "--attribute", "--parallel.expert", "1", timeout=TIMEOUT)
    assert "Sources of the mismatch at step 2" in done.stdout and "Sources of" in (run_dir / "report.html").read_text()
    sources = {s["name"]: s for s in json.loads((run_dir / "attribution.json").read_text())["sources"]}
    assert list(sources) == ["routes", "gates", "tail", "attention", "precision", "all"]
    assert sources["routes"]["kl"] <= 1e-6 and sources["tail"]["removed_by"] == "the run already prunes it"
    for arguments, reason in (
        (["--step", "3"], "steps 0, 2 have both"),
        (["--attribut.x", "1"], "unknown key"),
        (["--parallel.expert", "3"], "parallel.expert"),
    ):
        assert main(["report", str(run_dir), "--attribute", *arguments]) == 2
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        (["--model.path", "absent"], ["absent", "does not exist"]),
        (["--batch.tokens_per_micro_batch", "32"], ["rollout.context_length", "batch.tokens_per_micro_batch"]),
        (["--parallel.expert", "3"], ["parallel.expert"]),
        (["--batch.samples_per_prompt", "1"], ["batch.samples_per_prompt"]),
        (["--rollout.sampling.top_p", "0.9"], ["rollout.sampling", "top_p"]),
        (["--rollout.addresses", "[http://127.0.0.1:9]", "--rollout.retries", "0"], ["127.0.0.1:9"]),
        (["--rollout.load", "RUN/rollouts"], ["over_sample_rate: 0"]),
        ([*LOADED, "--eval.prompts", "0"], ["eval.prompts: 0, and eval.sets: {}"]),
        (
            ["--rollout.sampling.temperature", "0.5", *LOADED, "--eval.prompts", "0", "--eval.sets", "{}"],
            ["temperature 1 and not 0.5"],
        ),
    ],
)
def test_bad_input_is_one_line(finished, tmp_path, capsys, override, fragments):
    config = finished[0].parent / "config.yaml"
    arguments = ["train", str(config), "--name", f"bad{tmp_path.name}", "--parallel.expert", "1"]
    arguments += [part.replace("RUN", str(finished[0])) for part in override]
    if override[0] in ("--rollout.addresses", "--rollout.sampling.temperature"):  # found by a trainer that has started
        done = forked(*arguments, timeout=TIMEOUT, check=False)
        status, printed = done.returncode, done.stderr
    else:
        status, printed = main(arguments), capsys.readouterr().err
    errors = [line for line in printed.splitlines() if line.startswith("megatron-rl: error:")]
    assert status == 2 and len(errors) == 1, printed[-3000:]
    for fragment in fragments:
        assert fragment in errors[0]
    assert "Traceback" not in printed
