"""Stage engine: SGLang beside the trainer on one GPU: pushes, routes, mismatch, graphs, turns, a killed server, real widths.

Small runs of warm-started models (references/engine) go side by side on a GPU, as most of what they take is imports and
starts; what is timed runs alone after them. On a CPU one runs after another, with fewer steps and tiny widths.

Seconds on an H200, estimated, as no part has run on one: a server's start 45 (imports 20, kernels that were compiled ahead and
graphs 25), a trainer's 20 beside it.

| test | what takes them | seconds |
|---|---|---|
| test_twenty_steps_and_a_killed_server | start 65, evaluations 10, 20 steps of 2.5, second start 45; others beside | 170 |
| test_mismatch_of | six processes at once: imports, two trainers each, attention in fp64 | 45 |
| test_twenty_steps_of_gpt_oss | is done by then | 5 |
| test_pruned_and_pushed_by_disk | is done by then | 5 |
| test_kept_sets | a trainer's start, two steps | 30 |
| test_seeds_and_graphs | four rounds of 24 responses, two of them one by one | 10 |
| test_real_widths[qwen3] | start 75, pinned memory 15, two steps of 15 | 120 |
| test_real_widths[gpt_oss] | start 85, pinned memory 20, two steps of 20 | 145 |
| test_a_slice_pushed_by_disk | start 75, two pushes of 15, a step; with --budget-s 440 it is left out | 120 |
"""

from __future__ import annotations

import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import REPOSITORY, WITHOUT_FLASH_ATTENTION_3, RunFailed, Running, Served, figures, tail

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.data.trajectory import load_trajectories
from megatron_rl.rollout.collect import Collection
from megatron_rl.servers.client import SGLangClient
from megatron_rl.tasks import Prompt

pytestmark = pytest.mark.timeout(560)  # each run has a limit of its own

GPU = torch.cuda.is_available()
STEPS, KILLED_AFTER, FEW = (20, 6, 3) if GPU else (3, 1, 1)
"""Steps to a score; those that are logged when the server is killed; of a run that shows how things are."""
LIMIT_S, START_S = 240.0, 200.0
KERNELS = [*WITHOUT_FLASH_ATTENTION_3, "--max-running-requests", "256"] if GPU else []
"""The largest graph of a server on one GPU is of 256 requests."""
VERBOSE = ["--log-level", "info", "--decode-log-interval", "1"]
"""The server says of each batch whether a CUDA graph computed it."""
MISMATCH = ("mismatch/kl", "mismatch/k1", "mismatch/ess", "mismatch/abs_*", "mismatch/close", "mismatch/ratio_*")
MISMATCH += ("mismatch/p<*", "mismatch/epsilon_p*", "mismatch/tail_bias*", "routing/engine_agreement", "entropy")
SPEED = ("time/*", "throughput/*", "memory/*", "sync/megabytes", "sync/push_s", "tokens", "response/length")
SCORE = ("reward/mean", "eval/score", "eval/greedy", "rollout/restarts", "update/grad_norm", "update/skipped")
QUICKSTART = "configs/quickstart.yaml"

Record = Callable[[str, object], None]


def base(model: Path, precision: str = "bf16") -> dict[str, Any]:
    """A colocated run with routes and gates, pushed to by CUDA IPC (on a CPU by shared memory)."""
    return {
        "model.path": str(model),
        "precision.train": precision,
        "precision.rollout": precision,
        "optimizer.warmup_steps": 4 if GPU else 1,
        "rollout.routes": True,
        "rollout.gates": True,
        "rollout.agreement_floor": None,  # a run that it would stop is to be seen
        "rollout.colocate": True,
        "rollout.server.extra_args": [*KERNELS, *VERBOSE],
        "rollout.server.max_total_tokens": 65_536 if GPU else 16_384,
        "rollout.server.start_timeout_s": START_S,
        "sync.transport": "tensor",
    } | ({} if GPU else {"batch.prompts_per_step": 8})


def served(models: Path) -> dict[str, Any]:
    """A config of the server that several runs have one after the other: it prunes, and it names kept sets."""
    sets = ["--sampling-mask-max-tokens", "8192"]
    values = base(models / "qwen3_moe") | {"rollout.server.extra_args": [*KERNELS, *VERBOSE, *sets]}
    return values | {"rollout.colocate": False, "pruning.enabled": True}


