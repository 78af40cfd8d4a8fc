"""Processes of tests that are forked: what they are given, how they end, and that none outlives who asked for it."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.preloaded import PYTHON_WITH_PACKAGES
from tests.waiting import gone, wait_for
from tests.zygote import FOLDER, Process, Zygote

ASKS = """
import sys, time
from tests.zygote import Process, Zygote
process = Process(Zygote("owned", ()), "time:sleep", (600,), path=sys.path)
print(process.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def zygote() -> Zygote:
    return Zygote("nothing", ("json",))


def say(path: Path, name: str) -> None:
    path.write_text(f"{os.environ.get(name)} {os.getcwd()} {'json' in sys.modules} {len(sys.path)}")


def write(files: list[int], text: str) -> None:
    os.write(files[0], text.encode())


def end(status: int) -> None:
    if status < 0:
        os.kill(os.getpid(), -status)
    sys.exit(status)


def test_it_has_environment_folder_and_path_of_who_asks(zygote, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGATRON_RL_SAYS", "what is set later")
    process = Process(zygote, say, (tmp_path / "said", "MEGATRON_RL_SAYS"), path=sys.path)
    process.join(60)
    assert process.exitcode == 0
    assert (tmp_path / "said").read_text() == f"what is set later {tmp_path} True {len(sys.path)}"


def test_it_is_given_open_files(zygote):
    read, write_end = os.pipe()
    process = Process(zygote, write, ("a text",), files=(write_end,), path=sys.path)
    os.close(write_end)
    with open(read) as file:
        assert file.read() == "a text", "and it is closed when the process ends"
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize("status", [0, 7, -signal.SIGKILL, -signal.SIGTERM])
def test_its_exit_status_is_told(zygote, status):
    process = Process(zygote, end, (status,), path=sys.path)
    process.join(60)
    assert process.exitcode == status and not process.is_alive()
    process.kill()


def test_an_error_is_a_status_and_is_in_the_log(zygote):
    process = Process(zygote, "math:sqrt", (-1,))
    process.join(60)
    assert process.exitcode == 1 and "ValueError" in zygote.log().read_text()


KEEPS = """import atexit, tempfile
from pathlib import Path
folder = tempfile.TemporaryDirectory(dir=Path(__file__).parent, prefix="of-the-zygote-")
atexit.register(folder.cleanup)
"""


def make_folder_and_end(place: str) -> None:
    """A fork that keeps a temporary folder until its end, as a program of Python's own would end."""
    import keeps

    assert Path(keeps.folder.name).is_dir()
    own = tempfile.TemporaryDirectory(dir=place, prefix="of-the-fork-")
    atexit.register(Path(place, "ended").touch)
    Path(place, "name").write_text(own.name)
    atexit._run_exitfuncs()


def test_its_end_removes_its_own_temporary_folders_and_none_of_the_zygotes(tmp_path):
    (tmp_path / "keeps.py").write_text(KEEPS)
    zygote = Zygote("keeps", ("keeps",), environment={"PYTHONPATH": str(tmp_path)})
    for _ in range(2):
        process = Process(zygote, make_folder_and_end, (str(tmp_path),), path=[str(tmp_path), *sys.path])
        process.join(60)
        assert process.exitcode == 0, zygote.log().read_text()
        assert (tmp_path / "ended").exists() and not Path((tmp_path / "name").read_text()).exists()
        (tmp_path / "ended").unlink()
    assert len([*tmp_path.glob("of-the-zygote-*")]) == 1


def test_it_is_killed_and_ends_with_the_object_that_stands_for_it(zygote):
    killed, dropped = (Process(zygote, "time:sleep", (600,)) for _ in range(2))
    killed.join(0.1)
    assert killed.exitcode is None and killed.is_alive()
    killed.kill()
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    pid = dropped.pid
    del dropped
    wait_for(lambda: gone(pid))


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_nothing_outlives_a_process_that_asked_and_was_killed():
    """Its zygote, which is its own where it is not of a run of tests, ends with it too."""
    environment = {name: value for name, value in os.environ.items() if name != FOLDER}
    asks = subprocess.Popen([sys.executable, "-c", ASKS], stdout=subprocess.PIPE, env=environment)
    try:
        process = int(asks.stdout.readline())
        parent = parent_of(process)
        assert parent not in (os.getpid(), asks.pid)
        assert parent_of(parent) not in (os.getpid(), asks.pid), "it has processes of others below it"
    finally:
        asks.kill()
        asks.wait(20)
    wait_for(lambda: gone(process) and gone(parent))


def test_a_zygote_has_the_environment_of_the_run_whoever_asks_first(monkeypatch):
    monkeypatch.setenv("OF_A_TEST", "1")
    zygote = Zygote("environment", (), environment={"OF_ITS_OWN": "1"})
    process = Process(zygote, "time:sleep", (600,))
    assert zygote.pid == parent_of(process.pid)
    started = Path(f"/proc/{zygote.pid}/environ").read_bytes().split(b"\0")
    assert b"OF_ITS_OWN=1" in started and b"OF_A_TEST=1" not in started
    process.kill()


def test_a_zygote_that_cannot_import_says_why():
    with pytest.raises(AssertionError, match=r"(?s)wrong: no process was forked.*No module named 'no_such_module'"):
        Process(Zygote("wrong", ("no_such_module",)), "time:sleep", (1,))


@pytest.mark.parametrize(
    ("arguments", "out", "errors", "status"),
    [
        (("-c", "import sys; print(sys.argv[1:]); sys.exit('why')", "a"), "['a']\n", "why\n", 1),
        (("-P", "-W", "ignore", "SCRIPT", "a"), "['SCRIPT', 'a'] False\n", "", 3),
        (("-m", "calendar", "2026", "11"), "   November 2026\n", "", 0),
        (("-c", "import os; os.kill(os.getpid(), 9)"), "", "", -9),
    ],
)
def test_a_forked_python_does_what_python_does(arguments, out, errors, status, tmp_path):
    """The same arguments, to both."""
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv, sys.path[0] == sys.argv[0].rpartition('/')[0]); sys.exit(3)")
    arguments = [argument.replace("SCRIPT", str(script)) for argument in arguments]
    out = out.replace("SCRIPT", str(script))
    for python in (sys.executable, PYTHON_WITH_PACKAGES):
        done = subprocess.run([python, *arguments], capture_output=True, text=True, timeout=300)
        assert (done.stdout[: len(out)], done.stderr) == (out, errors)
        assert done.returncode == status and bool(out) == bool(done.stdout)


def test_a_forked_python_passes_signals_on_and_sees_the_end_of_its_input():
    code = "import signal, sys; signal.signal(15, lambda *_: sys.exit(5)); print('ready', flush=True); signal.pause()"
    process = subprocess.Popen([PYTHON_WITH_PACKAGES, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    process.terminate()
    assert process.wait(60) == 5
    reader = [PYTHON_WITH_PACKAGES, "-c", "import sys; print(len(sys.stdin.read()))"]
    assert subprocess.run(reader, input=b"four", capture_output=True, timeout=300).stdout == b"4\n"


def test_supervisors_of_a_process_run_and_are_its_own(zygote, tmp_path, monkeypatch):
    from tests import forked_servers  # which would cost each forked process of this file seconds

    monkeypatch.setattr(forked_servers, "_list_of", lambda pid: tmp_path / str(pid))
    runs, ended = (Process(zygote, "time:sleep", (seconds,)) for seconds in (600, 0))
    for process in (runs, ended):
        forked_servers._note(process.pid)
    ended.join(60)
    assert forked_servers.supervisors_of(os.getpid()) == [runs.pid]
    (tmp_path / str(os.getpid())).write_text(f"{runs.pid}-1\n")  # the id of one that has ended, given anew
    assert forked_servers.supervisors_of(os.getpid()) == []
    runs.kill()
