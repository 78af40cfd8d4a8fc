"""The server's processes: what fails says why, and nothing survives its owner."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron_rl_plugin.installed import PACKAGES, ROOT

from megatron_rl.config import Config, ServerConfig
from megatron_rl.config.load import build_config
from megatron_rl.errors import UserError
from megatron_rl.models.hf_folder import check_served
from megatron_rl.models.parallel_check import read_hf_config
from megatron_rl.models.precision import Machine
from megatron_rl.servers import orphans
from megatron_rl.servers.local import LocalServers
from megatron_rl.servers.own_environment import check_plugin, cuda_tools, find_python
from megatron_rl.servers.server import SUPERVISOR, RolloutServer, reason_of_death, reserve_port
from tests.rollout.conftest import CPU_SERVER
from tools.make_tiny_model import make_tiny_model

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 120


def served(config: Config) -> tuple[str, str, ServerConfig]:
    return config.model.path, config.precision.rollout, config.rollout.server


def tree(pid: int) -> list[int]:
    """Ids of all processes below `pid`."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [process for child in children for process in (int(child), *tree(int(child)))]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, patience_s: float = PATIENCE_S) -> bool:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler of the signal."""
    caught = Path(f"/proc/{pid}/status").read_text().split("SigCgt:")[1].split()[0]
    return bool(int(caught, 16) >> (number - 1) & 1)


# One process that ignores SIGTERM, one that left the session, one whose parent has ended.
STUBBORN = "trap '' TERM; setsid sleep 600 & (sleep 600 & exec sleep 0.01) & sleep 600; sleep 600"


def supervised(command: list[str], environment: Mapping[str, str] = os.environ) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, str(SUPERVISOR), "0.3", *command], stdin=subprocess.PIPE, env=environment)


@pytest.mark.parametrize("ending", ["close", "kill_supervisor", "kill_first_process"])
def test_supervisor_ends_the_whole_tree(ending):
    supervisor = supervised(["sh", "-c", STUBBORN])
    assert wait_for(lambda: len(tree(supervisor.pid)) >= 4, 20)
    processes = tree(supervisor.pid)
    if ending == "close":
        supervisor.stdin.close()
        expected = processes
    elif ending == "kill_first_process":
        os.kill(processes[0], signal.SIGKILL)
        expected = processes
    else:
        supervisor.kill()
        expected = processes[:1]  # SGLang's own workers follow their parent by themselves
    supervisor.wait(20)
    assert wait_for(lambda: not any(alive(pid) for pid in expected), 20)
    for pid in processes:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


UNTIL = "until [ -e {} ]; do sleep 0.02; done; exit 7"


def test_supervisor_ignores_signals_and_passes_the_status_on(tmp_path):
    supervisor = supervised(["sh", "-c", UNTIL.format(tmp_path / "over")])
    assert wait_for(lambda: tree(supervisor.pid) and catches(supervisor.pid, signal.SIGTERM), 20)
    supervisor.send_signal(signal.SIGTERM)
    supervisor.send_signal(signal.SIGINT)
    (tmp_path / "over").touch()
    assert supervisor.wait(20) == 7


def test_a_notice_to_the_owner_ends_no_server(tmp_path):
    """SIGUSR1 of a scheduler, which all processes of a job step get."""
    supervisor = supervised(["sh", "-c", UNTIL.format(tmp_path / "over")])
    assert wait_for(lambda: tree(supervisor.pid) and catches(supervisor.pid, signal.SIGTERM), 20)
    for pid in (supervisor.pid, *tree(supervisor.pid)):
        with contextlib.suppress(ProcessLookupError):  # of a sleep that has ended
            os.kill(pid, signal.SIGUSR1)
    (tmp_path / "over").touch()
    assert supervisor.wait(20) == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_without_an_owner(number):
    """Of a person, or of a scheduler."""
    supervisor = subprocess.Popen([sys.executable, str(SUPERVISOR), "--alone", "0.3", "sh", "-c", STUBBORN])
    assert wait_for(lambda: len(tree(supervisor.pid)) >= 4 and catches(supervisor.pid, signal.SIGTERM), 20)
    processes = tree(supervisor.pid)
    supervisor.send_signal(number)
    assert supervisor.wait(20) != 0
    assert not any(alive(pid) for pid in processes)


