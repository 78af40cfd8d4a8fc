"""A real SLURM on this machine: a controller and some nodes, processes that this module starts and ends.

Needs root and Debian's packages (`tests/cluster/run.sh` installs them). Nodes share the machine and its address.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
GPUS, CPUS, MEMORY_MB = 4, 16, 8000
"""What a node says that it has; its GPUs are plain files. There is also a partition `big` of 64 nodes of 8 GPUs, which can be
asked whether a job would fit (sbatch --test-only), and no more."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "DEADLINE")

CONFIG = """\
ClusterName=tests
SlurmctldHost={host}
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
MpiDefault=none
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=15
KillWait=10
SchedulerParameters=sched_interval=3,bf_interval=3
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobRequeue=1
SuspendTime=-1
ResumeProgram=/bin/true
SuspendProgram=/bin/true
NodeName=big[1-64] NodeHostname=localhost NodeAddr=127.0.0.1 Port=18001-18064 CPUs=64 RealMemory=64000 Gres=gpu:8 State=CLOUD
NodeName=DEFAULT CPUs={cpus} RealMemory={memory} Gres=gpu:{gpus} State=UNKNOWN
{nodes}
PartitionName=big Nodes=big[1-64] MaxTime=10-0 State=UP
PartitionName=batch Nodes={names} Default=YES MaxTime=1:00:00 PriorityTier=5 PreemptMode=REQUEUE GraceTime={grace} State=UP
PartitionName=urgent Nodes={names} MaxTime=1:00:00 PriorityTier=10 PreemptMode=OFF State=UP
"""


