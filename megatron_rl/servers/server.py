"""The SGLang server that the trainer starts on its own machine: start, wait until ready, restart, end."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TextIO

from megatron_rl_plugin.gates import OVERRIDE as GATES
from megatron_rl_plugin.identical import FLAG as IDENTICAL
from megatron_rl_plugin.trace import FLAG as TRACE

from megatron_rl.algorithms.sampling_support import ROOM_FOR_TIES, SamplingSupport
from megatron_rl.config import Config, LoRAConfig, RolloutConfig, RoutingConfig, ServerConfig, SyncConfig
from megatron_rl.credentials import bearer
from megatron_rl.distributed.nccl import ENVIRONMENT as NCCL_ENVIRONMENT
from megatron_rl.errors import UserError
from megatron_rl.http_client import NoAnswer, ask_now
from megatron_rl.models.fp8 import quantization_config
from megatron_rl.models.precision import ROLLOUT_DTYPES, Machine, this_machine
from megatron_rl.servers.flags import FP32_PRODUCTS, asks_routes, check_extra_args, server_flags
from megatron_rl.servers.own_environment import check_plugin, cuda_tools, find_python
from megatron_rl.servers.supervise import KEY
from megatron_rl.sync.allocator import ALLOCATOR_VARIABLES

OPERATORS = Path(__file__).parents[1] / "ops" / "batch_invariant.py"
"""The trainer's operators, which a server takes under precision.identical."""
SUPERVISOR = Path(__file__).with_name("supervise.py")
MODELS_PACKAGE = "megatron_rl_models"
"""Value of SGLANG_EXTERNAL_MODEL_PACKAGE of such a server."""
STOP_GRACE_S = 3.0
"""Seconds between SIGTERM and SIGKILL."""
CPU_CACHE_TOKENS = 65_536
FLUSH_S = 60
"""Seconds for which SGLang may wait until nothing runs, before it empties its cache."""
MEMORY = ("kv_cache", "weights")
"""Tags of what a server that sleeps gives up. CUDA graphs keep their own buffers: no address changes, so they stay valid."""
DEATH_S = 3.0
"""Seconds after a call that failed in which a server that was killed is gone: its parts do not end at the same moment."""
SHARED_MEMORY = "/dev/shm"
HANG_S = 30.0
"""Longest wait for a sign of life. SGLang waits 20 s for a token of its own before it says that it has none."""
_BUS_ERROR = re.compile(r"(?:exit code:?|terminated with|with code) -7\b|Fatal Python error: Bus error")