# As SGLang's: shared memory that two processes have mapped, and a file in the folder for temporary ones.
LEAVES = """
import mmap, os, subprocess, sys, tempfile, time
script, shared, *child = sys.argv
if not child:
    subprocess.Popen([sys.executable, script, shared, "child"])
with open(shared, "w+b") as file:
    file.truncate(4096)
    mapped = mmap.mmap(file.fileno(), 4096)
tempfile.NamedTemporaryFile(delete=False)
print(tempfile.gettempdir(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("ending", ["close", "kill_first_process", "kill_all"])
def test_nothing_of_a_server_is_left(ending, tmp_path, tmp_path_factory):
    """Files and shared memory, at once; of one that was killed with its owner and all it had, when the next one starts."""
    shared = Path(f"{orphans.SHARED_MEMORY}{uuid.uuid4().hex}.shm")
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    script = tmp_path_factory.mktemp("script") / "leaves.py"
    script.write_text(LEAVES)
    command = [sys.executable, str(SUPERVISOR), "0.3", sys.executable, str(script), str(shared)]
    supervisor = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    folder = Path(supervisor.stdout.readline().decode().strip())
    assert supervisor.stdout.readline().decode().strip() == str(folder)
    assert folder.parent == tmp_path and len([*folder.iterdir()]) == 3 and shared.exists()
    processes = tree(supervisor.pid)
    if ending == "close":
        supervisor.stdin.close()
    for pid in {"close": [], "kill_first_process": processes[:1], "kill_all": [supervisor.pid, *processes]}[ending]:
        with contextlib.suppress(ProcessLookupError):  # it goes with its parent
            os.kill(pid, signal.SIGKILL)
    supervisor.wait(20)
    if ending == "kill_all":
        assert wait_for(lambda: not any(alive(pid) for pid in processes), 20)
        assert folder.exists() and shared.exists()
        os.utime(shared, (0, 0))
        with supervised(["sleep", "600"], environment) as next_one:
            assert wait_for(lambda: not folder.exists() and not shared.exists(), 20)
            assert wait_for(lambda: [*tmp_path.iterdir()], 20), "the next one makes its own folder after that"
            [other] = tmp_path.iterdir()
            with supervised(["true"], environment) as third:
                assert third.wait(20) == 0
            assert [*tmp_path.iterdir()] == [other], "of one that lives"
            next_one.stdin.close()
            next_one.wait(20)
    assert not [*tmp_path.iterdir()] and not shared.exists()


def test_what_torch_compiles_is_not_where_another_user_could_make_the_folder_first(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with orphans.own_folder() as changes:
        assert changes["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "megatron_rl" / "torchinductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    with orphans.own_folder() as changes:
        assert changes["TORCHINDUCTOR_CACHE_DIR"] == "/mine"


def test_a_missing_environment_names_the_remedy(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"rollout\.server\.python = '/nowhere/python'"):
        find_python("/nowhere/python")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megatron_rl.servers.own_environment.__file__", str(tmp_path / "a" / "b" / "server.py"))
    with pytest.raises(UserError, match=r"tools/setup\.sh"):
        find_python()


def test_an_environment_without_this_checkouts_package_names_the_command(reference, tmp_path):
    """Before a server starts: one that lacks it, one whose copy is of another checkout, and one that SGLang's search misses."""
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    server = RolloutServer(
        reference.folder, ServerConfig(python=str(home / "bin" / "python")), log_path=tmp_path / "log"
    )
    with pytest.raises(
        UserError, match=rf"lacks megatron-rl-sglang: .*setup\.sh, or \S+python -m pip install .*{ROOT}"
    ):
        server.start()
    site = home / "lib" / "python3.12" / "site-packages"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, site / package)
    with pytest.raises(UserError, match="lacks megatron-rl-sglang"):
        check_plugin(home / "bin" / "python")
    metadata = site / "megatron_rl_sglang-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-rl-sglang\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\nmegatron_rl = megatron_rl_plugin:register\n")
    check_plugin(home / "bin" / "python")
    (site / "megatron_rl_plugin" / "routes.py").unlink()
    with pytest.raises(UserError, match="has another megatron-rl-sglang than the trainer"):
        check_plugin(home / "bin" / "python")


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(UserError, match=str(tmp_path)):
        RolloutServer(tmp_path, ServerConfig(), log_path=tmp_path / "log").start()


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "mixtral",
            {"tie_word_embeddings": True},
            r"MixtralForCausalLM only without tied embeddings.*tie_word_embeddings",
        ),
        ("gpt_oss", {}, r"only in the dtype of config.json, which is float32, but precision.rollout is bf16"),
    ],
)
def test_weights_that_are_not_served_as_they_are_pushed_are_refused(family, change, message, tmp_path):
    folder = make_tiny_model(family, tmp_path / "model")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    config = build_config({"model": {"path": str(folder)}, "rollout": {"context_length": 64}})
    with pytest.raises(UserError, match=message):
        check_served(*served(config), read_hf_config(folder), pushes=False)


