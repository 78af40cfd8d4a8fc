"""One SGLang server that the trainer starts on its own machine: start, wait until ready, restart, stop."""

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
"""File with the trainer's operators, which a server uses too if precision.identical is set."""
SUPERVISOR = Path(__file__).with_name("supervise.py")
MODELS_PACKAGE = "megatron_rl_models"
"""Value of SGLANG_EXTERNAL_MODEL_PACKAGE for a server with route predictors: the package of its model classes."""
STOP_GRACE_S = 3.0
"""Seconds between SIGTERM and SIGKILL."""
CPU_CACHE_TOKENS = 65_536
FLUSH_S = 60
"""Seconds for which SGLang may wait for running requests before it empties its cache."""
MEMORY = ("kv_cache", "weights")
"""SGLang's tags for the memory that a sleeping server releases. CUDA graphs keep their buffers, so addresses stay valid."""
DEATH_S = 3.0
"""Seconds to wait for a server's end after a failed call. The processes of a killed server do not all end at once."""
SHARED_MEMORY = "/dev/shm"
HANG_S = 30.0
"""Longest wait for the answer to a health check, in seconds. SGLang waits 20 s for a test token before it reports failure."""
_BUS_ERROR = re.compile(r"(?:exit code:?|terminated with|with code) -7\b|Fatal Python error: Bus error")


