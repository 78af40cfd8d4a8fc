"""Container for model-written Python: bubblewrap's namespaces, resource limits, a seccomp filter, and a wall-clock limit.

A program sees /usr (read-only), an empty /tmp of 64 MB, its own processes and no network. It runs as the user `nobody` even if
the trainer is root, because the limit on processes does not apply to root. Memory has two limits: the kernel limits each
process, and this module checks the total of all processes ten times a second. If the machine cannot contain programs, none is
run.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_rl.sandbox import cgroup

Reason = Literal["ok", "error", "timeout", "memory", "output", "refused"]

PYTHON = "/usr/bin/python3"
"""Python interpreter in the container: the system's, because others may be in folders that the user `nobody` cannot read."""
NOBODY = 65534
PROCESSES = 16
TMP_BYTES = 64 * 2**20
KERNEL_BYTES = 64 * 2**20
"""Bytes of kernel memory that a container may use for pipes, sockets and names of files. Only a control group counts them."""
MOST_FILES = 20_000
OWN_PROCESSES = 4
"""Number of bubblewrap's own processes in addition to the program's."""
LOOK_S = 0.1
"""Seconds between two checks of the memory of all processes."""
END_S = 5.0
"""Longest time in seconds to wait for a killed container to end."""
REMEDY = "install it (apt-get install bubblewrap), or name a remote tool server in agent.mcp_servers"

FORBIDDEN = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd"),  # other processes
    *(
        "mount",
        "umount2",
        "pivot_root",
        "chroot",
        "fsopen",
        "fsmount",
        "fspick",
        "move_mount",
        "open_tree",
        "mount_setattr",
    ),
    *("unshare", "setns", "open_by_handle_at", "name_to_handle_at"),  # ways out of the namespaces
    *(
        "bpf",
        "perf_event_open",
        "userfaultfd",
        "io_uring_setup",
        "keyctl",
        "add_key",
        "request_key",
    ),  # complex kernel interfaces
    *(
        "init_module",
        "finit_module",
        "delete_module",
        "kexec_load",
        "reboot",
        "swapon",
        "swapoff",
        "acct",
        "quotactl",
        "syslog",
    ),
    *("shmget", "msgget", "semget", "memfd_create", "memfd_secret", "mq_open"),  # memory that no limit counts
)
_NEW_USER_NAMESPACE = 0x10000000


@dataclass(frozen=True)
class Outcome:
    """Result of running a program."""

    stdout: str
    stderr: str
    exit_code: int | None
    """Exit status; None if the program was killed."""
    reason: Reason
    """ok, error (exit status not 0), timeout, memory, output (too much), or refused (the program was not run, because the
    machine could not contain it)."""


@functools.cache
def _filter() -> bytes:
    """Return the seccomp filter in the kernel's format. Errors: OSError, or ImportError if libseccomp is missing."""
    import pyseccomp

    filtered = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    refuse = pyseccomp.ERRNO(errno.EPERM)
    for name in FORBIDDEN:
        with contextlib.suppress(ValueError, OSError):  # a call that this architecture lacks
            filtered.add_rule(refuse, name)
    flags, masked = pyseccomp.Arg, pyseccomp.MASKED_EQ
    filtered.add_rule(refuse, "clone", flags(0, masked, _NEW_USER_NAMESPACE, _NEW_USER_NAMESPACE))
    filtered.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")  # its flags are in memory; libc falls back to clone
    filtered.add_rule(refuse, "socket", flags(0, pyseccomp.NE, 1))  # all but AF_UNIX
    with tempfile.TemporaryFile() as file:
        filtered.export_bpf(file)
        file.seek(0)
        return file.read()


