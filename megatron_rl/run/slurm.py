"""`megatron-rl launch slurm`: write a config as a batch script and submit it. The script runs examples/slurm/common.sh."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.checks.model_folders import overrides_of, with_folders
from megatron_rl.config import Config, job_name
from megatron_rl.errors import UserError
from megatron_rl.run.nodes import checked_nodes, data_paths
from megatron_rl.run.run_lock import make_private

ROOT = Path(__file__).resolve().parents[2]
"""The checkout (source tree) in which jobs run."""
COMMON = "examples/slurm/common.sh"
TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
TIMEOUT_S = 120.0
"""Longest time in seconds to wait for sbatch."""


@dataclass(frozen=True)
class Job:
    """A SLURM job: its resources and its command."""

    name: str
    config: str
    """Config file, as a path that the job can read."""
    model: str
    """Hugging Face folder of the model."""
    nodes: int
    gpus_per_node: int = 8
    """Number of GPUs per node. 0: a cluster without GPUs, with one trainer process per node."""
    train_nodes: int | None = None
    """Number of nodes that train; the others run SGLang servers. None: half of the nodes."""
    server_gpus: int = 1
    time: str = "24:00:00"
    grace_s: int = 600
    """Number of seconds before the time limit at which the trainer gets the signal to save and stop."""
    options: Sequence[str] = ()
    """More options of sbatch."""
    variables: dict[str, str] = field(default_factory=dict)
    """More environment variables for common.sh."""
    command: str = "train"
    """train | sft | reward | dpo; only train has SGLang servers."""
    overrides: Sequence[str] = ()
    """Overrides of config keys."""

    @property
    def trainers(self) -> int:
        """Number of nodes that train."""
        return self.nodes if self.nodes == 1 or self.command != "train" else self.train_nodes or self.nodes // 2

    @property
    def processes(self) -> int:
        """Number of trainer processes."""
        return self.trainers * max(1, self.gpus_per_node)

    def script(self) -> str:
        """Return the batch script."""
        serving = self.nodes - self.trainers
        serve = f", {serving} serve" if serving else " and serve" * (self.command == "train")
        gpus = f" ({self.nodes * self.gpus_per_node} GPUs)" if self.gpus_per_node else ""
        options = {
            "job-name": shlex.quote(job_name(self.name)),
            "nodes": self.nodes,
            **({"gpus-per-node": self.gpus_per_node} if self.gpus_per_node else {}),
            "exclusive": None,
            "time": self.time,
            "signal": f"B:USR1@{self.grace_s}",
            "requeue": None,
            "open-mode": "append",
            "output": "%x-%j.log",
        }
        variables = {"MODEL": self.model, "CONFIG": self.config, "SERVER_GPUS": str(self.server_gpus)}
        if serving:
            variables["TRAIN_NODES"] = str(self.trainers)
        if not self.gpus_per_node:  # common.sh would take the node's GPU count from SLURM
            variables["GPUS_PER_NODE"] = "1"
        variables["GRACE_S"] = str(max(1, self.grace_s - min(60, self.grace_s // 4)))
        if self.command != "train":
            variables["COMMAND"] = self.command
        lines = [
            "#!/usr/bin/env bash",
            f"# {self.name}: {self.trainers} node{'s' if self.trainers > 1 else ''} train{serve}{gpus}.",
            f"# Written by megatron-rl launch slurm; {COMMON} says what happens and which variables it reads.",
            *[f"#SBATCH --{name}" + ("" if value is None else f"={value}") for name, value in options.items()],
            *[f"#SBATCH {option}" for option in self.options],
            "set -euo pipefail",
            "",
            *[f"{name}={shlex.quote(value)}" for name, value in (variables | self.variables).items()],
            f"# shellcheck source={COMMON}",
            f'source "$SLURM_SUBMIT_DIR/{COMMON}" || {{',
            '    echo "submit this from the checkout\'s root" >&2',
            "    exit 1",
            "}",
            " ".join(["run_job", *map(shlex.quote, self.overrides), '"$@"']),
        ]
        return "\n".join(lines) + "\n"


def seconds_of(time: str) -> int:
    """Return the seconds of a duration in one of SLURM's notations.

    The notations are minutes[:seconds], hours:minutes:seconds and days-hours[:minutes[:seconds]]. Errors: UserError.
    """
    if not (found := TIME.fullmatch(time)):
        raise UserError(f"launch: --time {time} has none of SLURM's forms, such as 90, 24:00:00 or 3-00:00:00")
    days, *parts = found.groups()
    given = [int(part) for part in parts if part is not None]
    hours_first = days is not None or len(given) == 3
    hours, minutes, seconds = ([*given, 0, 0] if hours_first else [0, *given, 0])[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def job_of(config: Config, args: argparse.Namespace, overrides: Sequence[str]) -> Job:
    """Return the job for a command line (parsed by `cli.make_parser`).

    Errors: UserError for problems that would otherwise show only on the cluster.
    """
    if seconds_of(args.time) < 2 * args.grace:
        raise UserError(
            f"launch: --time {args.time} leaves less time to train than --grace {args.grace} s to save: increase"
            " --time, or decrease --grace"
        )
    for option in [*filter(None, (args.account, args.partition)), *args.option]:
        if len(option.splitlines()) > 1:
            raise UserError(
                f"launch: option {option!r} contains a line break, which would start a command in the script; remove it"
            )
    nodes = checked_nodes(config, args)
    found = with_folders(config, args.run)
    # The job runs in the checkout, but the config's paths are relative to the current folder.
    overrides = [*overrides, *overrides_of(config, found)]
    for key, path in data_paths(config).items():
        if path and (key == "runs_dir" or Path(path).exists()):
            overrides += [f"--{key}", str(Path(path).resolve())]
    variables = {"CONTAINER": args.container, "MOUNTS": args.mounts}
    named = {"account": args.account, "partition": args.partition}
    return Job(
        name=config.name,
        config=str(Path(args.config).resolve()),
        model=str(Path(found.model.path).resolve()),
        nodes=args.nodes,
        gpus_per_node=args.gpus_per_node,
        train_nodes=args.train_nodes,
        server_gpus=nodes.server_gpus,
        time=args.time,
        grace_s=args.grace,
        options=[*[f"--{name}={value}" for name, value in named.items() if value], *args.option],
        variables={name: value for name, value in variables.items() if value},
        overrides=overrides,
        command=args.run,
    )


def launch_command(config: Config, args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Write a config as a batch script into the run's folder and submit it; with --dry-run, only print the script."""
    job = job_of(config, args, overrides)
    if args.dry_run:
        print(job.script(), end="")
        return 0
    if shutil.which("sbatch") is None:
        raise UserError(
            "launch: sbatch is not installed here: run this on a machine that can submit jobs, or add --dry-run"
        )
    script = config.run_dir.resolve() / "job.sbatch"
    make_private(script.parent)
    script.write_text(job.script())
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"launch: sbatch did not answer within {TIMEOUT_S:g} s: check that the cluster's controller is running"
        ) from None
    if done.returncode:
        raise UserError(f"launch: sbatch: {' '.join(done.stderr.split())} [{script}]")
    number = done.stdout.split(";")[0].strip()
    log = f"{job_name(config.name)}-{number}.log"
    print(f"job {number} from {script}\nfollow it: tail -F {ROOT / log}; its processes' logs: {ROOT / 'logs'}")
    return 0
