"""What is installed from a wheel: the commands without torch, the files of sdist and wheel, the set-up; nothing is compiled."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megatron_rl import cli
from megatron_rl.errors import UserError
from megatron_rl.run import setup

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
TINY = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 256,
    "intermediate_size": 128,
    "decoder_sparse_step": 1,
}


def pins(name: str) -> dict[str, str]:
    lines = (REPOSITORY / "requirements" / f"{name}.txt").read_text().split()
    return dict(line.split("==") for line in lines)


# -- dependencies ------------------------------------------------------------------------------------------------------


def needed(requirements: list[str]) -> set[str]:
    """Names of the packages that pip would install for them, from what is installed here."""
    found: set[str] = set()
    left = [Requirement(line) for line in requirements]
    while left:
        wanted = left.pop()
        name = canonicalize_name(wanted.name)
        if name in found or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        left += [Requirement(line) for line in importlib.metadata.requires(name) or []]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A folder of links to the packages that the wheel's own dependencies bring, and to ours; no others."""
    folder = tmp_path_factory.mktemp("alone")
    for name in needed(PROJECT["dependencies"]):
        files = importlib.metadata.files(name) or []
        for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
            source = Path(str(importlib.metadata.distribution(name).locate_file(top)))
            if source.exists() and not (folder / top).exists():
                (folder / top).symlink_to(source)
    for package in (REPOSITORY / "megatron_rl", *(REPOSITORY / "sglang_plugin" / name for name in setup.PLUGIN)):
        (folder / package.name).symlink_to(package)
    return folder


