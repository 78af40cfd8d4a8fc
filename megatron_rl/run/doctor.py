"""`megatron-rl doctor`: show what this machine has, and which features each missing part disables."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from megatron_rl.errors import UserError
from megatron_rl.run.setup import at_hand
from megatron_rl.servers.own_environment import cuda_tools, find_python, plugin_problem

ENGINE_TIMEOUT_S = 120.0
"""Longest time in seconds for SGLang's Python environment to import SGLang. The import takes a few seconds on an idle
machine."""

NO_SECCOMP = "the package pyseccomp is not installed, which contains programs: run tools/setup.sh"

State = Literal["ok", "missing", "warning", "error"]
Look = str | tuple[State, str, str] | None
"""Result of a check: the version that was found, or None if the part is absent; or (state, found, note)."""


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table."""

    part: str
    state: State
    """missing: runs work without the part, with fewer features or slower; warning: something looks wrong; error:
    `megatron-rl train` with the default config cannot start here."""
    found: str
    note: str = ""
    """Effect of a missing part, or how to mend the problem."""


@dataclass(frozen=True)
class Check:
    """A check of the doctor: how to look for a part, and what to report if the part is absent or `look` fails."""

    part: str
    look: Callable[[], Look]
    cost: str = ""
    """Note to show if the part is absent."""
    absent: State = "missing"
    broken: State = "warning"
    """State to report if `look` raises an exception."""

    def finding(self) -> Finding:
        """Run the check on this machine and return its finding.

        An exception becomes a finding, so that one broken package does not hide the others.
        """
        try:
            found = self.look()
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name == "torch":
                return Finding(self.part, "missing", "unknown without torch")
            return Finding(self.part, self.broken, f"{type(error).__name__}: {error}"[:200])
        if isinstance(found, tuple):
            return Finding(self.part, *found)
        return Finding(self.part, "ok", found) if found else Finding(self.part, self.absent, "not installed", self.cost)


def doctor(as_json: bool = False) -> int:
    """Print what this machine has and lacks. Returns the exit status: 1 if a default run cannot start here, else 0."""
    findings = examine()
    if as_json:
        print(json.dumps([asdict(replace(f, note=at_hand(f.note))) for f in findings], indent=1))
    else:
        _print_table(findings)
    return int(any(finding.state == "error" for finding in findings))


def examine() -> list[Finding]:
    """Run all checks and return their findings."""
    engine = _start_engine_probe()
    return [check.finding() for check in (*CHECKS, Check("SGLang", lambda: _sglang(engine)))]