SCORED = {"steps": STEPS, "eval.prompts": 200 if GPU else 16, "eval.samples": 4 if GPU else 1}
SHOWN = {"steps": FEW, "eval.prompts": 0, "optimizer.warmup_steps": 0}
RECORDED = {"rollout.record": True}
BESIDE = ("bf16", "fp32", "gpt_oss", "pruned")
"""Runs that are started at once on a GPU."""
PRECISIONS = ("bf16", "fp32") if GPU else ("bf16",)
"""On a CPU the other is three more starts of a minute, of the same code."""
ARMS = {"experts": False, "gates": True} if GPU else {"gates": True}
"""Arms of replay: the engine's experts, with their weights or without."""
WIDE, WIDE_RESPONSES = ("qwen3", "gpt_oss"), 64 if GPU else 16


def runs_of(models: Path, folder: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """All runs by name: config and overrides. models: references/engine; folder: where everything is."""
    qwen3, asks = base(models / "qwen3_moe"), {"rollout.address_folder": str(folder / "served")}
    server = served(models) | SHOWN | asks
    truncated = {"pruning.enabled": False, "rollout.sampling.top_p": 0.9, "rollout.sampling.top_k": 32, "steps": 1}
    found = {
        "bf16": (QUICKSTART, qwen3 | SCORED | RECORDED),
        "fp32": (QUICKSTART, base(models / "qwen3_moe", "fp32") | SHOWN | RECORDED),
        "gpt_oss": ("configs/gptoss_quickstart.yaml", base(models / "gpt_oss") | SCORED),
        "pruned": (QUICKSTART, server | {"pruning.rho": 3.4e-4, "sync.transport": "disk"}),
        "kept": (QUICKSTART, server | truncated | RECORDED),
    }
    for precision in PRECISIONS:
        again = {
            "rollout.load": str(folder / precision / "rollouts"),
            "rollout.colocate": False,
            "routing.source": "r3",
        }
        values = base(models / "qwen3_moe", precision) | SHOWN | again | {"steps": 1}
        found |= {f"{precision}-{arm}": (QUICKSTART, values | {"routing.replay_gates": ARMS[arm]}) for arm in ARMS}
    found |= {f"wide-{model}": (QUICKSTART, wide_values(folder / "wide" / model)) for model in WIDE}
    disk = {"sync.transport": "disk", "rollout.max_new_tokens": 32}
    return found | {"wide-disk": (QUICKSTART, wide_values(folder / "wide" / "qwen3") | disk)}


def wide_values(model: Path) -> dict[str, Any]:
    """Long responses, all of a step in the cache at once, and two updates, so that there is a scoring pass."""
    tokens = 1024 if GPU else 24
    return base(model) | {
        "steps": 10,  # it is ended before it saves
        "batch.prompts_per_step": WIDE_RESPONSES // 8,
        "batch.samples_per_prompt": 8,
        "batch.updates_per_step": 2,
        "batch.tokens_per_micro_batch": 16_384 if GPU else 256,
        "algorithm.entropy_coefficient": 0.01,  # a random model earns nothing: its weights move by this alone
        "eval.prompts": 0,
        "optimizer.lr": 1e-6,
        "optimizer.warmup_steps": 1,
        "rollout.gates": False,
        "rollout.durable": False,
        "rollout.max_new_tokens": tokens,
        "rollout.context_length": tokens + 64,
        "rollout.server.max_total_tokens": None if GPU else 16_384,
        "rollout.server.memory_fraction": 0.6,
    }


class Stage:
    """Runs by name, each started once; on a GPU the small ones at once, and beside them the wide models are made."""

    def __init__(self, folder: Path, models: Path) -> None:
        self.folder, self.models = folder, models
        self._runs: dict[str, Running] = {}
        self._values = runs_of(models, folder)
        self._server: Served | None = None
        self._made: dict[str, subprocess.Popen] = {}

    def run(self, name: str) -> Running:
        """It may have ended."""
        if name not in self._runs:
            config, values = self._values[name]
            logs = [self.server().log] if "rollout.address_folder" in values else []
            self._runs[name] = Running("train", self.folder / name, config, values, logs=logs)
        return self._runs[name]

    def plan(self, name: str, memory_gb: float) -> Running:
        """Start `megatron-rl plan` for a run, whose answer is JSON."""
        flags = ["--gpus", "1", "--memory", f"{memory_gb:.0f}", "--json"]
        return Running("plan", self.folder / name, *self._values[name], flags)

    def server(self) -> Served:
        """The one that several runs have."""
        if self._server is None:
            self._server = Served(self.folder / "served", QUICKSTART, served(self.models))
        return self._server

    def make(self, model: str) -> subprocess.Popen:
        """A process that makes, or has made, the folder of a wide model."""
        if model not in self._made:
            (self.folder / "wide").mkdir(exist_ok=True)
            layers = 4 if GPU and torch.cuda.get_device_properties(0).total_memory > 120e9 else 2
            command = [sys.executable, "tests/gpu/wide_model.py", model, str(self.folder / "wide" / model)]
            command += ["--layers", str(layers)] if GPU else ["--tiny"]
            with open(self.folder / "wide" / f"{model}.log", "w") as log:
                self._made[model] = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log)
        return self._made[model]

    def wide_model(self, model: str) -> Path:
        """Its folder. Errors: AssertionError with the end of the log."""
        for every in WIDE:
            self.make(every)
        status = self.make(model).wait(LIMIT_S)
        assert status == 0, tail(self.folder / "wide" / f"{model}.log")
        return self.folder / "wide" / model

    def close(self) -> None:
        for process in (*self._runs.values(), *self._made.values()):
            process.kill()
        if self._server:
            self._server.stop()