def missing() -> list[str]:
    """Programs that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Slurm:
    """A context manager: daemons run within, and jobs of it; at the end all of them are gone.

    Public fields: folder (logs, state), nodes (their names), environment (SLURM_CONF, for programs that ask this cluster).
    """

    def __init__(self, folder: Path, *, nodes: int = 2, grace_s: int = 60) -> None:
        """grace_s: between the signal of a preemption and its end."""
        self.folder = folder
        self.nodes = [f"n{i + 1}" for i in range(nodes)]
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("state", "munge", "gpu"):
            (folder / name).mkdir(parents=True)
        for index in range(GPUS):
            (folder / "gpu" / f"nvidia{index}").touch()
        own = f"NodeName={','.join(self.nodes)} Name=gpu File={folder}/gpu/nvidia[0-{GPUS - 1}]\n"
        (folder / "gres.conf").write_text(own + "NodeName=big[1-64] Name=gpu Count=8\n")
        hosts = [f"NodeName={n} NodeHostname=localhost NodeAddr=127.0.0.1 Port={free_port()}" for n in self.nodes]
        values = {"folder": folder, "host": "localhost(127.0.0.1)", "controller_port": free_port(), "grace": grace_s}
        values["names"] = ",".join(self.nodes)
        text = CONFIG.format(**values, nodes="\n".join(hosts), cpus=CPUS, memory=MEMORY_MB, gpus=GPUS)
        (folder / "slurm.conf").write_text(text)

    def __enter__(self) -> Slurm:
        try:
            self._start_munge()
            self._start("slurmctld", "slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))
            for node in self.nodes:
                self.start_node(node)
            self.wait(lambda: set(self.states().values()) == {"idle"}, "all nodes are idle", 60)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o600)
        folder.chmod(0o755)
        paths = [f"--{name}={folder}/{file}" for name, file in (("socket", "socket"), ("key-file", "key"))]
        paths += [f"--{name}={folder}/{name}" for name in ("pid-file", "seed-file", "log-file")]
        self._start("munged", "munged", "--foreground", "--force", *paths)
        self.wait((folder / "socket").exists, "munged listens", 20)

    def _start(self, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.out", "ab") as out:
            self._processes[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=self.environment, start_new_session=True
            )

    def start_node(self, node: str) -> None:
        """Start a node's daemon."""
        self._start(node, "slurmd", "-D", "-f", str(self.folder / "slurm.conf"), "-N", node)

    def lose_node(self, node: str) -> None:
        """End a node as a loss of power would: its daemon and all processes of its jobs."""
        for pid in self._on_node(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon = self._processes.pop(node)
        daemon.kill()
        daemon.wait(20)
        # What was started meanwhile.
        for pid in self._on_node(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_processes(self, node: str, name: str) -> None:
        """kill -9 of a node's processes of whose command line `name` is a part."""
        for pid in self._on_node(node):
            with contextlib.suppress(OSError):
                if name in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)

    def _on_node(self, node: str) -> list[int]:
        """Processes of jobs on a node: steps' daemons, which hold its spool folder, and who has its name."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    environment = (entry / "environ").read_bytes().split(b"\0")
                    command = (entry / "cmdline").read_bytes()
                    of_cluster = f"SLURM_CONF={self.folder}/slurm.conf".encode() in environment
                    names = f"SLURMD_NODENAME={node}".encode() in environment
                    if (of_cluster and names) or (
                        command.startswith(b"slurmstepd") and self._stepd_node(entry) == node
                    ):
                        found.append(int(entry.name))
        return found

    def _stepd_node(self, entry: Path) -> str:
        for file in (entry / "fd").iterdir():
            with contextlib.suppress(OSError):
                if found := re.search(rf"{re.escape(str(self.folder))}/slurmd-(\w+)\.log", os.readlink(file)):
                    return found[1]
        return ""

    # -- asking -------------------------------------------------------------------------------------------------------

    def run(self, *command: str, timeout_s: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a program of SLURM, or one that asks it, to its end."""
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env=self.environment | environment, check=False
        )

    def ask(self, *command: str) -> str:
        """What a program of SLURM says. Errors: AssertionError with its message."""
        done = self.run(*command)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout.strip()

    def states(self) -> dict[str, str]:
        """State of each node, without its flags."""
        done = self.run("sinfo", "-h", "-N", "-p", "batch", "-o", "%N %t")
        lines = [line.split() for line in done.stdout.splitlines()]
        return {name: state.rstrip("*~#!%$@^-") for name, state in lines}

    def submit(self, script: Path, *arguments: str, options: Sequence[str] = (), **environment: str) -> int:
        """Number of a job."""
        done = self.run("sbatch", "--parsable", *options, str(script), *arguments, **environment)
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split(";")[0])

    def job(self, number: int) -> Mapping[str, str]:
        """SLURM's record of a job: JobState, Restarts, ..."""
        return dict(
            field.split("=", 1)
            for field in self.ask("scontrol", "-o", "show", "job", str(number)).split()
            if "=" in field
        )

    def state(self, number: int) -> str:
        """State of a job."""
        return self.job(number)["JobState"]

    def start_now(self, number: int) -> None:
        """Let a requeued job start, which SLURM holds for two minutes."""
        self.run("scontrol", "update", f"jobid={number}", "StartTime=now")

    def wait(self, true: Callable[[], Any], what: str, timeout_s: float) -> Any:
        """Until something is true. Errors: AssertionError that says what was waited for."""
        deadline = time.monotonic() + timeout_s
        while not (found := true()):
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
            time.sleep(0.2)
        return found

    def wait_end(self, number: int, timeout_s: float) -> str:
        """State in which a job ends; one that is requeued starts at once."""

        hurried = set()

        def ended() -> str:
            job = self.job(number)
            if job["JobState"] == "PENDING" and job["Restarts"] != "0" and job["Restarts"] not in hurried:
                hurried.add(job["Restarts"])
                self.start_now(number)
            return job["JobState"] if job["JobState"] in ENDED else ""

        return self.wait(ended, f"job {number} ends", timeout_s)

    def close(self) -> None:
        """End all jobs and daemons; returns when their processes are gone."""
        if "slurmctld" in self._processes:
            with contextlib.suppress(subprocess.SubprocessError, AssertionError):  # what is left ends with its node
                self.run("scancel", "--quiet", "--full", "--signal=KILL", "--user=root")
                self.wait(lambda: not self.run("squeue", "-h").stdout.strip(), "jobs are gone", 30)
        for node in list(self._processes):
            if node in self.nodes:
                self.lose_node(node)
        for name in ("slurmctld", "munged"):
            if process := self._processes.pop(name, None):
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(10)


@contextlib.contextmanager
def slurm(folder: Path, **settings: Any) -> Iterator[Slurm]:
    """`Slurm` in a folder that is made for it."""
    with Slurm(folder, **settings) as cluster:
        yield cluster
