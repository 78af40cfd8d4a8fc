# ruff: noqa: E501 (programs of one line)
"""Hostile programs are contained, honest ones run, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_rl.sandbox import bubblewrap
from megatron_rl.sandbox.bubblewrap import run_python
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(bool(bubblewrap.problem()), reason=bubblewrap.problem() or "contained")

LIMITS = {"timeout_s": 1.0, "memory_mb": 256, "output_bytes": 4096}
PATIENT = {**LIMITS, "timeout_s": 40.0}
"""Of what ends by itself, on a machine however busy."""
TRY = "def attempt(work):\n    try:\n        print('DONE', work())\n    except BaseException as e:\n        print('REFUSED', type(e).__name__, e)\n"
SYSCALL = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\ndef call(*a):\n    r = libc.syscall(*a)\n    print('REFUSED' if r == -1 else 'DONE', r, ctypes.get_errno())\n"

REFUSED = {
    "network": "import socket\nattempt(lambda: socket.create_connection(('1.1.1.1', 80), 1))",
    "a raw socket": "import socket\nattempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW))",
    "a netlink socket": "import socket\nattempt(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))",
    "host names": "import socket\nattempt(lambda: socket.getaddrinfo('example.org', 80))",
    "/etc/passwd": "attempt(lambda: open('/etc/passwd').read())",
    "/etc/shadow": "attempt(lambda: open('/etc/shadow').read())",
    "the home of root": "import os\nattempt(lambda: os.listdir('/root'))",
    "a write to /usr": "attempt(lambda: open('/usr/evil', 'w').write('x'))",
    "a write to /": "attempt(lambda: open('/evil', 'w').write('x'))",
    "a write to /dev": "attempt(lambda: open('/dev/evil', 'w').write('x'))",
    "a huge file": "attempt(lambda: open('/tmp/a', 'wb').write(b'x' * 2**27))",
    "many large files": "attempt(lambda: [open(f'/tmp/{i}', 'wb').write(b'x' * 2**25) for i in range(9)])",
    "many large files in shared memory": "attempt(lambda: [open(f'/dev/shm/{i}', 'wb').write(b'x' * 2**25) for i in range(9)])",
    "too many open files": "attempt(lambda: [open('/dev/null') for _ in range(1000)])",
    "setuid": "import os\nattempt(lambda: os.setuid(0))",
    "a link out": "import os\nos.symlink('/etc/passwd', '/tmp/link')\nattempt(lambda: open('/tmp/link').read())",
    "a link through its parent's root": "attempt(lambda: open('/proc/1/root/etc/passwd').read())",
    "the host's processes": "import os\nattempt(lambda: [1 / 0 for p in os.listdir('/proc') if p.isdigit() and int(p) > 400] or 1 / 0)",
    "the kernel's settings": "attempt(lambda: open('/proc/sys/kernel/hostname', 'w').write('evil'))",
    "the kernel's memory": "attempt(lambda: open('/proc/kcore', 'rb').read(10)[9])",
    "sysrq": "attempt(lambda: open('/proc/sysrq-trigger', 'w').write('b'))",
    "a device": "import os, stat\nattempt(lambda: os.mknod('/tmp/disk', stat.S_IFBLK | 0o600, os.makedev(8, 0)))",
    "a new root": "import os\nattempt(lambda: os.chroot('/tmp'))",
    "a higher priority": "import os\nattempt(lambda: os.nice(-10))",
    "a larger limit": "import resource\nattempt(lambda: resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40)))",
    "shared memory of System V": SYSCALL + "call(29, 0, 2**28, 0o1600)",
    "a mount": SYSCALL + "call(165, b'none', b'/tmp', b'tmpfs', 0, None)",
    "ptrace": SYSCALL + "call(101, 16, 1, 0, 0)",
    "another namespace": SYSCALL + "call(272, 0x10000000)",
    "another namespace by clone": SYSCALL + "call(56, 0x10000000 | 17, 0, 0, 0, 0)",
    "another namespace by clone3": SYSCALL + "call(435, 0, 0)",
    "memory without a file": SYSCALL + "call(319, b'x', 0)",
    "memory that the kernel itself does not see": SYSCALL + "call(447, 0)",
    "another process's memory": SYSCALL + "call(310, 1, 0, 0, 0, 0, 0)",
    "the kernel's keys": SYSCALL + "call(250, 0, 0, 0, 0, 0)",
    "bpf": SYSCALL + "call(321, 0, 0, 0)",
    "io_uring": SYSCALL + "call(425, 1, 0)",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    found = run_python(TRY + REFUSED[name], **PATIENT)
    assert found.reason == "ok" and found.stdout.startswith("REFUSED") and "DONE" not in found.stdout, found


FORKS = "import os, time\nfor _ in range(1000):\n    try:\n        if os.fork() == 0:\n            {}\n    except OSError:\n        pass\n"
STOPPED = {
    "an endless loop": ("while True: pass", "timeout"),
    "sleep": ("import time; time.sleep(600)", "timeout"),
    "ignored signals": (
        "import signal\nfor n in (1, 2, 15):\n    signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "timeout",
    ),
    "closed output": ("import os, time\nos.close(1); os.close(2); time.sleep(600)", "timeout"),
    "a fork bomb": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        "timeout",
    ),
    "files without end": ("i = 0\nwhile True:\n    i += 1\n    open(f'/tmp/{i}', 'w').close()", "memory"),
    "folders without end": ("import os\ni = 0\nwhile True:\n    i += 1\n    os.mkdir(f'/dev/shm/{i}')", "memory"),
    "threads without end": (
        "import threading, time\nwhile True:\n    try:\n        threading.Thread(target=time.sleep, args=(99,)).start()\n    except RuntimeError:\n        pass",
        "timeout",
    ),
    "a large list": ("x = [0] * 10**9", "memory"),
    "memory in pieces": ("x = []\nwhile True: x.append(bytearray(2**20))", "memory"),
    "memory in processes": (FORKS.format("x = bytearray(100 * 2**20); time.sleep(60)") + "time.sleep(60)", "memory"),
    "a flood of output": ("while True: print('x' * 1000)", "output"),
    "a flood of errors": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output"),
    "a deep recursion": ("import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()", "error memory timeout"),
    "a wild pointer": ("import ctypes; ctypes.string_at(0)", "error"),
    "its own end": ("import os; os.kill(os.getpid(), 9)", "ok"),  # a first process is not ended by its own signals
    "an abort": ("import os; os.abort()", "error"),
    "the end of all that it sees": ("import os\nos.kill(-1, 9)", "ok error timeout"),
    "the end of its first process": ("import os\nos.kill(1, 9)\nprint('still here')", "ok error timeout"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STOPPED)
def test_what_is_stopped(name):
    code, reason = STOPPED[name]  # a word, or several where the race is the program's own
    begun = time.monotonic()
    limits = LIMITS if "timeout" in reason else PATIENT
    found = run_python(code, **limits)
    assert found.reason in reason.split(), found
    assert time.monotonic() - begun < limits["timeout_s"] + bubblewrap.END_S + 60, "programs sleep for 600 s"
    assert len(found.stdout) <= LIMITS["output_bytes"] and len(found.stderr) <= LIMITS["output_bytes"]


def test_the_program_is_the_first_process_and_has_the_limits():
    """There is no process that has none of them, and whose memory a program of the same user could write."""
    code = "import os\nprint(os.getpid(), [p for p in os.listdir('/proc') if p.isdigit()])\nprint(open('/proc/1/limits').read())"
    found = run_python(code, **PATIENT)
    who, _, limits = found.stdout.partition("\n")
    assert who == "1 ['1']", found
    hard = {line[:25].strip(): line[26:].split()[1] for line in limits.splitlines()[1:] if line}
    assert hard["Max cpu time"] == str(int(PATIENT["timeout_s"]) + 2)
    assert hard["Max address space"] == str(PATIENT["memory_mb"] * 2**20)
    assert hard["Max file size"] == str(bubblewrap.TMP_BYTES) and hard["Max processes"] == str(bubblewrap.PROCESSES)
    assert hard["Max open files"] == "64" and hard["Max core file size"] == hard["Max locked memory"] == "0"


def test_a_program_with_a_nul_is_an_error():
    """Python would read what is before it, and drop the rest."""
    for code in ("print(1)\0print(2)", "\0", "# a\0\nprint(3)"):
        found = run_python(code, **PATIENT)
        assert (found.stdout, found.exit_code, found.reason) == ("", 1, "error") and "null bytes" in found.stderr


def test_it_is_contained_without_a_control_group_too(monkeypatch):
    monkeypatch.setattr(bubblewrap.cgroup, "make", lambda *limits: None)
    assert run_python("print(1)", **PATIENT).stdout == "1\n"
    assert run_python("x = [0] * 10**9", **PATIENT).reason == "memory"


def processes_of(marker: str) -> list[int]:
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                if marker.encode() in (process / "cmdline").read_bytes() + (process / "environ").read_bytes():
                    found.append(int(process.name))
            except OSError:
                pass
    return found


def test_processes_in_the_background_end_with_it():
    marker = f"left-over-{time.time_ns()}"
    code = f"import subprocess\nfor _ in range(3): subprocess.Popen(['sleep', '600'], env={{'MARK': '{marker}'}}, start_new_session=True)"
    assert run_python(code, **LIMITS).reason in ("ok", "timeout")
    wait_for(lambda: not processes_of(marker), 20)


def test_the_end_reaches_what_has_left_the_group(monkeypatch):
    """As bubblewrap's first process does for a moment: it has a session of its own, and does not yet die with its parent."""
    inner = "setsid sh -c 'echo $$; exec sleep 600' & wait"
    monkeypatch.setattr(bubblewrap, "_command", lambda *a, **k: ["/bin/sh", "-c", inner])
    container = bubblewrap.Container(b"", cpu_s=1, memory_mb=256)
    pid = int(container.process.stdout.readline())
    try:
        container.kill()
        assert select.select([container.process.stdout], [], [], 30)[0]  # its end: nobody writes any more
        assert container.process.stdout.read() == b""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        container.end()