def _file(data: bytes) -> int:
    descriptor = os.memfd_create("sandbox")
    os.write(descriptor, data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


@functools.cache
def _disable_userns(bwrap: str) -> bool:
    """Return whether bubblewrap has the option --disable-userns. Without it, only the filter forbids new user namespaces."""
    return "--disable-userns" in subprocess.run([bwrap, "--help"], capture_output=True, text=True, timeout=20).stdout


def _command(bwrap: str, seccomp: int, script: int, status: int, *, cpu_s: int, memory_mb: int) -> list[str]:
    # The limits are set before bubblewrap, so that they hold for all processes in the container, and its first process is the
    # program. The limit on processes counts the user's processes in one namespace, so it is set within the container.
    limits = [f"--cpu={cpu_s}:{cpu_s + 1}", f"--as={memory_mb * 2**20}", f"--fsize={TMP_BYTES}", "--nofile=64"]
    command = ["prlimit", *limits, "--core=0", "--memlock=0", "--msgqueue=0", "--"]
    command += [bwrap, "--unshare-all", "--unshare-user", "--as-pid-1"]
    command += ["--disable-userns"] if _disable_userns(bwrap) else []
    command += ["--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    command += ["--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox", "--ro-bind", "/usr", "/usr"]
    for name in ("lib", "lib64", "bin", "sbin"):
        link = Path("/") / name
        if link.is_symlink():
            command += ["--symlink", f"usr/{name}", f"/{name}"]
        elif link.is_dir():
            command += ["--ro-bind", str(link), str(link)]
    command += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--proc", "/proc", "--dev", "/dev"]
    command += ["--size", str(TMP_BYTES), "--tmpfs", "/dev/shm", "--size", str(TMP_BYTES), "--tmpfs", "/tmp"]
    command += ["--ro-bind-data", str(script), "/main.py", "--remount-ro", "/dev", "--remount-ro", "/"]
    command += ["--chdir", "/tmp", "--setenv", "HOME", "/tmp", "--setenv", "PATH", "/usr/bin:/bin"]
    command += ["--setenv", "LANG", "C.UTF-8", "--seccomp", str(seccomp), "--json-status-fd", str(status), "--"]
    return [*command, "prlimit", f"--nproc={PROCESSES}", "--", PYTHON, "-I", "-S", "-B", "-u", "/main.py"]


class Container:
    """A Python script that runs in a container. `stdin` and `stdout` are its pipes; `end` kills all its processes.

    The container also dies with the thread that started it (PR_SET_PDEATHSIG), so that it does not outlive a killed run.
    """

    def __init__(
        self,
        script: bytes,
        *,
        cpu_s: int,
        memory_mb: int,
        stdin: int = subprocess.PIPE,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
    ) -> None:
        """cpu_s: CPU seconds of each process. stdin, stdout, stderr: descriptors, or constants of `subprocess`.

        Errors: OSError or ImportError if the container could not be started. `started` tells whether the script has started
        inside.
        """
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise FileNotFoundError(f"bubblewrap (bwrap) is not installed: {REMEDY}")
        filtered = _filter()
        self._status: int | None
        self._status, status = os.pipe()
        os.set_blocking(self._status, False)
        self._started = False
        files = [_file(filtered), _file(script)]
        # setpriv is a separate program, because Popen(user=...) forks and copies the page tables of the trainer's memory.
        command = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"] if os.geteuid() == 0 else []
        command += _command(bwrap, files[0], files[1], status, cpu_s=cpu_s, memory_mb=memory_mb)
        self._memory = memory_mb * 2**20
        self._group = cgroup.make(self._memory + 2 * TMP_BYTES + KERNEL_BYTES, PROCESSES + OWN_PROCESSES)
        if self._group:
            command = ["/bin/sh", "-c", f'{self._group.join} && exec "$@"', "sandbox", *command]
        try:
            self.process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(*files, status),
                env={"PATH": "/usr/bin:/bin"},
                cwd="/",
                start_new_session=True,
                bufsize=0,
            )
        except BaseException:
            os.close(self._status)
            if self._group:
                self._group.remove()
            raise
        finally:
            for descriptor in (*files, status):
                os.close(descriptor)

    @property
    def started(self) -> bool:
        """True if the script was started.

        Use this only after the container has ended, because bubblewrap reports no status if it did not start the script.
        """
        if self._status is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_S)
            with contextlib.suppress(BlockingIOError):
                self._started = b"exit-code" in os.read(self._status, 4096)
            os.close(self._status)
            self._status = None
        return self._started

    def processes(self) -> list[int]:
        """Return the process ids of the container. The first is bubblewrap's outer process."""
        found, frontier = [], [self.process.pid]
        while frontier:
            pid = frontier.pop()
            with contextlib.suppress(OSError, ValueError):
                children = [(task / "children").read_text().split() for task in Path(f"/proc/{pid}/task").iterdir()]
                found.append(pid)
                frontier += [int(child) for of_task in children for child in of_task]
        return found

    def memory(self) -> int:
        """Return the resident memory of all processes of the container in bytes."""
        found = 0
        for pid in self.processes():
            with contextlib.suppress(OSError, ValueError, IndexError):
                found += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return found

    def files(self) -> int:
        """Return the number of files in the container's in-memory folders; each file takes 1 KiB of kernel memory."""
        found = 0
        for pid in self.processes()[1:2]:
            for folder in ("tmp", "dev/shm"):
                with contextlib.suppress(OSError):
                    room = os.statvfs(f"/proc/{pid}/root/{folder}")
                    if (
                        room.f_blocks * room.f_frsize == TMP_BYTES
                    ):  # during the start of the container, the folder is the machine's
                        found += room.f_files - room.f_ffree
        return found

    def is_over(self) -> bool:
        """Return whether the container exceeds its memory limit or its limit on files."""
        return self.memory() > self._memory or self.files() > MOST_FILES

    def freeze(self) -> None:
        """Stop all processes in the container until `thaw`, so that they cannot allocate, compute or start other processes."""
        stopped: set[int] = set()
        while new := {*self.processes()[1:]} - stopped:
            for pid in new:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGSTOP)
            stopped |= new

    def thaw(self) -> None:
        """Let the processes continue."""
        for pid in self.processes()[1:]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the container with all its processes."""
        if self.process.returncode is not None:  # its id may belong to another process
            return
        # The container dies with bubblewrap's outer process, but not at the very beginning: the container's first process
        # already has its own session, and has not yet asked to die with its parent. So it is also killed by its own id. A
        # stopped process neither starts nor reaps processes, so the list of processes is complete and the ids are valid.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGSTOP)
            for pid in self.processes()[1:]:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the container and close its pipes, which may have no reader."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()
        if self._status is not None:
            os.close(self._status)
            self._status, self._started = None, False
        if self._group:
            self._group.remove()

    def was_refused(self, wait_s: float = END_S) -> bool:
        """Return whether the container ended within `wait_s` seconds without starting the script, but not because of memory."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(wait_s)
        return self.process.returncode is not None and not self.started and not self.was_out_of_memory()

    def was_out_of_memory(self) -> bool:
        """Return whether the kernel has killed a process of the container because of its memory."""
        return self._group is not None and self._group.out_of_memory()