def test_quantized_weights_are_served_but_not_pushed_to(tmp_path):
    folder = make_tiny_model("qwen3_moe", tmp_path / "model")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    config = build_config({"model": {"path": str(folder)}})
    check_served(*served(config), read_hf_config(folder), pushes=False)
    with pytest.raises(UserError, match=r"as mxfp4.*megatron-rl convert"):
        check_served(*served(config), read_hf_config(folder), pushes=True)


def test_on_a_gpu_a_server_compiles_with_its_own_environments_tools(tmp_path, monkeypatch):
    """SGLang's samplers are compiled when they are first used, by ninja and nvcc, which need be nowhere else."""
    python, cuda = tmp_path / "bin" / "python", tmp_path / "lib" / "python3.12" / "site-packages" / "nvidia" / "cu13"
    assert cuda_tools(python)["PATH"].split(":")[0] == str(tmp_path / "bin")
    (cuda / "bin").mkdir(parents=True)
    (cuda / "bin" / "nvcc").write_text("")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    assert cuda_tools(python)["CUDA_HOME"] == str(cuda)
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
    assert "CUDA_HOME" not in cuda_tools(python)


def test_on_a_gpu_a_server_finds_the_cuda_runtime_before_torch_loads_it(tmp_path, monkeypatch):
    """The library that a server preloads in order to sleep is linked with it: without it the process does not start."""
    python = tmp_path / "bin" / "python"
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert "LD_LIBRARY_PATH" not in cuda_tools(python)
    folder = tmp_path / "lib" / "python3.12" / "site-packages" / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    (folder / "libcudart.so.13").write_text("")
    assert cuda_tools(python)["LD_LIBRARY_PATH"] == str(folder)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/nvidia/lib64:")  # an empty name would be the current folder
    assert cuda_tools(python)["LD_LIBRARY_PATH"] == f"/usr/local/nvidia/lib64:{folder}"


def test_fp8_weights_are_served_on_a_gpu_alone(tmp_path, monkeypatch):
    folder = make_tiny_model("qwen3_moe", tmp_path / "model")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    config = build_config({"model": {"path": str(folder)}})
    with pytest.raises(
        UserError, match=r"as fp8 .*whose matrix products need a GPU; write plain weights: megatron-rl convert"
    ):
        check_served(*served(config), read_hf_config(folder), pushes=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    check_served(*served(config), read_hf_config(folder), pushes=False)


def test_fp8_folders_that_sglang_would_refuse(tmp_path, monkeypatch):
    """On a GPU by the tensor's name; without one any sizes are rounded alike."""
    folder = make_tiny_model("qwen3_moe", tmp_path / "model")
    config = build_config({"model": {"path": str(folder)}, "precision": {"rollout": "fp8"}})
    check_served(*served(config), read_hf_config(folder), pushes=True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(UserError, match=r"fp8: model.layers.0.\S+.weight has \d+ rows: SGLang needs multiples of 128"):
        check_served(*served(config), read_hf_config(folder), pushes=True)


def test_flags_of_an_fp8_server(tmp_path):
    """On a GPU SGLang's FP8 layers, to be filled by the first push; without one it serves bf16."""
    settings = {"dtype": "fp8", "predictor": True, "feature_stride": 4}
    server = RolloutServer(tmp_path, ServerConfig(python=sys.executable, tensor=4, expert=2), **settings)
    command = server.command()
    assert command[command.index("--dtype") + 1] == "bfloat16" and "--load-format" not in command
    command = server.command(Machine((9, 0), None, None, "12.9"))
    values = dict(pairwise(command))
    assert (values["--dtype"], values["--load-format"]) == ("bfloat16", "dummy")
    assert (values["--tensor-parallel-size"], values["--expert-parallel-size"]) == ("4", "2")
    assert values["--fp8-gemm-backend"] == values["--moe-runner-backend"] == "triton"
    overrides = json.loads(values["--json-model-override-args"])
    assert overrides["router_feature_stride"] == 4
    assert overrides["quantization_config"]["weight_block_size"] == [128, 128]


def test_a_server_that_cannot_start_says_why(reference, tmp_path):
    config = ServerConfig(threads=1, extra_args=["--no-such-flag"])
    server = RolloutServer(reference.folder, config, log_path=tmp_path / "sglang.log")
    with pytest.raises(UserError) as error, server:
        pass
    message = str(error.value)
    assert "--no-such-flag" in message and "sglang.log" in message and "\n" not in message
    assert not server.alive()


def test_a_reserved_port_is_free_for_the_server_alone():
    """Who does not share addresses cannot have it before, while and after a server listens; until then nobody answers."""
    with reserve_port() as reserved:
        address = reserved.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5)
        for _ in range(2):
            with socket.create_server(address) as server, socket.create_connection(address, timeout=5) as client:
                server.accept()[0].close()
                client.close()
                with socket.socket() as other, pytest.raises(OSError, match="in use"):
                    other.bind(address)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)