def test_invalid_utf_8_is_text():
    found = run_python("import os; os.write(1, b'a\\xff\\xfeb'); os.write(2, b'\\xc3')", **PATIENT)
    assert found.stdout == "a\ufffd\ufffdb" and found.stderr == "\ufffd" and found.reason == "ok"
    assert run_python("print('\ud800')", **PATIENT).reason in ("ok", "error"), "a lone surrogate in the code"


def test_an_honest_program():
    found = run_python("import sys\nprint(sum(map(int, sys.stdin)))", stdin="1\n2\n3\n", **PATIENT)
    assert (found.stdout, found.stderr, found.exit_code, found.reason) == ("6\n", "", 0, "ok")
    found = run_python(
        "import math, json, re, random, itertools, collections, decimal, fractions, datetime\nraise SystemExit(3)",
        **PATIENT,
    )
    assert (found.exit_code, found.reason) == (3, "error")
    found = run_python("1/0", **PATIENT)
    assert found.exit_code == 1 and 'File "/main.py", line 1' in found.stderr and "ZeroDivisionError" in found.stderr


def test_what_it_writes_is_gone_for_the_next_one():
    assert run_python("open('/tmp/a', 'w').write('x')", **PATIENT).reason == "ok"
    assert run_python("import os; print(os.listdir('/tmp'))", **PATIENT).stdout == "[]\n"