def watch(
    container: Container, stdin: bytes, *, timeout_s: float, output_bytes: int, until: bytes = b""
) -> tuple[list[bytearray], Reason]:
    """Write `stdin` to a container and read its output until it closes the output, has written `until`, or breaks a limit.

    Returns the output (stdout, and stderr if stderr is a separate pipe), and the reason why reading ended.
    """
    process, deadline = container.process, time.monotonic() + timeout_s
    assert process.stdin and process.stdout  # they are pipes
    pipes = [pipe for pipe in (process.stdout, process.stderr) if pipe]
    outputs = [bytearray() for _ in pipes]
    waiting = memoryview(stdin)
    with selectors.DefaultSelector() as ready:
        for pipe, output in zip(pipes, outputs, strict=True):
            os.set_blocking(pipe.fileno(), False)
            ready.register(pipe, selectors.EVENT_READ, output)
        if not process.stdin.closed:
            os.set_blocking(process.stdin.fileno(), False)
            ready.register(process.stdin, selectors.EVENT_WRITE)
        looked, reading = time.monotonic(), len(pipes)
        while reading:
            now = time.monotonic()
            if now >= deadline:
                return outputs, "timeout"
            if now - looked >= LOOK_S:
                looked = now
                if container.is_over():
                    return outputs, "memory"
            for key, _ in ready.select(min(LOOK_S, deadline - now)):
                output: bytearray | None = key.data
                try:
                    if output is None:
                        waiting = waiting[os.write(key.fd, waiting[:65536]) :] if waiting else waiting
                    else:
                        read = os.read(key.fd, 65536)
                except BlockingIOError:
                    continue
                except OSError:  # the program no longer reads
                    waiting = memoryview(b"")
                if output is None:
                    if not waiting:
                        ready.unregister(key.fileobj)
                        if not until:
                            process.stdin.close()
                    continue
                output += read
                if not read:
                    ready.unregister(key.fileobj)
                    reading -= 1
                if until and output.endswith(until):
                    return outputs, "ok"
                if len(output) > output_bytes + len(until):
                    return outputs, "output"
    return outputs, "ok"