def _print_table(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    style = {"ok": "green", "missing": "yellow", "warning": "bold yellow", "error": "bold red"}
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for finding in findings:
        note = f"\n[dim]{escape(at_hand(finding.note))}[/]" if finding.note else ""
        table.add_row(finding.part, f"[{style[finding.state]}]{finding.state}[/]", escape(finding.found) + note)
    Console().print(table)


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_module(name: str) -> bool:
    """Return whether a module can be found, without importing it (its parent packages are imported)."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, AttributeError, ValueError):
        return False


def _folder_of(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None


# -- the trainer's environment -----------------------------------------------------------------------------------------


def _python() -> Look:
    version = platform.python_version()
    if sys.version_info[:2] == (3, 12):
        return f"{version} at {sys.executable}"
    return "warning", version, "the pinned packages are for Python 3.12: run tools/setup.sh"


def _machine() -> Look:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    disk = shutil.disk_usage(Path.cwd()).free / 2**30
    found = f"{cores} cores, {memory:.0f} GiB memory, {disk:.0f} GiB free on this disk"
    if memory < 8:
        return "warning", found, "trainer and SGLang together need about 6 GiB even for a tiny model"
    return ("warning", found, "checkpoints may not fit") if disk < 5 else found


def _torch() -> Look:
    if not _has_module("torch"):
        return None
    import torch

    found = f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})"
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        gpus = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        return f"{found}, {gpus}"
    found += ", no GPU"
    if shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists():
        note = (
            "an NVIDIA driver is installed, but torch cannot use it: compare its CUDA version (nvidia-smi) with torch's"
        )
        return "warning", found, note
    return "missing", found, "enough for tests, the quickstart and tiny models"


def _megatron_without_gpu() -> Look:
    import torch

    from megatron_rl import platform as cpu_platform

    if torch.cuda.is_available():
        missing = ", ".join(sorted(cpu_platform.missing_parts()))
        note = f"Megatron and SGLang run unchanged on a GPU{', except for missing packages' if missing else ''}"
        return "ok", f"replaces: {missing}" if missing else "inactive", note
    note = "no CUDA: megatron_rl/platform/ lets Megatron-Core and SGLang run here;"
    note += " `python -m megatron_rl.platform` lists the parts that it replaces"
    return "ok", f"active ({Path(cpu_platform.__file__).parent.name}/)", note


def _transformer_engine() -> Look:
    import torch

    from megatron_rl.platform import has_transformer_engine

    version = version_of("transformer-engine")
    if not torch.cuda.is_available():
        found = f"{version}, not used" if version else "not installed"
        return "missing", found, "it needs a GPU: Megatron's local layers are used, and FP8 is simulated"
    try:
        return (version or "found") if has_transformer_engine() else None
    except UserError as error:
        return "error", version or "broken", str(error)


def _recipes(side: Literal["trainer", "rollout"]) -> Look:
    """Return the values of precision.train or precision.rollout that this machine supports. A run makes the same check."""
    from megatron_rl.models.precision import SLOW_BF16, rollout_recipes, this_machine, trainer_recipes

    machine = this_machine()
    answers = (trainer_recipes if side == "trainer" else rollout_recipes)(machine).values()
    found = {state: [a for a in answers if a.state == state] for state in ("runs", "simulated", "cannot")}
    here = [a.recipe for a in found["runs"]] + [f"{a.recipe} (simulated)" for a in found["simulated"]]
    notes = [f"simulated: {reason}" for reason in {a.reason: 0 for a in found["simulated"]}]
    notes += [f"{a.recipe} {a.reason}" for a in found["cannot"]]
    notes += [] if machine.fast_bf16 else [f"{SLOW_BF16}: use fp32"]
    return "missing" if found["cannot"] else "ok", ", ".join(here), "; ".join(notes)


def _flash_attention() -> Look:
    from megatron_rl.models.precision import this_machine
    from megatron_rl.ops import flash

    found, gpu = flash.installed(), this_machine().gpu
    names = ", ".join({"torch": "torch's own (FlashAttention 2)"}.get(name, name) for name in found)
    try:
        taken = flash.activate("auto", gpu)
    except ValueError as error:
        return "error", names, f"{error}; set model.flash_attention: torch, which does not need it"
    return "ok", names, f"model.flash_attention: auto uses {taken} here, in bf16" if gpu and len(found) > 1 else ""


def _apex() -> Look:
    """Look for NVIDIA's Apex: it has apex/normalization, and amp_C if built with CUDA. PyPI's `apex` is a web toolkit."""
    import torch

    if (folder := _folder_of("apex")) is None:
        return None
    if not (folder / "normalization").is_dir():
        note = "PyPI's `apex` is not NVIDIA's, and Megatron may import it by mistake: uninstall it, then build NVIDIA's"
        return (
            "warning",
            f"an unrelated package with this name ({version_of('apex') or folder})",
            f"{note} from its source",
        )
    if not _has_module("amp_C"):
        note = "its fused kernels are missing; build it with APEX_CPP_EXT=1 APEX_CUDA_EXT=1, or uninstall it"
        is_adam = torch.cuda.is_available() and not _has_module("transformer_engine")  # Megatron then uses Apex's
        return "error" if is_adam else "warning", f"{version_of('apex')}, without its CUDA extensions", note
    return version_of("apex") or "found"


def _deepep() -> Look:
    return (version_of("deep_ep") or "found") if _has_module("deep_ep") else None


def _extension() -> Look:
    import torch

    try:
        from megatron_rl.ops import extensions
    except UserError as error:
        return "error", "not built", str(error)[:300]
    isa = torch.backends.cpu.get_cpu_capability()
    gpu = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    otherwise = "model.kernels: any uses plain torch: the same numbers, slower and with more memory"
    if gpu and gpu < extensions.CAPABILITY:
        note = f"the CUDA part needs compute capability 8.0 or later, and this GPU has {gpu[0]}.{gpu[1]}: {otherwise}"
        return "error", f"CPU ({isa})", note
    if extensions.have_cuda():
        return f"CPU ({isa}) and CUDA"
    note = "runs on a GPU do not start without the CUDA part: tools/setup.sh --gpu installs nvcc and builds it;"
    return "error" if gpu else "ok", f"CPU ({isa}) only", f"{note} or {otherwise}"


def _sandbox() -> Look:
    from megatron_rl.sandbox import bubblewrap

    if not _has_module("pyseccomp"):
        return "missing", "model-written code is refused", NO_SECCOMP
    if problem := bubblewrap.problem():
        return "missing", "model-written code is refused", problem
    version = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, timeout=20).stdout.strip()
    user = "as nobody" if os.geteuid() == 0 else "as this user, mapped to nobody"
    held = f"{version}, user namespaces, seccomp, {user}"
    return "ok", held, "in a container: no network, no files of this machine, limits on time and memory"


def _control_groups() -> Look:
    from megatron_rl.sandbox import cgroup

    if version := cgroup.version():
        return "ok", version, "the kernel limits a container's memory, including memory of the kernel for the container"
    note = (
        "a container's memory is measured ten times per second instead; memory of the kernel for it (pipes, sockets)"
        " is not counted"
    )
    return "missing", "this user cannot create any", note


def _scorers() -> Look:
    from megatron_rl.sandbox import isolated

    if not _has_module("pyseccomp"):
        return "missing", "reasoning_gym tasks are refused", NO_SECCOMP
    if problem := isolated.problem():
        return "missing", "reasoning_gym tasks are refused", problem
    if os.geteuid() == 0:
        return "seccomp, as nobody" if isolated.drops_user() else "seccomp, without capabilities"
    return "ok", "seccomp, as this user", "scorers can read this user's files, but cannot send them anywhere"


def _package(name: str, cost: str, absent: State = "missing") -> Check:
    return Check(name, lambda: version_of(name), cost, absent)


CHECKS = (
    Check("python", _python),
    Check("machine", _machine),
    _package("megatron-core", "training is not possible: run tools/setup.sh", "error"),
    _package("megatron-bridge", "Hugging Face models cannot be loaded: run tools/setup.sh", "error"),
    _package("transformers", "models and tokenizers cannot be read: run tools/setup.sh", "error"),
    _package("nvidia-modelopt", "no FP8 rollout weights, no FP8 export, no simulated FP8: run tools/setup.sh"),
    Check("torch and GPUs", _torch, "nothing can be trained: run tools/setup.sh", "error", broken="error"),
    Check("CPU platform", _megatron_without_gpu),
    Check(
        "Transformer Engine",
        _transformer_engine,
        "Megatron's local layers are used: no FP8 training, no fused norms, router and Adam, one matrix product per"
        " expert; tools/setup.sh --gpu builds Transformer Engine",
    ),
    Check("trainer precision", lambda: _recipes("trainer")),
    Check("rollout precision", lambda: _recipes("rollout")),
    Check("flash attention", _flash_attention),
    Check(
        "NVIDIA Apex",
        _apex,
        "torch's optimizer is used instead of the fused one (unless Transformer Engine is installed), and gradients"
        " are not accumulated within the matrix products; docs/gpu.md tells how to build Apex",
    ),
    Check("DeepEP", _deepep, "model.moe_dispatcher: flex cannot be used; use alltoall"),
    Check("megatron_rl's kernels", _extension, broken="error"),
    _package("wandb", "logging.trackers: [wandb] cannot be used; use tensorboard"),
    Check("sandbox", _sandbox),
    Check("control groups", _control_groups),
    Check("third-party scorers", _scorers),
)


# -- SGLang's environment ----------------------------------------------------------------------------------------------

_PROBE = """
import importlib.metadata as m, json, sys
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
out = {name: version(name) for name in ("sglang", "torch", "transformers")}
try:
    from megatron_rl_plugin.installed import installed_code
    out["code"] = installed_code()
except ImportError:
    out["code"] = None
try:
    if sys.argv[1:] == ["cpu"]:
        import sglang_on_cpu
        sglang_on_cpu.prepare()
    import sglang.srt.server_args
    out["problem"] = None
except BaseException as error:
    out["problem"] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps(out))
