"""Worker processes of verifiers: hard limits, crashes, signals from outside, and their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron_rl.errors import UserError
from megatron_rl.sandbox import worker_pool
from megatron_rl.sandbox.worker_pool import Failure, WorkerPool
from tests.waiting import gone, wait_for

pytestmark = pytest.mark.slow

SLOW_DOUBLE = """
import os, pathlib, signal, time

def double(folder, number):
    (pathlib.Path(folder) / f"pid_{os.getpid()}").touch()
    deadline = time.monotonic() + 30
    while not (pathlib.Path(folder) / "go").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return 2 * number

def suicide(number):
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * number

def crash(number):
    os.abort()
"""


@pytest.fixture
def module(tmp_path):
    file = tmp_path / "slow_double.py"
    file.write_text(SLOW_DOUBLE)
    return file


def started(folder) -> list[int]:
    return [int(file.name[4:]) for file in folder.glob("pid_*")]


def test_worker_pool_survives_timeouts_errors_and_deaths():
    with_limit = WorkerPool("time:sleep", timeout_s=3.0, size=1)
    results = with_limit.map([(0,), (600,), ("x",), (0,)])
    assert results[0] is None and results[3] is None
    assert results[1] == Failure("longer than 3 s", timed_out=True) and "TypeError" in results[2].reason
    with_limit.close()
    deaths = WorkerPool("os:_exit", timeout_s=30.0, size=1)
    assert deaths.map([(3,), (4,)]) == [Failure(f"the worker ended with status {n}") for n in (3, 4)]
    deaths.close()


def test_worker_that_cannot_start_is_an_error():
    pool = WorkerPool("no_such_module:f", timeout_s=5.0, size=1)
    with pytest.raises(UserError, match="no_such_module:f could not score a response in 2 tries: its worker"):
        pool.map([()])
    pool.close()


def test_busy_workers_end_when_their_parent_is_killed():
    program = (
        "import threading\n"
        "from megatron_rl.sandbox.worker_pool import WorkerPool\n"
        "pool = WorkerPool('builtins:eval', timeout_s=600, size=1)\n"
        "print(*pool.map([('__import__(\"os\").getpid()',)]), flush=True)\n"
        "pool.map([('__import__(\"time\").sleep(600)',)])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        child = int(parent.stdout.readline())
        assert not gone(child)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait(30)
    wait_for(lambda: gone(child), 30)


def test_a_worker_that_is_killed_costs_no_response(module):
    """Neither while it scores nor while it waits."""
    pool = WorkerPool(f"{module}:double", timeout_s=60.0, size=2)
    results = []
    scoring = threading.Thread(target=lambda: results.extend(pool.map([(str(module.parent), n) for n in range(5)])))
    scoring.start()
    os.kill(wait_for(lambda: started(module.parent))[0], signal.SIGKILL)
    (module.parent / "go").touch()
    scoring.join(90)
    assert results == [0, 2, 4, 6, 8]
    before = set(started(module.parent))
    for pid in before:
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)
    assert pool.map([(str(module.parent), 7)] * 3) == [14] * 3
    assert set(started(module.parent)) - before
    pool.close()


def test_a_worker_that_takes_no_call_any_more_is_replaced(module, monkeypatch):
    """As after an end amid a transfer, which may leave a lock held: here it is stopped."""
    (module.parent / "go").touch()
    pool = WorkerPool(f"{module}:double", timeout_s=600.0, size=1)  # longer than a test may take
    assert pool.map([(str(module.parent), 1)]) == [2]
    [pid] = started(module.parent)
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(worker_pool, "TAKE_TIMEOUT_S", 1.0)
    assert pool.map([(str(module.parent), 2)]) == [4]
    wait_for(lambda: gone(pid))
    assert len(started(module.parent)) == 2
    pool.close()


def read_deadly(marker: Path, number: int) -> int:
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


class Deadly:
    """An argument that ends the first process that reads it, in the middle of the transfer."""

    def __init__(self, marker: Path, number: int):
        self.marker, self.number = marker, number

    def __reduce__(self):
        return read_deadly, (self.marker, self.number)


def test_a_worker_that_is_killed_amid_a_transfer_costs_no_response(module):
    """What it holds and leaves behind ends and stalls none of the others."""
    folder, marker = module.parent, module.parent / "read"
    pool = WorkerPool(f"{module}:double", timeout_s=60.0, size=2)
    results = []
    calls = [(str(folder), 1), (str(folder), Deadly(marker, 2)), (str(folder), 3)]
    scoring = threading.Thread(target=lambda: results.extend(pool.map(calls)))
    scoring.start()
    wait_for(lambda: started(folder) and marker.exists())
    (folder / "go").touch()
    scoring.join(250)
    assert results == [2, 4, 6]
    pool.close()


def test_a_response_whose_worker_is_killed_twice_is_an_error_and_no_zero(module):
    pool = WorkerPool(f"{module}:suicide", timeout_s=60.0, size=1)
    with pytest.raises(UserError, match=r"slow_double.py:suicide could not score .* SIGKILL ended its worker process"):
        pool.map([(0,), (1,)])
    assert pool.map([(2,)]) == [4]
    pool.close()


def test_a_call_that_crashes_its_worker_fails_at_once(module):
    pool = WorkerPool(f"{module}:crash", timeout_s=60.0, size=1)
    assert pool.map([(0,)]) == [Failure("the worker ended with SIGABRT")]
    pool.close()


def test_calls_that_heed_no_signal_are_ended_at_the_limit():
    """A power of powers stays inside of one instruction of the interpreter."""
    pool = WorkerPool("builtins:eval", timeout_s=3.0, size=1)
    late = Failure("longer than 3 s", timed_out=True)
    assert pool.map([("3 ** 3 ** 3 ** 3 % 7",), ("1 + 1",)]) == [late, 2]
    pool.close()


def test_the_memory_of_a_call_is_limited():
    pool = WorkerPool("builtins:bytearray", timeout_s=60.0, size=1, memory_mb=2048)
    [failure, fine] = pool.map([(2**31,), (2,)])
    assert failure.reason.startswith("MemoryError") and fine == bytearray(2)
    pool.close()


def test_signals_to_the_process_group_leave_results_right(module):
    folder, numbers = module.parent, (signal.SIGTERM, signal.SIGINT)
    program = (
        "import signal\n"
        "from megatron_rl.sandbox.worker_pool import WorkerPool\n"
        f"for number in {[*map(int, numbers)]}:\n"
        "    signal.signal(number, lambda *_: print('asked to stop', flush=True))\n"
        f"pool = WorkerPool({f'{module}:double'!r}, timeout_s=60, size=2)\n"
        f"print(pool.map([({str(folder)!r}, n) for n in range(4)]), flush=True)\n"
        "pool.close()\n"
    )
    command = [sys.executable, "-c", program]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=os.environ)
    try:
        workers = wait_for(lambda: len(started(folder)) == 2 and started(folder))
        for number in numbers:
            os.killpg(parent.pid, number)
            assert parent.stdout.readline() == "asked to stop\n"
        (folder / "go").touch()
        assert parent.stdout.readline() == "[0, 2, 4, 6]\n"
        assert set(started(folder)) == set(workers), "no worker had to be replaced"
        assert parent.wait(30) == 0
    finally:
        parent.kill()
    wait_for(lambda: all(map(gone, workers)))