def reserve_port(host: str = "127.0.0.1") -> socket.socket:
    """Return a socket on a free port of the host (`getsockname()[1]`); no other process gets the port while it is open.

    The socket does not listen, so connections are refused and a server can listen on the port. Linux lets two sockets with
    SO_REUSEADDR share an address if at most one of them listens. Without a reservation, another process may take the port (a
    rendezvous, an outgoing connection) before SGLang has finished its imports and binds the port.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved


def tail(path: Path, lines: int, since: int) -> list[str]:
    """Return the last non-empty lines of a log, ignoring its first `since` bytes."""
    try:
        with open(path, errors="replace") as log:
            log.seek(since)
            return [line.rstrip() for line in deque(filter(str.strip, log), lines)]
    except OSError:
        return []


def reason_of_death(path: Path, since: int = 0) -> str:
    """Return why SGLang ended, from its log: the line of the last exception, or else the last line.

    If the exception has no text, the log line above it is added. An error about a port in use takes precedence, because later
    lines are about requests that SGLang sent to the program with this port. SIGBUS also takes precedence, because SGLang
    reports SIGBUS as a general memory problem. since: number of bytes at the start of the log that are not read, because an
    earlier process wrote them.
    """
    lines = tail(path, 400, since)
    for line in lines:
        if f"[Errno {errno.EADDRINUSE}]" in line:
            return line
        if _BUS_ERROR.search(line):
            free = shutil.disk_usage(SHARED_MEMORY).free
            return (
                f"one of its processes ended by SIGBUS, as happens if {SHARED_MEMORY} is full: it has {free:,} bytes free now;"
                f" remove files of ended programs there, or make it larger (mount -o remount,size=SIZE {SHARED_MEMORY};"
                " for a container --shm-size)"
            )
    for index in reversed(range(len(lines))):
        line = lines[index]
        if re.match(r"^(\w+\.)*\w*(Error|Exception|Interrupt)\b", line) or "error: " in line:
            bare = ":" not in line and index
            return f"{line} at '{lines[index - 1].strip()}'" if bare else line
    return lines[-1] if lines else "its log is empty"


def asks_gates(rollout: RolloutConfig, routing: RoutingConfig) -> bool:
    """Return whether replies contain the gate values of the chosen experts, in addition to the routes."""
    return asks_routes(rollout, routing) and (rollout.gates or routing.replay_gates)


def serves_adapters(lora: LoRAConfig, sync: SyncConfig) -> bool:
    """Return whether servers hold the base model and unmerged LoRA adapters."""
    return lora.rank > 0 and sync.adapters == "unmerged"


def feature_stride(rollout: RolloutConfig, routing: RoutingConfig) -> int:
    """Return the stride s with which the engine exports router features: those of every s-th response token; 0: none.

    The stride is the smallest with which the longest response has at most routing.cached_tokens tokens with features.
    """
    if routing.source != "pr3" or routing.features != "engine":
        return 0
    return -(-rollout.max_new_tokens // routing.cached_tokens)


@dataclass(eq=False)
class RolloutServer:
    """One SGLang server on 127.0.0.1, which this process starts.

    `with RolloutServer(...) as server:` starts the server and waits until it answers. The server's whole process tree ends when
    the block is left, and also if this process ends for any reason. `address` stays the same if the server is restarted.
    Errors: UserError for a feature_stride without predictor.
    """

    model: Path
    """Hugging Face folder of the model."""
    config: ServerConfig
    _: KW_ONLY
    dtype: str = "bf16"
    """bf16 | fp32 | fp8. On a GPU, fp8 weights are block-quantized, and the first push sets them. Elsewhere fp8 means bf16."""
    context_length: int = 4096
    routes: bool = False
    """True if the server records the routes (indices of the chosen experts) of every token."""
    gates: bool = False
    """True if the server also records the gate values of the chosen experts."""
    log_path: Path = Path("sglang.log")
    seed: int = 0
    predictor: bool = False
    """True if every router has a route predictor. Its weights are zero until the trainer pushes them."""
    feature_stride: int = 0
    """Stride s > 0: all replies contain router features of every s-th response token (`EngineFeatures`); 0: none."""
    processor: bool = False
    """True if requests may use the logit processor for pruning.enabled and rollout.sampling.tail_floor (`SamplingSupport`)."""
    kept_sets: bool = False
    """True if requests may ask for the set of tokens that the truncation of the distribution (top-p, top-k) keeps."""
    seeded_sets: bool = False
    """True if requests with `kept_sets` may have seeds."""
    fp32_lm_head: bool = False
    identical: bool = False
    """True if the server uses the trainer's operators (precision.identical)."""
    trace: Path | None = None
    """Folder into which the server writes the outputs of its operators (megatron_rl_plugin/trace.py)."""
    devices: Sequence[str] = ()
    """Names of the server's GPUs, as in CUDA_VISIBLE_DEVICES; empty: all GPUs that this process sees."""
    sleeps: bool = False
    """True if the server supports `sleep`, which releases its GPU memory."""
    adapter_rank: int = 0
    """Rank of the LoRA adapter that is served with the base model; 0: no adapter."""
    adapter_modules: Sequence[str] = ()
    """Name suffixes of the layers that have an adapter, such as q_proj."""
    keeps_weights: bool = False
    """True if a sleeping server keeps its weights in host memory, instead of losing them."""
    key: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    """Bearer token that requests need; empty: the server answers every request."""

    def __post_init__(self) -> None:
        if self.feature_stride and not self.predictor:
            raise UserError(
                "router features come from the served model with predictors: feature_stride needs predictor"
            )
        self.model, self.log_path = Path(self.model), Path(self.log_path)  # strings are accepted too
        self.asleep: set[str] = set()
        """Tags of the memory that the server has released."""
        self._reserved = reserve_port()  # keeps the port during a restart
        self.port = self._reserved.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen | None = None
        self._log_start = 0
        """Size of the log in bytes at the last start of the server. Older lines are from before a restart or a resumption."""

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
        """Return the server that a training run with this config needs. key: by default a random key."""
        rollout, routing = config.rollout, config.routing
        support = SamplingSupport.from_config(rollout.sampling, config.pruning)
        modules: list[str] = []
        if serves_adapters(config.lora, config.sync):
            from megatron_rl.models.peft_folder import adapted_modules  # imports Megatron-Bridge, which takes seconds

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
            # Between two refreshes the server sleeps and wakes with its weights; otherwise a push follows every wake.
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
        """Return the server's command line on a machine (default: this one).

        Errors: UserError if extra_args contradict the config.
        """
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
        # Requests and replies are token ids: the trainer has the tokenizer, and this saves the hop through the detokenizer.
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
            # The folder holds no scales. SGLang could quantize the weights itself, but not in blocks and with other results.
            command += ["--load-format", "dummy"]
        if self.identical:
            overrides[IDENTICAL] = str(OPERATORS)
        if self.trace:
            overrides[TRACE] = str(self.trace.resolve())
        if self.feature_stride:
            overrides["router_feature_stride"] = self.feature_stride
        if self.feature_stride or self.trace:
            # A replayed CUDA graph skips the code that picks the features, and hooks.
            command += ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]
        if self.gates:
            overrides[GATES] = True
        if overrides:
            command += ["--json-model-override-args", json.dumps(overrides)]
        return command + self.config.extra_args

    def _hf_config(self) -> dict:
        try:
            return json.loads((self.model / "config.json").read_text())
        except FileNotFoundError:  # start() reports it
            return {}

    def environment(self, machine: Machine | None = None) -> dict[str, str]:
        """Return the server's environment variables on a machine (default: this one)."""
        machine = machine or this_machine()
        environment = {**NCCL_ENVIRONMENT, **os.environ, "HF_HUB_OFFLINE": "1"}  # the model is a folder
        if machine.gpu is not None and self.dtype == "fp32":
            environment = FP32_PRODUCTS | environment
        # Without compiled modules on disk, each SGLang process would compile thousands of them at every start.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        # These are for the trainer; SGLang's memory saver does not work on expandable segments.
        for name in ALLOCATOR_VARIABLES:
            environment.pop(name, None)
        # Log-probs must belong to the distribution that is sampled from, at its temperature.
        environment.pop("SGLANG_RETURN_ORIGINAL_LOGPROB", None)
        # A dead worker must be noticed at once, not after a dump of the other workers, during which requests hang.
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
        """Start the process, without waiting for the server."""
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
        """Start the supervisor, which starts the server. The supervisor ends when its standard input is closed."""
        return subprocess.Popen(
            [sys.executable, "-E", "-S", str(SUPERVISOR), str(STOP_GRACE_S), *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches only the trainer, which then stops the server
        )

    def wait_ready(self) -> None:
        """Wait until the server answers. Errors: UserError with SGLang's own reason if the server dies or takes too long."""
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
        """HTTP headers with the API key, which requests to the server need."""
        return bearer(self.key)

    def ready(self) -> bool:
        """Return whether the server answers."""
        try:
            return ask_now("GET", f"{self.address}/ready", timeout_s=5.0).status == 200
        except NoAnswer:
            return False

    def alive(self) -> bool:
        """Return whether the server's process runs."""
        return self._process is not None and self._process.poll() is None

    def dead(self, patience_s: float = 0.0) -> bool:
        """Return whether the server has ended, or ends within `patience_s` seconds."""
        deadline = time.monotonic() + patience_s
        while self.alive():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        return True

    def hangs(self) -> bool:
        """Return True if the server is alive but does not answer, or if it computes no token and is not paused.

        Takes up to HANG_S seconds.
        """
        if not self.alive():
            return False
        for path in ("/ready", "/health"):  # /health computes a token
            try:
                answer = ask_now("GET", self.address + path, timeout_s=HANG_S)
            except NoAnswer:
                return True
            if answer.status >= 400:
                return path == "/health"  # a server that is not ready is paused, as in a push
        return False

    def sleep(self, *tags: str) -> None:
        """Release memory (all of MEMORY, or the given tags); requests wait in the server until `wake`.

        Releasing the KV cache drops the prefix cache. Released weights are lost unless `keeps_weights` is set. If the
        server is dead or dies during the call, its memory counts as released. Errors: UserError if the server refuses, or needs
        longer than rollout.server.start_timeout_s.
        """
        if given := set(tags or MEMORY) - self.asleep:
            # Nothing may run while the cache is released, and SGLang releases the cache only if nothing runs.
            release = "/release_memory_occupation", {"tags": [*given]}
            self._control(("/pause_generation", {"mode": "retract"}), release)
            self.asleep |= given

    def wake(self, *tags: str) -> None:
        """Allocate released memory again: all of it, or the given tags. If nothing stays released, waiting requests continue.

        Errors: UserError as for `sleep`, and also if the server is dead.
        """
        taken = self.asleep & set(tags or MEMORY)
        calls: list[tuple[str, dict]] = [("/resume_memory_occupation", {"tags": [*taken]})] if taken else []
        if not self.asleep - taken:
            calls.append(("/continue_generation", {}))
        self._control(*calls, must_live=True)
        self.asleep -= taken

    def flush(self) -> None:
        """Empty the prefix cache. No request may be running. Errors: UserError as for `wake`."""
        self._control((f"/flush_cache?timeout={FLUSH_S}", {}), must_live=True)

    def retract(self) -> None:
        """Interrupt running requests and drop the KV cache. The requests continue, and all their tokens are computed again.

        Errors: UserError as for `wake`.
        """
        calls = ("/pause_generation", {"mode": "retract"}), ("/flush_cache", {}), ("/continue_generation", {})
        self._control(*calls, must_live=True)

    def _control(self, *calls: tuple[str, dict], must_live: bool = False) -> None:
        """POST the calls (path, body) one after the other.

        Errors: UserError if a call fails; for a dead server only if `must_live` is set.
        """
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
        """End the whole process tree by SIGTERM, then SIGKILL, and wait until it is gone. May be called again."""
        if self._process is None or self._process.stdin is None:
            return
        self._process.stdin.close()
        try:
            self._process.wait(STOP_GRACE_S + 20)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the supervisor hangs; its server dies with it
            self._process.wait(20)
        self._process = None