@pytest.fixture(scope="module")
def stage(references, tmp_path_factory, request) -> Iterator[Stage]:
    models = references / "engine"
    if not (models / "gpt_oss" / "config.json").is_file():
        pytest.skip(f"no {models}: python tests/gpu/references.py makes it")
    found = Stage(tmp_path_factory.mktemp("engine"), models)
    selected = {item.name.partition("[")[0] for item in request.session.items}
    if GPU and selected & {"test_twenty_steps_and_a_killed_server", "test_mismatch_of"}:
        for name in BESIDE:
            found.run(name)
        if "test_real_widths" in selected:
            for model in WIDE:
                found.make(model)
    yield found
    found.close()


# -- small models ------------------------------------------------------------------------------------------------------


def tell(record: Record, *keys: str) -> Callable[[list[dict]], None]:
    return lambda lines: record("run", figures(lines, keys))


def steps(lines: list[dict]) -> list[dict]:
    """Lines of steps, which trained and were near the engine."""
    found = [line for line in lines if line["step"] > 0]
    for line in found:
        assert line["update/skipped"] == 0 and line["update/grad_norm"] > 0
        assert line["mismatch/abs_median"] < 0.05 and line["mismatch/close"] > 0.9
        assert line["routing/engine_agreement"] > 0.9
    return found


def pushed(lines: list[dict]) -> dict[str, float]:
    """Speed of a step's push, from the first tensor that is exported to equal checksums."""
    seconds = statistics.median(line["sync/push_s"] for line in lines if line["step"] > 0)
    return {
        "megabytes": lines[-1]["sync/megabytes"],
        "seconds": seconds,
        "gb_per_s": lines[-1]["sync/megabytes"] / 1e3 / seconds,
    }


def graphs(log: Path) -> dict[str, int]:
    """Decode batches of a server that a CUDA graph computed, and others, by its own log."""
    said = re.findall(r"Decode batch.*(?:cuda|cpu) graph: (True|False)", log.read_text(errors="replace"))
    return {"graph": said.count("True"), "no graph": said.count("False")}


def test_twenty_steps_and_a_killed_server(stage, record_property):
    """The quickstart in bf16, colocated, by CUDA IPC; held-out prompts before and after. kill -9 of the server on the way."""
    run = stage.run("bf16")
    run.wait_for(lambda: len(run.steps()) >= KILLED_AFTER, LIMIT_S)
    killed = run.server_processes()
    for process in killed:
        process.kill()
    record_property("killed", f"{len(killed)} processes after {len(run.steps())} steps")
    lines = run.finish(LIMIT_S, tell(record_property, *SCORE, *MISMATCH, *SPEED))
    assert killed and [line["step"] for line in steps(lines)] == list(range(1, STEPS + 1))
    assert lines[-1]["rollout/restarts"] >= 1
    record_property("push", pushed(lines))
    record_property("decode batches", found := graphs(run.folder / "sglang.log"))
    before, after = lines[0]["eval/score"], lines[-1]["eval/score"]
    record_property("score", {"before": before, "after": after})
    assert found["graph"] + found["no graph"] > 0
    if GPU:
        assert found["no graph"] == 0 and after > before


