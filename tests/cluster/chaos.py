"""One run of a tiny model through random kills, and whether anything was lost.

    python -m tests.cluster.chaos --kills 100 --json docs/results/chaos.json

Trainer ranks and servers are killed with kill -9, in rollouts, updates, saves, pushes, while a server sleeps, and whenever. The
run goes on with servers of its own that share its device, or with two of others, in turn. At its end every sample that was
there at a kill was trained on, each step was trained once (a second run on the recorded samples ends with the same bits), no
metric is other than a number, the servers have the trainer's weights, and no process, port or shared memory is left.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import torch

from megatron_rl.data.trajectory import Trajectory, file_of, load_trajectories
from megatron_rl.metrics.logger import METRICS_FILE, read_json_lines
from megatron_rl.rollout.sample_journal import _records
from megatron_rl.servers import orphans
from tests.e2e.test_fleet import Servers
from tests.e2e.test_recovery import final_tensors
from tests.preloaded import TRAINER
from tests.program import Program
from tools.make_tiny_model import Sizes, make_tiny_model

LIMIT_S = 300
PROMPTS, SAMPLES, RANKS = 4, 4, 2
MARK = "MEGATRON_RL_CHAOS"
"""Environment variable of all processes that the trainer or a server starts."""
SLEEPS = "/release_memory_occupation"
PUSHES = (
    "/begin_weight_update",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
    "/end_weight_update",
)
OPTIONS = {
    "external": [],
    "colocated": ["--rollout.colocate", "true", "--rollout.address_folder", "null", "--sync.transport", "tensor"],
}
"""Of each way to have servers."""


def config_of(folder: Path, model: Path) -> dict:
    return {
        "name": "chaos",
        "steps": 100_000,
        "runs_dir": str(folder / "runs"),
        "model": {"path": str(model)},
        "data": {"task": "number_sorting"},
        "batch": {
            "prompts_per_step": PROMPTS,
            "samples_per_prompt": SAMPLES,
            "updates_per_step": 1,
            "tokens_per_micro_batch": 256,
        },
        "parallel": {"tensor": RANKS, "timeout_s": 120},
        "algorithm": {"entropy_coefficient": 0.01},  # a random model earns nothing: its weights move by this alone
        "optimizer": {"lr": 1e-4},
        "precision": {"train": "fp32", "rollout": "fp32"},
        "rollout": {
            "address_folder": str(folder / "addresses"),
            "health_check_interval_s": 1,
            "max_new_tokens": 100,
            "context_length": 140,
            "concurrency": 4,
            "record": True,
            "server": {
                "threads": 1,
                "max_total_tokens": 2048,
                "start_timeout_s": LIMIT_S,
                "extra_args": ["--log-level-http", "info"],
            },
        },
        "sync": {"timeout_s": 60},
        "checkpoint": {"every": 1, "keep": 2},
        "eval": {"prompts": 0},
        "logging": {"trackers": [], "progress": False},
    }


class Chaos:
    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.config, self.run, self.log = folder / "config.yaml", folder / "runs" / "chaos", folder / "log"
        model = make_tiny_model("qwen3_moe", folder / "model", sizes=Sizes(layers=2), tokenizer="numbers")
        self.config.write_text(json.dumps(config_of(folder, model)))
        self.servers = Servers(self.config, folder)
        self.kills: collections.Counter[str] = collections.Counter()
        self.had: dict[tuple[int, int], Trajectory] = {}
        """Samples that were there when something was killed, by step and request."""
        self.starts = 0
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.ports: set[int] = set()
        """At which its processes listened when something was killed."""
        self.shared: set[Path] = set()
        """Shared memory that servers had then."""
        self._began = 0.0
        self._lengths: dict[Path, int] = {}
        """Of the servers' logs when the trainer was last started."""
        self.ends_s: list[float] = []
        """Seconds in which a rank has ended by itself after another one was killed."""

    # --- what is seen -----------------------------------------------------------------------------------------------

    def rows(self) -> list[dict]:
        file = self.run / METRICS_FILE
        return [row for row in read_json_lines(file) if row["step"]] if file.exists() else []

    def step(self) -> int:
        rows = self.rows()
        return rows[-1]["step"] if rows else 0

    def pending(self) -> Iterator[tuple[int, int, Trajectory]]:
        for file in sorted((self.run / "pending").glob("step_*")):
            step = int(file.name[len("step_") :].partition(".")[0])
            for samples, _ in _records(file):
                for request, [sample] in samples.items():
                    yield step, request, sample

    def finished(self) -> int:
        """Samples of the step at hand."""
        return sum(step == self.step() for step, *_ in self.pending())

    def log_of(self, name: str) -> Path:
        return self.run / "sglang.log" if name == "colocated" else self.folder / f"{name}.log"

    def asked(self, name: str) -> str:
        """What this trainer has asked a server last, of what changes its state."""
        log = self.log_of(name)
        try:
            with open(log, "rb") as file:
                file.seek(max(self._lengths.get(log, 0), os.path.getsize(log) - 4000))
                lines = file.read().decode(errors="replace")
        except OSError:
            return ""
        found = [path for path in re.findall(r'"POST (/\S+) HTTP/1.1"', lines) if path != "/weights_checker"]
        return found[-1] if found else ""

    def places(self, names: list[str]) -> dict[str, Callable[[], bool]]:
        """Whether the run is there now."""
        pending, checkpoints = self.run / "pending", self.run / "checkpoints"

        def now(files: Iterable[Path]) -> bool:
            """Whether this trainer has written one, and not an earlier one."""
            return any(modified(file) > self._began for file in files)

        def in_rollout() -> bool:
            return now(pending.glob(f"step_{self.step():06d}.*")) and 0 < self.finished() < PROMPTS * SAMPLES

        found: dict[str, Callable[[], bool]] = {
            "rollout": in_rollout,
            "update": lambda: now([file_of(self.run / "rollouts", self.step(), 0)]),
            "save": lambda: now(checkpoints.glob("*.tmp")),
            "push": lambda: any(self.asked(name) in PUSHES for name in names),
        }
        if names == ["colocated"]:
            found["sleep"] = lambda: self.asked("colocated") == SLEEPS
        return found

    # --- what is done -----------------------------------------------------------------------------------------------

    def live(self, mode: str, left: int) -> None:
        """The run, from its start to a kill of a rank, with up to two kills of servers before; at most `left` in all."""
        names = ["first", "second"] if mode == "external" else ["colocated"]
        program = self.begin(mode)
        try:
            for _ in range(min(self.random.randrange(3), left - 1)):
                self.kill_a_server(program, names)
            self.kill_a_rank(program, names)
        finally:
            program.kill()
        self.wait(lambda: not self.left_of_trainer(), "the end of what the trainer has started", None)

    def begin(self, mode: str, *options: str) -> Program:
        self.mend()
        self.starts += 1
        self._began = time.time()
        logs = (self.log_of(name) for name in ("first", "second", "colocated"))
        self._lengths = {log: log.stat().st_size for log in logs if log.exists()}
        return Program("train", str(self.config), *OPTIONS[mode], *options, log=self.log, ranks=RANKS)

    def kill_a_server(self, program: Program, names: list[str]) -> None:
        self.go_to_step(program, self.step() + 1)  # the server is there
        self.look_around()
        name = self.random.choice(names)
        place = self.go_somewhere(program, names)
        if name == "colocated":
            servers = [p for p in psutil.process_iter() if self.is_ours(p) and p.name().startswith("sglang::schedul")]
            if not servers:  # it is being started again
                return
            servers[0].kill()
        else:
            self.servers.kill(name)
        self.count("server", place)
        self.go_to_step(program, self.step() + 1)

    def kill_a_rank(self, program: Program, names: list[str]) -> None:
        place = self.go_somewhere(program, names)
        victim = self.random.randrange(RANKS)
        os.kill(program._processes[victim].pid, signal.SIGKILL)
        killed = time.monotonic()
        self.count(f"rank {victim}", place)
        self.wait(lambda: all(p.exitcode is not None for p in program._processes), "the end of the other rank", None)
        self.ends_s.append(time.monotonic() - killed)

    def go_somewhere(self, program: Program, names: list[str]) -> str:
        """Wait for a random place, or for a random time."""
        places = self.places(names)
        place = self.random.choice([*places, "any"])
        if place == "any":
            self.wait_s(self.random.uniform(0, 12), program)
        else:
            self.wait(places[place], f"the {place} of a step", program, pause_s=0.01)
        return place

    def go_to_step(self, program: Program, step: int) -> None:
        self.wait(lambda: self.step() >= step, f"step {step}", program)

    def wait(self, true: Callable[[], bool], what: str, program: Program | None, pause_s: float = 0.05) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not true():
            self.mend()
            assert program is None or program.poll() is None, f"the run ended by itself before {what}; see {self.log}"
            assert time.monotonic() < deadline, f"not within {LIMIT_S} s: {what}; see {self.log}"
            time.sleep(pause_s)

    def wait_s(self, seconds: float, program: Program) -> None:
        end = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() > end, "a random time", program)

    def mend(self) -> None:
        """Start servers that are dead, as SLURM would."""
        for name in ("first", "second"):
            if name not in self.servers._processes:
                self.servers.start(name)

    def look_around(self) -> None:
        """Before a kill: what must not be there at the end."""
        ours = {process.pid for process in psutil.process_iter() if self.is_ours(process)}
        self.ports |= {
            c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid in ours
        }
        self.shared |= orphans.mapped(ours)

    def count(self, what: str, place: str) -> None:
        self.kills[f"{what} in {place}"] += 1
        for step, request, sample in self.pending():
            self.had[step, request] = sample
        total = sum(self.kills.values())
        print(f"{time.strftime('%H:%M:%S')} kill {total}: {what} in {place}, step {self.step() + 1}", flush=True)

    # --- what is left -----------------------------------------------------------------------------------------------

    def is_ours(self, process: psutil.Process) -> bool:
        """Started by the trainer, or by a server."""
        try:
            own = {os.getpid(), TRAINER.pid}
            ended = process.pid in own or process.status() == psutil.STATUS_ZOMBIE
            return not ended and process.environ().get(MARK) == str(self.folder)
        except psutil.Error:
            return False

    def left_of_trainer(self) -> list[psutil.Process]:
        sessions = {process.pid for process in self.servers._processes.values()}
        return [p for p in psutil.process_iter() if self.is_ours(p) and session_of(p) not in sessions]


def modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def session_of(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return 0


def same_trained(chaos: Chaos, steps: int) -> int:
    """How many samples were there at a kill. Errors: AssertionError where one was not trained on as it was, or one lacks."""
    for step in range(steps):
        trained = load_trajectories(file_of(chaos.run / "rollouts", step, 0))
        assert len(trained) == PROMPTS * SAMPLES, f"step {step + 1} has {len(trained)} samples"
        assert [t.group_id for t in trained] == [i // SAMPLES for i in range(PROMPTS * SAMPLES)]
        for (of_step, request), sample in chaos.had.items():
            if of_step == step:
                ours = trained[request]
                assert np.array_equal(ours.tokens, sample.tokens), f"step {step + 1}: {request} was sampled again"
                assert np.array_equal(ours["rollout_log_probs"], sample["rollout_log_probs"])
    assert all(step < steps for step, _ in chaos.had)
    return len(chaos.had)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=uuid.uuid4().int % 2**31)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument(
        "--folder", type=Path, help="kept; by default a temporary one, which is kept where something fails"
    )
    args = parser.parse_args()
    folder = Path(args.folder or tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(exist_ok=True)
    os.environ |= {MARK: str(folder), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    print(f"seed {args.seed}, folder {folder}", flush=True)
    start, chaos = time.monotonic(), Chaos(folder, args.seed)
    os.environ["TMPDIR"] = tempfile.tempdir = str(chaos.temporary)
    try:
        while (left := args.kills - sum(chaos.kills.values())) > 0:
            chaos.live(chaos.random.choice(["external", "external", "colocated"]), left)
        steps = chaos.step() + 3
        program = chaos.begin("external", "--steps", str(steps), "--rollout.server.count", "2")  # it waits for both
        try:
            assert program.wait(LIMIT_S) == 0, f"the run did not come to its end; see {chaos.log}"
        finally:
            program.kill()
        rows = chaos.rows()
        assert [row["step"] for row in rows] == [*range(1, steps + 1)], "each step once"
        bad = [
            (row["step"], key)
            for row in rows
            for key, v in row.items()
            if isinstance(v, float) and not math.isfinite(v)
        ]
        assert not bad, f"not finite: {bad}"
        assert all(row["rollout/stale"] == 0 for row in rows)
        served = []
        for name in ("first", "second"):
            address = chaos.servers.address(name)
            asked = {"action": "checksum", "selector": "target"}
            answer = httpx.post(
                f"{address}/weights_checker", json=asked, headers=chaos.servers.headers, timeout=60
            ).json()
            served.append([rank["checksums"] for rank in answer["ranks"]])
        assert served[0] == served[1], "servers with other weights"
        kept = same_trained(chaos, steps)
        assert not list((chaos.run / "pending").iterdir()) and not list((chaos.run / "checkpoints").glob("*.tmp"))
    finally:
        chaos.servers.end()
    deadline = time.monotonic() + 60
    while (found := left_behind(chaos)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not found, f"left behind: {found}"
    seconds = time.monotonic() - start

    again = Program(
        *("train", str(chaos.config), "--name", "again", "--steps", str(steps)),
        *("--rollout.load", str(chaos.run / "rollouts"), "--rollout.address_folder", "null"),
        *("--checkpoint.every", "0"),
        log=folder / "again.log",
        ranks=RANKS,
    )
    try:
        assert again.wait(4 * LIMIT_S) == 0, f"see {folder / 'again.log'}"
    finally:
        again.kill()
    ours, theirs = (final_tensors(folder, name, steps) for name in ("chaos", "again"))
    assert ours.keys() == theirs.keys()
    other = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not other, f"other than without kills: {other[:3]} and {len(other)} in all"

    figures = {
        "seed": args.seed,
        "kills": sum(chaos.kills.values()),
        "by_place": dict(sorted(chaos.kills.items())),
        "starts_of_the_trainer": chaos.starts,
        "steps": steps,
        "samples": steps * PROMPTS * SAMPLES,
        "samples_there_at_a_kill_and_trained_as_they_were": kept,
        "tensors_equal_to_a_run_without_kills": len(ours),
        "mismatch_kl_max": max(row["mismatch/kl"] for row in rows),
        "seconds_until_the_other_rank_ended_max": round(max(chaos.ends_s), 1),
        "processes_ports_and_shared_memory_left": len(found),
        "seconds": round(seconds),
    }
    print(json.dumps(figures, indent=2))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    if args.folder is None:
        shutil.rmtree(folder)
    return 0


def left_behind(chaos: Chaos) -> list[str]:
    """Processes, ports, files and shared memory that were the run's and are still there."""
    found = [f"process {p.pid} {p.name()}" for p in psutil.process_iter() if chaos.is_ours(p)]
    listening = {
        c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid is None
    }
    found += [f"port {port}" for port in chaos.ports & listening]
    found += [f"shared memory {file}" for file in chaos.shared if file.exists()]
    return found + [f"folder {path}" for path in chaos.temporary.glob(f"{orphans.PREFIX}*")]


if __name__ == "__main__":
    sys.exit(main())