def test_much_input_to_one_that_does_not_read_it():
    assert run_python("print(1)", stdin="x" * 2**22, **PATIENT).stdout == "1\n"
    assert run_python("import sys; print(len(sys.stdin.read()))", stdin="x" * 2**22, **PATIENT).stdout == f"{2**22}\n"


def test_many_at_once():
    codes, threads = [f"print({i})" for i in range(40)], threading.active_count()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda code: run_python(code, timeout_s=60), codes))
    assert [f.stdout for f in found] == [f"{i}\n" for i in range(40)]
    # Forty runs that each left a thread would be seen; threads of other tests in this process are not counted.
    assert threading.active_count() < threads + 20


def test_no_start_copies_the_page_tables_of_a_large_process(monkeypatch):
    """Popen forks where it has to change the user, or to call something: seconds a container, in a trainer of many GB."""
    made, plain = [], subprocess.Popen

    def popen(command, **settings):
        made.append(settings)
        return plain(command, **settings)

    monkeypatch.setattr(bubblewrap.subprocess, "Popen", popen)
    assert run_python("print(1)").stdout == "1\n"
    [settings] = made
    assert not settings.keys() & {"user", "group", "extra_groups", "umask", "preexec_fn"}


def test_a_machine_that_contains_nothing_refuses(monkeypatch, tmp_path):
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    bwrap.chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: "/nonexistent/bwrap" if name == "bwrap" else None)
    monkeypatch.setattr(bubblewrap, "_disable_userns", lambda bwrap: True)
    assert run_python("print(1)").reason == "refused"
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: None)
    found = run_python("print(1)")
    assert found.reason == "refused" and "apt-get install bubblewrap" in found.stderr and found.stdout == ""
    assert "agent.mcp_servers" in bubblewrap.problem()
    for parent in (tmp_path, *tmp_path.parents[:3]):
        if not os.access(parent, os.X_OK) or subprocess.run(["true"], check=False).returncode:
            return
    monkeypatch.setattr(
        bubblewrap, "_command", lambda *a, **k: ["/bin/sh", "-c", "echo 'bwrap: no namespaces' >&2; exit 1"]
    )
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: "/bin/sh")
    found = run_python("print(1)")
    assert found.reason == "refused" and "contains nothing here: bwrap: no namespaces" in found.stderr
    assert "user namespaces" in bubblewrap.problem()


def test_a_leak_is_seen(monkeypatch):
    whole = bubblewrap._command

    def leaking(*arguments, **limits):
        command = whole(*arguments, **limits)
        at = command.index("--proc")
        return [*command[:at], "--ro-bind", "/etc", "/etc", *command[at:]]

    monkeypatch.setattr(bubblewrap, "_command", leaking)
    assert "leaks" in bubblewrap.problem() or "contained" in bubblewrap.problem()