@pytest.fixture(scope="module")
def attributing(stage) -> dict[str, Running]:
    """Processes that attribute the mismatch of the first responses of runs that ended well, by precision; responses are
    scored again in all arms beside them, on a GPU those of both precisions at once."""
    found: dict[str, Running] = {}
    for precision in PRECISIONS:
        with suppress(RunFailed):
            stage.run(precision).finish(LIMIT_S)
            found[precision] = Running("report", stage.folder / precision, flags=["--attribute", "--step", "0"])
            for run in [found[precision], *(stage.run(f"{precision}-{arm}") for arm in ARMS)]:
                if not GPU:
                    run.finish(LIMIT_S)
    return found


@pytest.mark.parametrize(("precision", "near"), [("bf16", 0.05), ("fp32", 1e-3)])
def test_mismatch_of(precision, near, stage, attributing, record_property):
    """Log-probs of both sides by class of probability: as they are, with the engine's experts, and with their weights."""
    if not GPU and precision not in PRECISIONS:
        pytest.skip("minutes on a CPU, of the same code")
    own = stage.run(precision).finish(LIMIT_S)
    first = next(line for line in own if line["step"] == 1)
    record_property("free", figures([first], MISMATCH))
    medians = [first["mismatch/abs_median"]]
    for arm in ARMS:
        line = stage.run(f"{precision}-{arm}").finish(LIMIT_S)[-1]
        record_property(arm, figures([line], MISMATCH))
        medians.append(line["mismatch/abs_median"])
        assert line["tokens"] == first["tokens"] and line["reward/mean"] == first["reward/mean"]
    attributing[precision].finish(LIMIT_S)
    found = json.loads((stage.folder / precision / "attribution.json").read_text())
    record_property("attribution", found)
    assert max(medians) < near and found["kl"] == pytest.approx(first["mismatch/kl"], rel=0.5, abs=1e-6)
    assert {source["name"] for source in found["sources"] if source["kl"] is not None} >= {
        "routes",
        "gates",
        "attention",
    }


def test_twenty_steps_of_gpt_oss(stage, record_property):
    """Sinks, windows, yarn and conversations with a tool, strictly on-policy: checksums are compared in every step."""
    run = stage.run("gpt_oss")
    lines = run.finish(LIMIT_S, tell(record_property, *SCORE, *MISMATCH, *SPEED))
    assert [line["step"] for line in steps(lines)] == list(range(1, STEPS + 1))
    before, after = lines[0]["eval/score"], lines[-1]["eval/score"]
    record_property("score", {"before": before, "after": after})
    record_property("decode batches", graphs(run.folder / "sglang.log"))
    if GPU:
        assert after > before


def test_pruned_and_pushed_by_disk(stage, record_property):
    """DVP: both sides over their safe sets, the engine's by a logit processor."""
    lines = stage.run("pruned").finish(LIMIT_S, tell(record_property, *SCORE, *MISMATCH, "pruning/*", *SPEED))
    record_property("push", pushed(lines))
    for line in steps(lines):
        assert 0.99 < line["pruning/coverage"] <= 1 and line["pruning/out_of_set"] < 0.01 * line["tokens"]


def test_kept_sets(stage, record_property):
    """Top-p and top-k of the engine, whose kept tokens are the trainer's support, on the same server."""
    stage.server().wait_ready(START_S)
    lines = stage.run("kept").finish(LIMIT_S, tell(record_property, *SCORE, *MISMATCH, *SPEED))
    record_property("push", pushed(lines))
    assert len(steps(lines)) == 1
    trajectories = load_trajectories(next((stage.folder / "kept" / "rollouts").glob("*.npz")))
    sizes = [len(kept) for trajectory in trajectories for kept in trajectory.kept or []]
    record_property("kept", {"tokens": len(sizes), "median": statistics.median(sizes), "largest": max(sizes)})
    assert min(sizes) >= 1 and max(sizes) <= 64


SEEDED = 24
"""Responses of a round, to six prompts."""