def last_words(container: Container, *, beside: Sequence[Container], timeout_s: float) -> str:
    """Return the text that a container writes to its standard error before closing it, at most 4 KiB.

    The text is '' if the container, or one of the containers `beside`, breaks a limit. Errors: OSError if the script was not
    started in the container.
    """
    stream, deadline, output = container.process.stderr, time.monotonic() + timeout_s, b""
    assert stream  # it is a pipe
    os.set_blocking(stream.fileno(), False)
    with selectors.DefaultSelector() as ready:
        ready.register(stream, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0 and len(output) < 4096:
            if any(one.is_over() for one in (container, *beside)):
                return ""
            if not ready.select(min(LOOK_S, left)):
                continue
            if not (read := os.read(stream.fileno(), 4096)):
                if container.was_refused():
                    raise OSError(f"bubblewrap contains nothing here: {output.decode(errors='replace')[:300]}")
                return output.decode(errors="replace")
            output += read
    return ""


def run_python(
    code: str, *, stdin: str = "", timeout_s: float = 10.0, memory_mb: int = 512, output_bytes: int = 65536
) -> Outcome:
    """Run a program in a container, with limits of wall-clock time, memory (of all processes) and output bytes (per stream).

    This function raises no exception, whatever the program does. If this machine cannot contain the program, the outcome's
    `reason` is "refused".
    """
    if "\0" in code:  # Python would ignore the code after it
        return Outcome("", "SyntaxError: source code cannot contain null bytes\n", 1, "error")
    try:
        container = Container(_encode(code), cpu_s=int(timeout_s) + 1, memory_mb=memory_mb)
    except (OSError, ImportError) as error:
        return Outcome("", str(error), None, "refused")
    try:
        outputs, reason = watch(container, _encode(stdin), timeout_s=timeout_s, output_bytes=output_bytes)
        if reason == "ok":
            try:
                container.process.wait(max(0.1, timeout_s))
            except subprocess.TimeoutExpired:  # it closed its output but still runs
                reason = "timeout"
        stdout, stderr = (bytes(output[:output_bytes]).decode(errors="replace") for output in outputs)
        if reason == "ok" and not container.started:
            return Outcome("", f"bubblewrap contains nothing here: {' '.join(stderr.split())[:300]}", None, "refused")
        if reason == "ok" and container.was_out_of_memory():
            reason = "memory"
    finally:
        container.end()
    if reason != "ok":
        return Outcome(stdout, stderr, None, reason)
    status = container.process.returncode
    if status == 0:
        return Outcome(stdout, stderr, 0, "ok")
    last = stderr.rstrip().rpartition("\n")[2]
    if status == 128 + signal.SIGXCPU:
        return Outcome(stdout, stderr, None, "timeout")
    return Outcome(stdout, stderr, status, "memory" if last.startswith("MemoryError") else "error")


def _encode(text: str) -> bytes:
    return text.encode(errors="replace")


def problem() -> str:
    """Return the reason why this machine cannot contain programs, with the remedy; '' if it can."""
    probe = "import os, socket\nprint(os.path.exists('/etc/passwd'), os.getuid())\nsocket.socket()"
    found = run_python(probe, timeout_s=30.0)
    if found.reason == "refused":
        hint = "" if REMEDY in found.stderr else f"; {REMEDY}, or allow user namespaces"
        return f"programs cannot be contained here ({found.stderr}){hint}"
    if found.stdout.split() != ["False", str(NOBODY)] or "PermissionError" not in found.stderr:
        return f"the container leaks: the probe said {found.stdout!r} {found.stderr[-200:]!r}; {REMEDY}"
    return ""