def test_a_server_keeps_its_port_while_it_is_down(tmp_path):
    """Before it starts, and between its end and a restart."""
    server = RolloutServer(tmp_path, ServerConfig(python=sys.executable))
    server.stop()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", server.port))


def test_a_port_in_use_is_the_reason_whatever_follows_it(tmp_path):
    """As SGLang's log had it: its own first request went to the other owner of the port."""
    log = tmp_path / "sglang.log"
    log.write_text(
        "[12:17] ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 43999): address already in use\n"
        "requests.exceptions.ReadTimeout: HTTPConnectionPool(host='127.0.0.1', port=43999): Read timed out.\n"
    )
    assert "43999): address already in use" in reason_of_death(log)


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: Rank 0 scheduler died during initialization (exit code: -7). If exit code is -9, see dmesg.",
        "[12:17] Subprocess scheduler_0 (pid=7) crashed with exit code -7. Triggering SIGQUIT for cleanup...",
        "Fatal Python error: Bus error",
    ],
)
def test_shared_memory_that_is_full_is_named_with_what_is_free(tmp_path, monkeypatch, line):
    log = tmp_path / "sglang.log"
    log.write_text(f"starting\n{line}\nKeyError: what comes of it\n")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free={"/dev/shm": 4096}[folder]))
    assert "SIGBUS, as happens if /dev/shm is full: it has 4,096 bytes free" in reason_of_death(log)
    log.write_text(f"starting\n{line.replace('-7', '-9').replace('Bus error', 'Aborted')}\n")
    assert "/dev/shm" not in reason_of_death(log)


class Hanging(RolloutServer):
    """One that answers nothing, or is fine; its process is a `sleep`."""

    fine = False

    def start(self):
        self._process = subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE)
        self.fine = True

    def stop(self):
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(20)

    def hangs(self):
        assert self.alive()
        return not self.fine

    def ready(self):
        return self.fine


def test_a_child_that_hangs_is_started_again_where_there_is_trouble(tmp_path):
    children = LocalServers(build_config({"model": {"path": str(tmp_path)}}), [], sleeps=False)
    children.servers = [Hanging(tmp_path, ServerConfig(python=sys.executable)) for _ in range(3)]
    for server in children.servers:
        server.start()
    try:
        children.servers[1].fine = False
        assert children.changed() == 0, "without trouble nobody is asked"
        assert children.changed(trouble=True) == 1 and not children.servers[1].alive()
        assert children.renew() == [server.address for server in children.servers]
        assert all(server.alive() and server.fine for server in children.servers)
        assert children.changed(trouble=True) == 0
    finally:
        children.close()


def test_a_server_that_takes_too_long_is_ended(reference, tmp_path):
    config = ServerConfig(threads=1, start_timeout_s=0.5)
    log = tmp_path / "sglang.log"
    log.write_text("the reason of an earlier life, of which this one knows nothing\n")
    server = RolloutServer(reference.folder, config, log_path=log)
    with pytest.raises(UserError, match=r"not ready after.*rollout\.server\.start_timeout_s") as error, server:
        pass
    assert "earlier life" not in str(error.value)
    assert not server.alive()


OWNER = """
import sys, time
from megatron_rl.config import Config, ServerConfig
from megatron_rl.servers.server import RolloutServer
server = RolloutServer(sys.argv[1], ServerConfig(threads=1, memory_fraction=0.2), log_path=sys.argv[2])
server.start()
print(server._process.pid, flush=True)
time.sleep(600)
"""


def test_no_process_of_the_server_survives_its_killed_owner(reference, tmp_path):
    arguments = [str(reference.folder), str(tmp_path / "sglang.log")]
    owner = subprocess.Popen([sys.executable, "-c", OWNER, *arguments], stdout=subprocess.PIPE, cwd=REPOSITORY)
    supervisor = int(owner.stdout.readline())
    try:
        # SGLang's first process, its scheduler and its detokenizer.
        assert wait_for(lambda: len(tree(supervisor)) >= 3, CPU_SERVER.start_timeout_s)
        processes = [supervisor, *tree(supervisor)]
        owner.kill()
        owner.wait(20)
        assert wait_for(lambda: not any(alive(pid) for pid in processes))
    finally:
        owner.kill()