def test_seeds_and_graphs(stage, record_property):
    """The same request with the same seed, alone and among others; the graphs that the server has."""
    server = stage.server()
    server.wait_ready(START_S)
    info = server.ask("/server_info")
    state = info["internal_states"][0]
    told = ("memory_usage", "decode_cuda_graph_bs", "startup_time")
    record_property("server", {"version": info.get("version")} | {key: state.get(key) for key in told})
    prompts = [Prompt(str(i), "", tokens=random.choices(range(3, 23), k=8)) for i in range(6)]

    def sampled(concurrency: int, shares: int) -> list[list[int]]:
        """Responses asked for in so many parts."""
        server.ask("/flush_cache", {})
        found: list[list[int]] = []
        for number in range(shares):
            part = range(number * SEEDED // shares, (number + 1) * SEEDED // shares)
            options = {"samples_per_prompt": SEEDED // 6, "max_new_tokens": 24, "share": part, "seed": "0/seeds"}
            collection = Collection(prompts, SamplingSupport(), **options)
            client = SGLangClient([server.address], timeout_s=120, key=server.key, concurrency=concurrency)
            collection.run(client)
            found += [t.tokens[t.prompt_length :].tolist() for t in collection.trajectories()]
        return found

    rounds = {name: sampled(1, SEEDED) for name in ("alone", "alone again")}
    rounds |= {"together": sampled(512, 1), "in parts": sampled(512, 4)}
    same = {name: sum(a == b for a, b in zip(rounds["alone"], found, strict=True)) for name, found in rounds.items()}
    record_property(f"equal to those alone, of {SEEDED}", same)
    record_property("decode batches", found := graphs(server.log))
    assert same["alone again"] == SEEDED and len({tuple(tokens) for tokens in rounds["alone"]}) > SEEDED // 2
    if GPU:
        assert state["decode_cuda_graph_bs"] and found["graph"] > 0 and found["no graph"] == 0


# -- real widths -------------------------------------------------------------------------------------------------------


def used_gb() -> float | None:
    """Memory of the GPU used by all processes, once it no longer falls: an ended process gives its own back in its time."""
    if not GPU:
        return None
    used = [1e9]
    while len(used) < 3 or used[-1] < used[-3] - 0.1:
        free, whole = torch.cuda.mem_get_info()
        used.append((whole - free) / 1e9)
        time.sleep(1.0)
    return round(used[-1], 2)


def speed(line: dict, responses: int) -> dict[str, float]:
    """Tokens per second of the parts of a step; the rollout's are those of responses."""
    tokens = {"rollout": line["response/length"] * responses, "log_probs": line["tokens"], "train": line["tokens"]}
    return {part: round(count / line[f"time/{part}_s"], 1) for part, count in tokens.items()}


@pytest.mark.parametrize("model", WIDE)
def test_real_widths(model, stage, record_property):
    """Layers of Qwen3-30B-A3B with its 128 experts, and of gpt-oss-20b: speed, memory, turns and pushes by CUDA IPC."""
    folder, name = stage.wide_model(model), f"wide-{model}"
    record_property("layers", json.loads((folder / "config.json").read_text())["num_hidden_layers"])
    record_property("used_before_gb", before := used_gb())
    plan = stage.plan(name, torch.cuda.mem_get_info()[1] / 1e9 if GPU else 100.0)
    run = stage.run(name)
    lines = run.until(2, LIMIT_S, tell(record_property, *SPEED, *MISMATCH, *SCORE))
    record_property("start_s", round(run.seconds - sum(line["time/step_s"] for line in lines if line["step"]), 1))
    record_property("push", pushed(lines))
    record_property("tokens_per_s", speed(lines[-1], WIDE_RESPONSES))
    record_property("decode batches", found := graphs(run.folder / "sglang.log"))
    plan.finish(60)
    said = plan.log.read_text()
    planned = json.loads(said[said.index("{") :])["per_gpu"]
    record_property("planned_gb", {kind: round(size / 1e9, 2) for kind, size in planned.items()})
    record_property("used_after_gb", after := used_gb())
    steps(lines)
    if before is not None and after is not None:
        last = lines[-1]
        assert found["graph"] > 0 and found["no graph"] == 0
        assert last["memory/awake_gb"] - last["memory/asleep_gb"] > 20, "the engine gives its memory back"
        assert after < before + 2 and last["memory/peak_gb"] < planned["total"] / 1e9


def test_a_slice_pushed_by_disk(cuda, stage, record_property):
    stage.wide_model("qwen3")
    lines = stage.run("wide-disk").until(1, LIMIT_S, tell(record_property, *SPEED))
    record_property("push", pushed(lines))
    steps(lines)