def reserve_port(host: str = "127.0.0.1") -> socket.socket:
    """A socket on a free port of the host (`getsockname()[1]`), which nobody else is given while it is open.

    It does not listen, so connections are refused and a server may listen there itself: Linux lets two sockets with
    SO_REUSEADDR share an address as long as one of them listens. A port that is only looked up may be another process's
    (a rendezvous, an outgoing connection) by the time that SGLang has imported itself and binds it.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved


def tail(path: Path, lines: int, since: int) -> list[str]:
    """Last non-empty lines of a log, of those after the first `since` bytes."""
    try:
        with open(path, errors="replace") as log:
            log.seek(since)
            return [line.rstrip() for line in deque(filter(str.strip, log), lines)]
    except OSError:
        return []


def reason_of_death(path: Path, since: int = 0) -> str:
    """The last exception's own line in SGLang's log, with its place where it says nothing; else the log's last line.

    A port in use goes first: what comes after it is of requests that SGLang sent to the port's other owner. So does SIGBUS, in
    whose place SGLang speaks of memory in general. `since`: the log's bytes before this life of the server, which are not read.
    """
    lines = tail(path, 400, since)
    for line in lines:
        if f"[Errno {errno.EADDRINUSE}]" in line:
            return line
        if _BUS_ERROR.search(line):
            free = shutil.disk_usage(SHARED_MEMORY).free
            return (
                f"a process of it ended by SIGBUS, as where {SHARED_MEMORY} is full: it has {free:,} bytes free now; remove"
                f" what ended programs have left there, or make it larger (mount -o remount,size=SIZE {SHARED_MEMORY};"
                " for a container --shm-size)"
            )
    for index in reversed(range(len(lines))):
        line = lines[index]
        if re.match(r"^(\w+\.)*\w*(Error|Exception|Interrupt)\b", line) or "error: " in line:
            bare = ":" not in line and index
            return f"{line} at '{lines[index - 1].strip()}'" if bare else line
    return lines[-1] if lines else "its log is empty"


def asks_gates(rollout: RolloutConfig, routing: RoutingConfig) -> bool:
    """True if replies have the weights of these experts too."""
    return asks_routes(rollout, routing) and (rollout.gates or routing.replay_gates)


def serves_adapters(lora: LoRAConfig, sync: SyncConfig) -> bool:
    """True if servers have the base model, and adapters beside it."""
    return lora.rank > 0 and sync.adapters == "unmerged"


def feature_stride(rollout: RolloutConfig, routing: RoutingConfig) -> int:
    """s, where router features of every s-th response token are wanted: at most cached_tokens in a full response; 0: none."""
    if routing.source != "pr3" or routing.features != "engine":
        return 0
    return -(-rollout.max_new_tokens // routing.cached_tokens)


@dataclass(eq=False)
class RolloutServer:
    """One SGLang server on 127.0.0.1, child of this process.

    `with RolloutServer(...) as server:` starts it and waits until it answers; leaving the block ends its whole process
    tree, as does the end of this process, in whatever way. `address` stays the same when it is stopped and started again.
    Errors: UserError for a feature_stride without predictor.
    """

    model: Path
    """Hugging Face folder."""
    config: ServerConfig
    _: KW_ONLY
    dtype: str = "bf16"
    """bf16 | fp32 | fp8 (on a GPU: blocks that the first push fills; without one bf16)."""
    context_length: int = 4096
    routes: bool = False
    """Capture the experts of every token."""
    gates: bool = False
    """Capture their weights with them."""
    log_path: Path = Path("sglang.log")
    seed: int = 0
    predictor: bool = False
    """A route predictor in every router, zero until it is pushed."""
    feature_stride: int = 0
    """s > 0 sends the router features of every s-th response token along, in all replies (`EngineFeatures`)."""
    processor: bool = False
    """Requests may bound the tail of the vocabulary (`SamplingSupport`)."""
    kept_sets: bool = False
    """Requests may ask for the tokens that a truncation keeps,"""
    seeded_sets: bool = False
    """and have seeds."""
    fp32_lm_head: bool = False
    identical: bool = False
    """Its operators are the trainer's (precision.identical)."""
    trace: Path | None = None
    """Folder into which it writes what its operators put out (megatron_rl_plugin/trace.py)."""
    devices: Sequence[str] = ()
    """GPUs as CUDA_VISIBLE_DEVICES names them, by default all that this process sees."""
    sleeps: bool = False
    """It can be told to `sleep`."""
    adapter_rank: int = 0
    """Rank of the adapter that it is given beside the model; 0: none."""
    adapter_modules: Sequence[str] = ()
    """Last parts of the names of the layers that have one (q_proj, ...)."""
    keeps_weights: bool = False
    """While it sleeps its weights are in host memory, and not lost."""
    key: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    """Requests need it as their bearer token; empty: it answers everybody."""

    def __post_init__(self) -> None:
        if self.feature_stride and not self.predictor:
            raise UserError(
                "router features come from the served model with predictors: feature_stride needs predictor"
            )
        self.model, self.log_path = Path(self.model), Path(self.log_path)  # a text does as well
        self.asleep: set[str] = set()
        """Tags of the memory that it has given up."""
        self._reserved = reserve_port()  # also between the two lives of a restarted server
        self.port = self._reserved.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen | None = None
        self._log_start = 0
        """Bytes of the log that are of earlier lives: of a resumed run, or before a restart."""

    @classmethod
    def from_config(
        cls,
        config: Config,
        *,
        log_path: Path = Path("sglang.log"),
        devices: Sequence[str] = (),
        sleeps: bool = False,
        trace: Path | None = None,
        key: str | None = None,
    ) -> RolloutServer:
        """The server that a training run with this config wants. key: by default a random one."""
        rollout, routing = config.rollout, config.routing
        support = SamplingSupport.from_config(rollout.sampling, config.pruning)
        modules: list[str] = []
        if serves_adapters(config.lora, config.sync):
            from megatron_rl.models.peft_folder import adapted_modules  # Megatron-Bridge, which takes seconds to import

            modules = adapted_modules(config.model.path, config.lora.targets)
        return cls(
            Path(config.model.path),
            rollout.server,
            dtype=config.precision.rollout,
            context_length=rollout.context_length,
            routes=asks_routes(rollout, routing),
            gates=asks_gates(rollout, routing),
            predictor=routing.source == "pr3",
            feature_stride=feature_stride(rollout, routing),
            processor=support.has_processor,
            kept_sets=support.keeps_sets,
            seeded_sets=support.keeps_sets and rollout.seed_requests,
            fp32_lm_head=config.precision.fp32_lm_head,
            identical=config.precision.identical,
            trace=trace,
            log_path=log_path,
            seed=config.seed,
            devices=devices,
            sleeps=sleeps,
            adapter_rank=config.lora.rank if modules else 0,
            adapter_modules=modules,
            # Between two refreshes it sleeps and wakes with what it has; else every wake is followed by a push.
            keeps_weights=sleeps and config.sync.refresh.when == "drift",
            key=key or secrets.token_hex(32),
        )

    def __enter__(self) -> RolloutServer:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()
        self._reserved.close()

    def command(self, machine: Machine | None = None) -> list[str]:
        """The server's command line on a machine, by default this one. Errors: UserError for extra_args that contradict it."""
        machine = machine or this_machine()
        routes = self.routes or self.predictor
        chosen = server_flags(self._hf_config(), self.dtype, machine, routes=routes, seeded_sets=self.seeded_sets)
        check_extra_args(self.config.extra_args, chosen)
        flags = {
            "--model-path": self.model,
            "--host": "127.0.0.1",
            "--port": self.port,
            "--dtype": ROLLOUT_DTYPES[self.dtype],
            "--context-length": self.context_length,
            "--mem-fraction-static": self.config.memory_fraction,
            "--tensor-parallel-size": self.config.tensor,
            "--expert-parallel-size": self.config.expert,
            "--random-seed": self.seed,
        }
        tokens = self.config.max_total_tokens
        if machine.gpu is None:
            tokens = tokens or CPU_CACHE_TOKENS
        if tokens:
            flags["--max-total-tokens"] = tokens
        module = "sglang_on_cpu" if machine.gpu is None else "sglang.launch_server"
        command = [str(find_python(self.config.python)), "-m", module]
        for name, value in flags.items():
            command += [name, str(value)]
        # Token ids go in and out: the trainer has the tokenizer, and a hop through the detokenizer less.
        command += ["--skip-tokenizer-init", "--log-level", "warning"]
        if self.routes:
            command.append("--enable-return-routed-experts")
        if self.processor:
            command.append("--enable-custom-logit-processor")
        if self.kept_sets:
            command += ["--sampling-mask-max-tokens", str(ROOM_FOR_TIES)]
        if self.fp32_lm_head:
            command.append("--enable-fp32-lm-head")
        for choice in chosen:
            command += [choice.flag, choice.value]
        if self.sleeps:
            command.append("--enable-memory-saver")
        if self.adapter_rank:
            command += ["--enable-lora", "--max-lora-rank", str(self.adapter_rank), "--max-loras-per-batch", "1"]
            command += ["--lora-target-modules", *self.adapter_modules]
            command += ["--lora-backend", "torch_native"] if machine.gpu is None else []
        if self.keeps_weights:
            command.append("--enable-weights-cpu-backup")
        overrides: dict[str, object] = {}
        if self.dtype == "fp8" and machine.gpu is not None:
            overrides["quantization_config"] = quantization_config()
            # The folder holds no scales. SGLang would quantize its weights itself, but not in blocks, and differently.
            command += ["--load-format", "dummy"]
        if self.identical:
            overrides[IDENTICAL] = str(OPERATORS)
        if self.trace:
            overrides[TRACE] = str(self.trace.resolve())
        if self.feature_stride:
            overrides["router_feature_stride"] = self.feature_stride
        if self.feature_stride or self.trace:
            # A graph's replay runs none of the code that picks the features, and no hooks.
            command += ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]
        if self.gates:
            overrides[GATES] = True
        if overrides:
            command += ["--json-model-override-args", json.dumps(overrides)]
        return command + self.config.extra_args

    def _hf_config(self) -> dict:
        try:
            return json.loads((self.model / "config.json").read_text())
        except FileNotFoundError:  # start() says so
            return {}

    def environment(self, machine: Machine | None = None) -> dict[str, str]:
        """The server's environment variables on a machine, by default this one."""
        machine = machine or this_machine()
        environment = {**NCCL_ENVIRONMENT, **os.environ, "HF_HUB_OFFLINE": "1"}  # the model is a folder
        if machine.gpu is not None and self.dtype == "fp32":
            environment = FP32_PRODUCTS | environment
        # Without compiled modules on disk each of SGLang's processes compiles thousands of them at every start.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        # The trainer's; SGLang's memory saver does not work on expandable segments.
        for name in ALLOCATOR_VARIABLES:
            environment.pop(name, None)
        # Log-probs are those of the distribution that is sampled from: at its temperature.
        environment.pop("SGLANG_RETURN_ORIGINAL_LOGPROB", None)
        # A dead worker has to be known at once, not after a dump of the others, during which requests hang.
        environment |= {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
        if self.devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices)
        if self.predictor:
            environment["SGLANG_EXTERNAL_MODEL_PACKAGE"] = MODELS_PACKAGE
        if machine.gpu is None:
            environment["OMP_NUM_THREADS"] = str(self.config.threads or os.cpu_count() or 1)
        else:
            environment |= cuda_tools(find_python(self.config.python))
        return environment | {KEY: self.key}

    def start(self) -> None:
        """Start the process; returns at once."""
        if not (self.model / "config.json").is_file():
            raise UserError(f"model '{self.model}' has no config.json: rollout needs a Hugging Face folder")
        command = self.command()
        check_plugin(find_python(self.config.python))
        self.asleep = set()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log_path, "a") as log:
            self._log_start = log.tell()
            self._process = self._spawn(command, self.environment(), log)

    @staticmethod
    def _spawn(command: list[str], environment: dict[str, str], log: TextIO) -> subprocess.Popen:
        """Start the supervisor, which starts the server. It ends when its standard input is closed."""
        return subprocess.Popen(
            [sys.executable, "-E", "-S", str(SUPERVISOR), str(STOP_GRACE_S), *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the trainer alone, which then ends the server in order
        )

    def wait_ready(self) -> None:
        """Wait until the server answers. Errors: UserError with SGLang's own reason when it dies or takes too long."""
        deadline = time.monotonic() + self.config.start_timeout_s
        while time.monotonic() < deadline:
            if not self.alive():
                status = self._process.wait() if self._process else None
                raise UserError(
                    f"SGLang did not start (exit status {status}): {reason_of_death(self.log_path, self._log_start)}"
                    f" [whole log: {self.log_path}]"
                )
            if self.ready():
                return
            time.sleep(0.1)
        raise UserError(
            f"SGLang was not ready after {self.config.start_timeout_s:.0f} s (rollout.server.start_timeout_s);"
            f" last line of {self.log_path}: {(tail(self.log_path, 1, self._log_start) or ['(empty)'])[0]}"
        )

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers that its requests need."""
        return bearer(self.key)

    def ready(self) -> bool:
        """True if it answers."""
        try:
            return ask_now("GET", f"{self.address}/ready", timeout_s=5.0).status == 200
        except NoAnswer:
            return False

    def alive(self) -> bool:
        """True if its process runs."""
        return self._process is not None and self._process.poll() is None

    def dead(self, patience_s: float = 0.0) -> bool:
        """True if the server has ended, or does so within the time."""
        deadline = time.monotonic() + patience_s
        while self.alive():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        return True

    def hangs(self) -> bool:
        """Tell if its process runs, and answers nothing, or computes nothing where it is not paused. Takes up to HANG_S."""
        if not self.alive():
            return False
        for path in ("/ready", "/health"):  # the latter computes a token
            try:
                answer = ask_now("GET", self.address + path, timeout_s=HANG_S)
            except NoAnswer:
                return True
            if answer.status >= 400:
                return path == "/health"  # one that is not ready is paused, as in a push
        return False

    def sleep(self, *tags: str) -> None:
        """Give up memory (MEMORY, or these tags of it); requests wait in the server until `wake`.

        The prefix cache goes with the cache, weights that are not kept are lost. One that is dead, or dies of it, has given
        up everything. Errors: UserError when it refuses, or takes longer than a start may.
        """
        if given := set(tags or MEMORY) - self.asleep:
            # Nothing may run while the cache is away, and SGLang gives it up only when nothing does.
            release = "/release_memory_occupation", {"tags": [*given]}
            self._control(("/pause_generation", {"mode": "retract"}), release)
            self.asleep |= given

    def wake(self, *tags: str) -> None:
        """Take memory back (all that was given up, or these tags of it); with the last of it, waiting requests go on."""
        taken = self.asleep & set(tags or MEMORY)
        calls: list[tuple[str, dict]] = [("/resume_memory_occupation", {"tags": [*taken]})] if taken else []
        if not self.asleep - taken:
            calls.append(("/continue_generation", {}))
        self._control(*calls, must_live=True)
        self.asleep -= taken

    def flush(self) -> None:
        """Empty the prefix cache; nothing may run. Errors: as of `wake`."""
        self._control((f"/flush_cache?timeout={FLUSH_S}", {}), must_live=True)

    def retract(self) -> None:
        """Stop what is being sampled and take its cache away: all its tokens are computed again. Errors: as of `wake`."""
        calls = ("/pause_generation", {"mode": "retract"}), ("/flush_cache", {}), ("/continue_generation", {})
        self._control(*calls, must_live=True)

    def _control(self, *calls: tuple[str, dict], must_live: bool = False) -> None:
        """POSTs in turn. Errors: UserError for a refusal; for one that is dead only where it must live."""
        for path, body in calls:
            try:
                answer = ask_now("POST", self.address + path, body, timeout_s=self.config.start_timeout_s, key=self.key)
                problem = str(answer) if answer.status >= 400 else ""
            except NoAnswer as error:
                problem = str(error)
            if problem:
                if must_live or not self.dead(DEATH_S):
                    raise UserError(f"SGLang at {self.address}{path}: {problem} [log: {self.log_path}]")
                return

    def stop(self) -> None:
        """End the whole process tree: SIGTERM, then SIGKILL. Returns when it is gone; harmless when called again."""
        if self._process is None or self._process.stdin is None:
            return
        self._process.stdin.close()
        try:
            self._process.wait(STOP_GRACE_S + 20)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the supervisor hangs: its server dies with it
            self._process.wait(20)
        self._process = None
