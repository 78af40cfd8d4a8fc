"""`megatron-rl doctor`: what this machine has, and what each missing part costs."""

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from megatron_rl.errors import UserError
from megatron_rl.servers.own_environment import cuda_tools, find_python, plugin_problem

ENGINE_TIMEOUT_S = 120.0
"""Longest wait for SGLang's environment to import it; a few seconds on an idle machine."""

State = Literal["ok", "missing", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    part: str
    state: State
    """missing: runs work without it, at a cost; warning: something looks wrong; error: `megatron-rl train` with the config's
    defaults could not start here."""
    found: str
    note: str = ""
    """Cost of its absence, or the remedy."""


def doctor(as_json: bool = False) -> int:
    """Print the findings. Returns the exit status: 1 if an error keeps a run from starting here, else 0."""
    findings = examine()
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        _print_table(findings)
    return int(any(finding.state == "error" for finding in findings))


def examine() -> list[Finding]:
    """All findings. A check that fails itself becomes a warning, or an error where every run needs its part."""
    engine = _start_engine_probe()
    checks = [
        _python,
        _machine,
        *(_package_check(*package) for package in PACKAGES),
        _torch,
        _megatron_without_gpu,
        _transformer_engine,
        lambda: _recipes("trainer"),
        lambda: _recipes("rollout"),
        _flash_attention,
        _apex,
        _deepep,
        _extension,
        _wandb,
        _sandbox,
        _control_groups,
        _scorers,
        lambda: _sglang(engine),
    ]
    findings = []
    for check in checks:
        try:
            findings.append(check())
        except Exception as error:  # a broken package must not keep the others from being seen
            name = getattr(check, "__name__", "check").strip("_").replace("_", " ")
            state = "error" if check in (_torch, _extension) else "warning"
            findings.append(Finding(name, state, f"{type(error).__name__}: {error}"[:200]))
    return findings


def _print_table(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    style = {"ok": "green", "missing": "yellow", "warning": "bold yellow", "error": "bold red"}
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for finding in findings:
        note = f"\n[dim]{escape(finding.note)}[/]" if finding.note else ""
        table.add_row(finding.part, f"[{style[finding.state]}]{finding.state}[/]", escape(finding.found) + note)
    Console().print(table)


def version_of(package: str) -> str | None:
    """Version of an installed package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_module(name: str) -> bool:
    """True if a module can be found, without importing it (its parent packages are imported)."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, AttributeError, ValueError):
        return False


def _folder_of(package: str) -> Path | None:
    """Folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None


# -- the trainer's environment -----------------------------------------------------------------------------------------

PACKAGES = [
    ("megatron-core", True, "nothing can be trained"),
    ("megatron-bridge", True, "no Hugging Face model can be loaded"),
    ("transformers", True, "no model or tokenizer can be read"),
    ("nvidia-modelopt", False, "no FP8 rollout weights, no FP8 export, no simulated FP8"),
]


def _package_check(name: str, needed: bool, cost: str) -> Callable[[], Finding]:
    def check() -> Finding:
        if version := version_of(name):
            return Finding(name, "ok", version)
        return Finding(name, "error" if needed else "missing", "not installed", f"{cost}: run tools/setup.sh")

    return check


def _python() -> Finding:
    version = platform.python_version()
    if sys.version_info[:2] == (3, 12):
        return Finding("python", "ok", f"{version} at {sys.executable}")
    return Finding("python", "warning", version, "the pinned packages are those of Python 3.12: run tools/setup.sh")


def _machine() -> Finding:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    disk = shutil.disk_usage(Path.cwd()).free / 2**30
    found = f"{cores} cores, {memory:.0f} GiB memory, {disk:.0f} GiB free on this disk"
    if memory < 8:
        return Finding(
            "machine", "warning", found, "trainer and SGLang together need about 6 GiB even for a tiny model"
        )
    if disk < 5:
        return Finding("machine", "warning", found, "checkpoints may not fit")
    return Finding("machine", "ok", found)


def _torch() -> Finding:
    import torch

    found = f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})"
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        gpus = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        return Finding("torch and GPUs", "ok", f"{found}, {gpus}")
    found += ", no GPU"
    if shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists():
        note = "there is an NVIDIA driver, but torch cannot use it: compare its CUDA version (nvidia-smi) with torch's"
        return Finding("torch and GPUs", "warning", found, note)
    return Finding("torch and GPUs", "missing", found, "right for tests, the quickstart and tiny models alone")


def _megatron_without_gpu() -> Finding:
    import torch

    from megatron_rl import platform as cpu_platform

    if torch.cuda.is_available():
        missing = ", ".join(sorted(cpu_platform.missing_parts()))
        note = f"Megatron and SGLang run as they are on a GPU{', but for missing packages' if missing else ''}"
        return Finding("CPU platform", "ok", f"fills in for: {missing}" if missing else "inactive", note)

    return Finding(
        "CPU platform",
        "ok",
        f"active ({Path(cpu_platform.__file__).parent.name}/)",
        "there is no CUDA: megatron_rl/platform/ is what makes Megatron-Core and SGLang run here;"
        " `python -m megatron_rl.platform` lists what it replaces",
    )


def _transformer_engine() -> Finding:
    import torch

    from megatron_rl.platform import has_transformer_engine

    name = "Transformer Engine"
    version = version_of("transformer-engine")
    if not torch.cuda.is_available():
        found = f"{version}, left alone" if version else "not installed"
        return Finding(name, "missing", found, "it computes on a GPU alone: local layers, and FP8 is simulated")
    try:
        if has_transformer_engine():
            return Finding(name, "ok", version or "found")
    except UserError as error:
        return Finding(name, "error", version or "broken", str(error))
    return Finding(
        name,
        "missing",
        "not installed",
        "Megatron's local layers are used: no FP8 training, no fused norms, router and Adam, one matrix product an expert;"
        " tools/setup.sh --gpu builds it",
    )


def _recipes(side: Literal["trainer", "rollout"]) -> Finding:
    """The recipes of precision.train or precision.rollout that run here, by the check that admits or refuses a run."""
    from megatron_rl.models.precision import SLOW_BF16, rollout_recipes, this_machine, trainer_recipes

    machine = this_machine()
    answers = (trainer_recipes if side == "trainer" else rollout_recipes)(machine).values()
    found = {state: [a for a in answers if a.state == state] for state in ("runs", "simulated", "cannot")}
    here = [
        f"{a.recipe} (simulated)" if a.state == "simulated" else a.recipe for a in found["runs"] + found["simulated"]
    ]
    notes = [f"simulated: {reason}" for reason in {a.reason: 0 for a in found["simulated"]}]
    notes += [f"{a.recipe} {a.reason}" for a in found["cannot"]]
    notes += [] if machine.fast_bf16 else [f"{SLOW_BF16}: take fp32"]
    return Finding(f"{side} precision", "missing" if found["cannot"] else "ok", ", ".join(here), "; ".join(notes))


def _flash_attention() -> Finding:
    from megatron_rl.models.precision import this_machine
    from megatron_rl.ops import flash

    part, found, gpu = "flash attention", flash.installed(), this_machine().gpu
    names = ", ".join({"torch": "torch's own (FlashAttention 2)"}.get(name, name) for name in found)
    try:
        taken = flash.activate("auto", gpu)
    except ValueError as error:
        return Finding(part, "error", names, f"{error}; model.flash_attention: torch does without it")
    note = f"model.flash_attention: auto takes {taken} here, in bf16" if gpu and len(found) > 1 else ""
    return Finding(part, "ok", names, note)


def _apex() -> Finding:
    """Look for NVIDIA's Apex: it has apex/normalization, and amp_C if built with CUDA. PyPI's `apex` is a web toolkit."""
    folder = _folder_of("apex")
    name = "NVIDIA Apex"
    if folder is None:
        cost = "torch's optimizer instead of the fused one (unless Transformer Engine is there), and gradients are not"
        return Finding(
            name, "missing", "not installed", f"{cost} accumulated within the products; docs/gpu.md builds it"
        )
    if not (folder / "normalization").is_dir():
        return Finding(
            name,
            "warning",
            f"an unrelated package of that name ({version_of('apex') or folder})",
            "PyPI's `apex` is not NVIDIA's, and Megatron may import it by mistake: uninstall it,"
            " then build NVIDIA's from its source",
        )
    if not _has_module("amp_C"):
        note = "its fused kernels are missing; build it with APEX_CPP_EXT=1 APEX_CUDA_EXT=1, or uninstall it"
        state = "error" if _adam_is_apex() else "warning"
        return Finding(name, state, f"{version_of('apex')}, without its CUDA extensions", note)
    return Finding(name, "ok", version_of("apex") or "found")


def _adam_is_apex() -> bool:
    """True if Megatron takes Apex's Adam where Apex is: on a GPU without Transformer Engine."""
    import torch

    return torch.cuda.is_available() and not _has_module("transformer_engine")


def _deepep() -> Finding:
    if _has_module("deep_ep"):
        return Finding("DeepEP", "ok", version_of("deep_ep") or "found")
    return Finding("DeepEP", "missing", "not installed", "model.moe_dispatcher: flex cannot be used; alltoall can")


def _extension() -> Finding:
    """The compiled kernels of csrc/."""
    import torch

    part = "megatron_rl's kernels"
    try:
        from megatron_rl.ops import extensions
    except UserError as error:
        return Finding(part, "error", "not built", str(error)[:300])
    isa = torch.backends.cpu.get_cpu_capability()
    gpu = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    otherwise = "model.kernels: any takes plain torch: the same numbers, slower and with more memory"
    if gpu and gpu < extensions.CAPABILITY:
        note = f"the CUDA part runs on GPUs of compute capability 8.0 and later, this one has {gpu[0]}.{gpu[1]}: {otherwise}"
        return Finding(part, "error", f"CPU ({isa})", note)
    if extensions.have_cuda():
        return Finding(part, "ok", f"CPU ({isa}) and CUDA")
    note = (
        f"no run starts on a GPU like this: tools/setup.sh --gpu installs nvcc and builds the CUDA part; or {otherwise}"
    )
    return Finding(part, "error" if gpu else "ok", f"CPU ({isa}) alone", note)


def _wandb() -> Finding:
    if version := version_of("wandb"):
        return Finding("wandb", "ok", version)
    return Finding("wandb", "missing", "not installed", "logging.wandb_project cannot be used; TensorBoard can")


def _sandbox() -> Finding:
    """Find the sandbox for model-written code."""
    from megatron_rl.sandbox import bubblewrap

    if problem := bubblewrap.problem():
        return Finding("sandbox", "missing", "model-written code is refused", problem)
    version = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, timeout=20).stdout.strip()
    user = "as nobody" if os.geteuid() == 0 else "as this user, who is nobody there"
    held = f"{version}, user namespaces, seccomp, {user}"
    return Finding("sandbox", "ok", held, "contained: no network, no files of this machine, limits on time and memory")


def _control_groups() -> Finding:
    """The bounds on the memory of all processes of a container, and the kernel's for them."""
    from megatron_rl.sandbox import cgroup

    name = "control groups"
    if version := cgroup.version():
        return Finding(name, "ok", version, "the kernel bounds a container's memory, its own for it included")
    note = "a container's memory is looked at ten times a second instead; the kernel's for it (pipes, sockets) is not counted"
    return Finding(name, "missing", "none can be made by this user", note)


def _scorers() -> Finding:
    """The isolation of scorers that others wrote."""
    from megatron_rl.sandbox import isolated

    name = "scorers of others"
    if problem := isolated.problem():
        return Finding(name, "missing", "reasoning_gym tasks are refused", problem)
    if os.geteuid() == 0:
        return Finding(name, "ok", "seccomp, as nobody" if isolated.drops_user() else "seccomp, without capabilities")
    return Finding(name, "ok", "seccomp, as this user", "they can read what this user can, and tell nobody")


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
    """Import SGLang in its own Python while the other checks run: (its python, the process)."""
    with contextlib.suppress(Exception):
        python = find_python()
        gpu = Path("/dev/nvidiactl").exists()  # looked for without torch, for speed
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


def _sglang(probe: tuple[Path | None, subprocess.Popen | None]) -> Finding:
    python, process = probe
    if python is None:
        return Finding(
            "SGLang",
            "error",
            "no .venv-rollout beside the package or in the current folder",
            "no rollouts on this machine: run tools/setup.sh, set rollout.server.python, or list running"
            " servers in rollout.addresses; SFT needs none",
        )
    if process is None:
        return Finding(
            "SGLang", "error", str(python), "this Python does not start: tools/setup.sh --force makes it anew"
        )
    try:
        output, _ = process.communicate(timeout=ENGINE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Finding("SGLang", "warning", str(python), f"importing it took longer than {ENGINE_TIMEOUT_S:.0f} s")
    lines = output.strip().splitlines()
    if process.returncode or not lines:
        return Finding(
            "SGLang", "error", str(python), f"its Python ended with status {process.returncode} on importing it"
        )
    found = json.loads(lines[-1])
    text = f"sglang {found['sglang']}, torch {found['torch']}, transformers {found['transformers']} at {python}"
    if problem := plugin_problem(python, found["code"]):
        return Finding("SGLang", "error", text, problem)
    if found["problem"]:
        return Finding(
            "SGLang",
            "error",
            text,
            f"it cannot be imported ({found['problem'][:200]}), so no rollouts on"
            " this machine: tools/setup.sh --force makes it anew",
        )
    pieces = "with sglang_on_cpu's stand-ins" if not Path("/dev/nvidiactl").exists() else ""
    return Finding("SGLang", "ok", text, f"imports {pieces}".strip())