def run(alone: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    """The program where nothing else can be imported. -S: no site-packages."""
    code = (
        f"import sys; sys.path.append({str(alone)!r}); from megatron_rl.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    environment = {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-S", "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env=environment,
    )


@pytest.fixture
def folder(tmp_path):
    """What a user has: a model's config.json, a config, and a run's folder."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "config.yaml").write_text("name: mine\nmodel:\n  path: model\ndata:\n  task: number_sorting\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("name: run\nsteps: 2\n")
    lines = [json.dumps({"step": step, "reward/mean": 0.5, "time/step_s": 3.0}) for step in (1, 2)]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ("doctor", 1, "run megatron-rl setup"),
        ("keys rollout.server", 0, "rollout.server.python"),
        ("plan config.yaml", 0, "fits: 8 trainer GPUs"),
        ("launch slurm config.yaml --nodes 2 --dry-run", 0, "run_job"),
        ("status run", 0, "2 of 2"),
        ("report run", 0, "report.html"),
        ("simulate", 2, "name a FILE"),
        ("train config.yaml", 2, "train needs the trainer's environment"),
        ("convert model out", 2, "this one has no torch: megatron-rl setup makes it"),
        ("report run --attribute", 2, "megatron-rl setup makes it"),
    ],
)
def test_the_wheels_own_dependencies_are_enough(alone, folder, monkeypatch, arguments, status, said):
    assert not (alone / "torch").exists() and not (alone / "megatron").exists()
    done = run(alone, *arguments.split(), cwd=folder)
    assert done.returncode == status and said in done.stdout + done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "PyTorch was not found" not in done.stderr
    if status == 2:
        assert done.stderr.startswith("megatron-rl: error: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("line", PROJECT["dependencies"])
def test_ranges_hold_the_pins_of_both_environments(line):
    wanted = Requirement(line)
    assert wanted.specifier.contains(pins("trainer")[wanted.name])
    if wanted.name in pins("rollout"):
        assert wanted.specifier.contains(pins("rollout")[wanted.name])


# -- sdist and wheel ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Folder of an unpacked sdist, built in a copy and without torch."""
    work = tmp_path_factory.mktemp("sdist")
    names = subprocess.run(
        ["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    for name in filter(None, names):
        if not name.startswith(("tests/", "benchmarks/", "docs/results/")) and (REPOSITORY / name).is_file():
            (work / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
            (work / "copy" / name).write_bytes((REPOSITORY / name).read_bytes())
    code = (
        "import sys; sys.modules['torch'] = None; sys.path.insert(0, 'tools'); import build_backend as backend\n"
        f"backend.build_sdist({str(work)!r}); print(*backend.get_requires_for_build_wheel())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=work / "copy", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    [archive] = work.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(work, filter="data")
    return Path(str(archive).removesuffix(".tar.gz")), done.stdout.splitlines()[-1]


def test_the_sdist_has_what_the_build_needs(sdist):
    unpacked, required = sdist
    for pattern in (
        "csrc/**/*",
        "requirements/**/*",
        "tools/*",
        "configs/*",
        "sglang_plugin/**/*.py",
        "megatron_rl/**/*.py",
    ):
        for path in REPOSITORY.glob(pattern):
            name = path.relative_to(REPOSITORY)
            if path.is_file() and "__pycache__" not in path.parts and "source" not in name.parts[:2]:
                assert (unpacked / name).is_file(), name
    assert not list(unpacked.rglob("*.so"))
    # An isolated build gets the torch of the trainer's environment, in which kernels from the wheel are to run.
    assert f"torch=={pins('trainer')['torch']}" in required.split()


def test_extras_are_the_pinned_lists_without_what_pip_could_not_resolve(sdist):
    metadata = importlib.metadata.PathDistribution(sdist[0]).metadata
    lines = [Requirement(line) for line in metadata.get_all("Requires-Dist") or []]
    apart = {
        "trainer": {"megatron-bridge"},
        "rollout": set(),
        "gpu": {"transformer-engine-torch"},
        "dev": {"nvidia-mmath"},
        "docs": set(),
        "trackers": set(),
    }
    assert set(metadata.get_all("Provides-Extra") or []) == set(apart)
    for extra, left_out in apart.items():
        found = {
            line.name: str(line.specifier) for line in lines if line.marker and line.marker.evaluate({"extra": extra})
        }
        wanted = pins({"dev": "test"}.get(extra, extra))
        assert found == {name: f"=={version}" for name, version in wanted.items() if name not in left_out}
        assert all(name in wanted for name in left_out)
    text = (REPOSITORY / "docs" / "install.md").read_text()
    assert all(name in text for names in apart.values() for name in names)


# -- megatron-rl setup -------------------------------------------------------------------------------------------------


def test_setup_takes_the_flags_of_the_script():
    usage = (REPOSITORY / setup.SCRIPT).read_text().partition("usage: tools/setup.sh ")[2].partition("\n")[0]
    flags = {word.strip("[]") for word in usage.split() if "--" in word} - {"--help"}
    assert {flag for flag, settings in cli.COMMANDS["setup"].flags if settings.get("action") == "store_true"} == flags


@pytest.fixture
def installed(tmp_path, monkeypatch, sdist):
    """The package as a wheel has it: megatron_rl/source/ beside the modules, and a script that says how it was called."""
    package = tmp_path / "site" / "megatron_rl"
    for name in (
        "ops/a.py",
        "ops/_kernel.so",
        "__init__.py",
        "ops/__pycache__/a.pyc",
        "source/csrc/a.h",
        "source/setup.py",
    ):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(name)
    script = package / "source" / setup.SCRIPT
    script.parent.mkdir()
    script.write_text('#!/usr/bin/env bash\necho "$(dirname "$0")" "$@" >>"$(dirname "$0")/../calls"\nexit 3\n')
    monkeypatch.setattr(setup, "PACKAGE", package)
    return package


def test_setup_of_a_wheel_makes_a_source_tree_and_calls_its_script(installed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["setup", "--into", "made", "--trainer-only", "--no-gpu"]) == 3  # the script's own status
    made = tmp_path / "made"
    assert (made / "calls").read_text().split() == [str(made / "tools"), "--trainer-only", "--no-gpu"]
    assert (made / "megatron_rl/ops/a.py").is_file() and (made / "csrc/a.h").is_file()
    assert (made / "sglang_plugin/megatron_rl_plugin/installed.py").is_file()
    assert not list(made.rglob("*.so")) and not (made / "megatron_rl/source").exists()
    # Again, with a newer wheel: what it does not have goes, what is as it was is not written, what others made stays.
    (made / ".venv").mkdir()
    (installed / "ops" / "a.py").rename(installed / "ops" / "b.py")
    before = (made / "csrc/a.h").stat().st_mtime_ns
    assert cli.main(["setup", "--into", "made"]) == 3
    assert not (made / "megatron_rl/ops/a.py").exists() and (made / "megatron_rl/ops/b.py").is_file()
    assert (made / "csrc/a.h").stat().st_mtime_ns == before and (made / ".venv").is_dir()


def test_setup_writes_into_no_folder_of_something_else(installed, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("")
    assert cli.main(["setup", "--into", str(tmp_path / "mine")]) == 2
    assert "holds other files; name a new folder with --into" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes"]


def test_a_package_without_its_source_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "PACKAGE", tmp_path)
    with pytest.raises(UserError, match="install megatron_rl from its wheel"):
        setup.setup_command(tmp_path / "made", [])


def test_setup_of_a_checkout_has_its_own_folder(tmp_path):
    with pytest.raises(UserError, match="leave out --into"):
        setup.setup_command(tmp_path, [])


def test_kernels_of_another_torch_are_refused(monkeypatch):
    from megatron_rl.ops import extensions

    assert extensions.same_torch("2.14.1", "2.14.0+cu130") and not extensions.same_torch("2.14.1", "2.13.1")
    with monkeypatch.context() as other:
        other.setattr(torch, "__version__", "2.13.0+cpu")
        with pytest.raises(UserError, match=r"built for torch 2\.\d+\.\d+, and this is 2\.13\.0\+cpu"):
            importlib.reload(extensions)
    importlib.reload(extensions)