"""


def _start_engine_probe() -> tuple[Path | None, subprocess.Popen | None]:
    """Start a process that imports SGLang in its own environment while the other checks run.

    Returns (the environment's Python, the process).
    """
    with contextlib.suppress(Exception):
        python = find_python()
        gpu = Path("/dev/nvidiactl").exists()  # not asked of torch, whose import is slow
        with contextlib.suppress(OSError):
            return python, subprocess.Popen(
                [str(python), "-c", _PROBE, *([] if gpu else ["cpu"])],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=os.environ | (cuda_tools(python) if gpu else {}),
            )
        return python, None
    return None, None


def _sglang(probe: tuple[Path | None, subprocess.Popen | None]) -> Look:
    python, process = probe
    if python is None:
        remedy = "run tools/setup.sh, set rollout.server.python, or list running servers in rollout.addresses"
        found = "no .venv-rollout beside the package or in the current folder"
        return "error", found, f"rollouts are not possible on this machine: {remedy}; SFT needs no rollouts"
    if process is None:
        return "error", str(python), "this Python does not start: tools/setup.sh --force recreates the environment"
    try:
        output, _ = process.communicate(timeout=ENGINE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return "warning", str(python), f"importing SGLang took longer than {ENGINE_TIMEOUT_S:.0f} s"
    lines = output.strip().splitlines()
    if process.returncode or not lines:
        return "error", str(python), f"importing SGLang ended its Python with status {process.returncode}"
    found = json.loads(lines[-1])
    text = f"sglang {found['sglang']}, torch {found['torch']}, transformers {found['transformers']} at {python}"
    if problem := plugin_problem(python, found["code"]):
        return "error", text, problem
    if found["problem"]:
        problem = f"SGLang cannot be imported ({found['problem'][:200]}), so rollouts are not possible on this machine"
        return "error", text, f"{problem}: tools/setup.sh --force recreates the environment"
    pieces = "with sglang_on_cpu's stand-ins" if not Path("/dev/nvidiactl").exists() else ""
    return "ok", text, f"imports {pieces}".strip()
