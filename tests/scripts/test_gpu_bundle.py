"""What travels to a machine with a GPU and no network, and the script that runs there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from megatron_rl_plugin.installed import code
from packaging.version import Version

from tests.preloaded import PYTHON_WITH_TRAINER

REPOSITORY = Path(__file__).resolve().parents[2]


sys.path.append(str(REPOSITORY / "tests" / "gpu"))

import bundle  # noqa: E402
import fatbin  # noqa: E402
import next_stage  # noqa: E402


@pytest.mark.parametrize("name", ["trainer", "rollout", "te", "fa4", "build", "sources"])
def test_what_is_packed_is_pinned_to_the_projects_versions_by_hash(name):
    lines = (bundle.PINS / f"{name}.txt").read_text().splitlines()
    pinned = {line.split(" --hash=sha256:")[0] for line in lines}
    assert all(re.fullmatch(r"[a-z0-9-]+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    wanted = {re.sub(r"\[.*?\]", "", line) for line in bundle.wanted(name)}
    if name == "build":  # with what torch depends on
        wanted = {line for line in wanted if "==" in line}
        assert wanted <= pinned
    else:
        assert pinned == wanted, "python tests/gpu/bundle.py --pin writes the lists anew"


def test_what_the_machine_has_stays_at_home():
    there = {bundle.name_of(line) for line in bundle.asked("there.txt")}
    packed = {name: {bundle.name_of(line) for line in bundle.wanted(name)} for name in ("trainer", "rollout", "te")}
    assert {"megatron-core", "megatron-bridge", "nvidia-modelopt"} <= packed["trainer"]
    assert "torch" in there and not there & set.union(*packed.values())
    # torch's own parts are those of the torch that is there; CUDA's headers of C++ no torch brings.
    own = [n for n in set.union(*packed.values()) if re.fullmatch(r"triton|cuda-.*|nvidia-(cu|nccl|nv).*", n)]
    assert own == ["nvidia-cuda-cccl"]


def test_a_server_takes_the_kernels_that_are_carried():
    """SGLang's launcher refuses sgl_kernel below a version on a GPU, unless it is told not to look."""
    version = next(line.split("==")[1] for line in bundle.wanted("rollout") if line.startswith("sglang-kernel=="))
    (launcher,) = REPOSITORY.glob(".venv-rollout/lib/python3*/site-packages/sglang/srt/entrypoints/engine.py")
    text = launcher.read_text()
    (least,) = re.findall(r'assert_pkg_version\(\s*"sglang-kernel",\s*"([\d.]+)"', text)
    told = 'get_bool_env_var("SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK")' in text
    script = (REPOSITORY / "tests" / "gpu" / "run.sh").read_text()
    skips = told and " SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1" in script
    assert skips == (Version(version) < Version(least))


def test_the_table_of_differences_is_true():
    text = (REPOSITORY / "docs" / "gpu.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| ([^|]+) \| ([^|]+) \|", text, re.MULTILINE)
    there = dict(line.split("==") for line in bundle.asked("there.txt") if "==" in line)
    for name in ("build", "rollout"):
        for line in (bundle.PINS / f"{name}.txt").read_text().splitlines():
            package, version = line.split(" --hash")[0].split("==")
            there.setdefault(package, version)
    pins = [bundle.project_pins("trainer"), bundle.project_pins("rollout")]
    found = {}
    for package, own, others in rows:
        versions = dict.fromkeys(pin[package].partition("==")[2] for pin in pins if package in pin)
        assert own.strip() == ", ".join(versions) and others.strip() == there[package], package
        found[package] = others
    # Whatever differs in both environments' main parts has a row.
    main = (
        "torch",
        "triton",
        "transformers",
        "tokenizers",
        "numpy",
        "nvidia-cublas",
        "nvidia-cudnn-cu13",
        "nvidia-nccl-cu13",
    )
    assert {*main, "sglang-kernel"} <= set(found)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def packed(tmp_path) -> tuple[Path, list[Path]]:
    """A folder, and the files of its archive, of at most 10,000 bytes each."""
    folder = tmp_path / "folder"
    for number in range(5):
        file = folder / f"in-{number % 2}" / f"{number}.bin"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(os.urandom(4000 + number))
    (tmp_path / "gpu-bundle").mkdir()
    return folder, bundle.pack(folder, tmp_path / "gpu-bundle" / "te.tar.xz", 10_000)


def test_an_archive_is_the_same_whenever_it_is_made_and_in_files_that_fit(packed, tmp_path):
    folder, files = packed
    assert [file.name for file in files] == ["te.tar.xz.1", "te.tar.xz.2", "te.tar.xz.3"]
    assert all(file.stat().st_size <= 10_000 for file in files)
    for file in folder.rglob("*"):
        os.utime(file, (1e9, 1e9))
    (again,) = bundle.pack(folder, tmp_path / "whole.tar.xz", 1 << 20)
    assert again.read_bytes() == b"".join(file.read_bytes() for file in files)
    with tarfile.open(again) as archive:
        archive.extractall(tmp_path / "out", filter="data")
    assert tree(tmp_path / "out") == tree(folder)


@pytest.fixture
def elsewhere(tmp_path, packed) -> Callable[..., subprocess.CompletedProcess]:
    """The script in a checkout without an environment, beside a bundle of Transformer Engine alone."""
    for name in ("tests/gpu", "csrc", "sglang_plugin", "setup.py"):
        source, target = REPOSITORY / name, tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    bundle.write_sums(tmp_path / "gpu-bundle")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def start(stage: str = "start") -> subprocess.CompletedProcess:
        command = [tmp_path / "tests/gpu/run.sh", stage, tmp_path / "out", "--on-cpu"]
        options = {"capture_output": True, "text": True, "timeout": 120}
        return subprocess.run(command, env=os.environ | {"PATH": path}, **options)

    return start


def test_a_file_that_was_damaged_on_the_way_is_refused(elsewhere, packed):
    last = packed[1][-1]
    data = bytearray(last.read_bytes())
    data[len(data) // 2] ^= 1
    last.write_bytes(data)
    done = elsewhere()
    assert done.returncode == 1 and "te did not arrive as it was packed" in done.stderr
    assert last.name in done.stderr


def test_references_that_were_left_behind_are_not_made_there(elsewhere, tmp_path):
    """Where minutes are few: it says what to carry instead."""
    (tmp_path / ".venv-gpu").mkdir()
    (tmp_path / ".venv-gpu" / "kernels").write_text(bundle.kernels_stamp())
    (tmp_path / "gpu-bundle" / "references" / "models").mkdir(parents=True)
    done = elsewhere("training")
    assert done.returncode == 1 and "te: unpacked" in done.stderr
    assert "error: no gpu-bundle/references/training, which has to be carried" in done.stderr
    for environment in (".venv-gpu", ".venv-gpu/rollout"):
        command = [tmp_path / environment / "bin" / "python", "-m", "megatron_rl_plugin.installed"]
        assert subprocess.run(command, capture_output=True, text=True).stdout.strip() == code()


def test_only_our_gpus_code_is_left_of_a_library(tmp_path):
    from megatron_rl.ops.extensions import masked_log_softmax

    if not masked_log_softmax.cuda:
        pytest.skip("our kernels were built without nvcc")
    library = tmp_path / "kernels.so"
    shutil.copy(masked_log_softmax.__file__, library)
    before = {(image.kind, image.architecture): image for image in fatbin.read(library)}
    assert {(fatbin.MACHINE_CODE, 80), (fatbin.MACHINE_CODE, 90), (fatbin.PTX, 90)} <= set(before)
    data = library.read_bytes()
    left = fatbin.keep(library, 90)
    after, found = library.read_bytes(), fatbin.read(library)
    assert len(after) == len(data) and 0 < left < len(data)
    for image in found:
        own, old = (whole[image.start : image.start + image.size] for whole in (after, data))
        ours = (image.kind, image.architecture) == (fatbin.MACHINE_CODE, 90)
        assert own == (old if ours else bytes(image.size))
    with pytest.raises(ValueError, match="no machine code of sm_75"):
        fatbin.keep(library, 75)


def test_the_queue_is_the_one_that_is_written_down():
    text = (REPOSITORY / "tests" / "gpu" / "README.md").read_text()
    rows = re.findall(r"^\| (\w+) \| [^|]+ \| ([\w/, ]+) \| (\d+) \|$", text, re.MULTILINE)
    stages = [(stage.name, ", ".join(stage.archives), str(stage.seconds)) for stage in next_stage.STAGES]
    assert rows == stages
    script = (REPOSITORY / "tests" / "gpu" / "run.sh").read_text()
    files = dict(re.findall(r"\[(\w+)\]=(test_\w+\.py)", script))
    assert set(files) == {stage.name for stage in next_stage.STAGES}
    assert all((REPOSITORY / "tests" / "gpu" / file).is_file() for file in files.values())
    assert all((REPOSITORY / path).exists() for stage in next_stage.STAGES for path in stage.files)


def test_what_a_stage_needs_is_carried_in_as_few_calls_as_take_it(tmp_path):
    stage = next_stage.Stage("te", ("trainer", "te", "fa4", "references/engine"), 1, (), budget=300)
    for name, size in {"trainer.tar.xz": 4, "te.tar.xz": 5, "fa4.tar.xz.1": 8, "fa4.tar.xz.2": 3}.items():
        (tmp_path / name).write_bytes(bytes(size))
    last = "tests/gpu/run.sh te --budget-s 300"
    assert next_stage.calls(stage, tmp_path, limit=100) == [
        (["trainer.tar.xz", "te.tar.xz", "fa4.tar.xz.1", "fa4.tar.xz.2"], last)
    ]
    assert next_stage.parts("references/engine", tmp_path) == []
    (tmp_path / "references/engine/model").mkdir(parents=True)
    (tmp_path / "references/engine/model/weights").write_bytes(bytes(7))
    first = (["trainer.tar.xz", "te.tar.xz"], "tests/gpu/run.sh start")
    second = (["fa4.tar.xz.1"], "tests/gpu/run.sh start")
    assert next_stage.calls(stage, tmp_path, limit=10) == [first, second, (["fa4.tar.xz.2", "references/engine"], last)]


def test_a_result_counts_until_its_code_changes(tmp_path):
    stage = next_stage.Stage("kernels", (), 1, ("LICENSE",))
    assert next_stage.state(stage, tmp_path) == (False, "never run")
    result = {"machine": {"device": "NVIDIA H100", "date": "2026-11-01"}, "tests": {"a": {"outcome": "passed"}}}

    def state(commit: str | None, outcome: str = "passed") -> tuple[bool, str]:
        result["machine"]["commit"], result["tests"]["a"]["outcome"] = commit, outcome
        (tmp_path / "h100").mkdir(exist_ok=True)
        (tmp_path / "h100" / "kernels.json").write_text(json.dumps(result))
        return next_stage.state(stage, tmp_path)

    log = ["git", "log", "--format=%H", "--", "LICENSE"]
    done = subprocess.run(log, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("no checkout of git")
    first = done.stdout.split()[0]
    assert state(first) == state(f"{first[:9]}-dirty") == (True, "NVIDIA H100, 2026-11-01")
    assert state(first, "failed") == (False, "NVIDIA H100, 2026-11-01, 1 failed")
    assert state("0" * 40) == state(None) == (False, "NVIDIA H100, 2026-11-01, of an unknown commit")
    everything = next_stage.Stage("kernels", (), 1, ("megatron_rl",))
    current, text = next_stage.state(everything, tmp_path)
    assert not current and "unknown" in text


def test_what_is_carried_says_of_which_commit_it_is(tmp_path):
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True)
    if head.returncode:
        pytest.skip("no checkout of git")
    next_stage.write_commit(tmp_path)
    assert re.fullmatch(f"{head.stdout.strip()}(-dirty)?\n", (tmp_path / "COMMIT").read_text())


@pytest.mark.parametrize("torch_has_cuda", [True, False])
def test_cuda_is_where_nvcc_says_and_torch_brings_the_rest(tmp_path, torch_has_cuda):
    """A script on PATH, as machines have, is not beside its toolkit: taken for it, no kernel of SGLang's would compile."""
    script = (REPOSITORY / "tests" / "gpu" / "run.sh").read_text()
    (function,) = re.findall(r"^find_cuda\(\) \{\n.*?^\}\n", script, re.MULTILINE | re.DOTALL)
    toolkit, bin_folder = tmp_path / "cuda-13.0", tmp_path / "bin"
    (toolkit / "bin").mkdir(parents=True)
    bin_folder.mkdir()
    (bin_folder / "nvcc").write_text(f"#!/bin/sh\necho '#$ TOP={toolkit}/bin/..' >&2\n")
    (bin_folder / "nvcc").chmod(0o755)
    cuda = tmp_path / ".venv-gpu/lib/python3.12/site-packages/nvidia/cu13"
    if torch_has_cuda:
        (cuda / "lib").mkdir(parents=True)
        (cuda / "lib" / "libcudart.so.13").touch()

    def found(**before: str) -> list[str]:
        program = (
            f'set -euo pipefail\n{function}find_cuda\nprintf "%s\\n" "$CUDA_HOME" "${{LIBRARY_PATH-}}" "${{CPATH-}}"'
        )
        environment = {"PATH": f"{bin_folder}:/usr/bin:/bin"} | before
        command = ["bash", "-c", program]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    libraries = tmp_path / ".venv-gpu/libraries"
    headers = f"{cuda}/include:{tmp_path}/.venv-gpu/carried/rollout/site/nvidia/cu13/include/cccl"
    rest = [str(libraries), headers] if torch_has_cuda else ["", ""]
    assert found() == [str(toolkit), *rest]
    assert found(CUDA_HOME="/elsewhere") == ["/elsewhere", *rest]
    if torch_has_cuda:
        assert (libraries / "libcudart.so").resolve() == cuda / "lib" / "libcudart.so.13"
        assert found(LIBRARY_PATH="/a", CPATH="/b") == [str(toolkit), f"{libraries}:/a", f"/b:{headers}"]


def test_a_module_of_the_stages_has_no_name_of_a_folder_that_runs_make():
    """The linter would take it for that folder where one has been made, and refuse the order of imports."""
    made = {line.strip("/\n") for line in (REPOSITORY / ".gitignore").read_text().splitlines()}
    assert "runs" in made and not made & {path.stem for path in (REPOSITORY / "tests" / "gpu").glob("*.py")}


def test_long_tests_are_in_the_whole_suite_alone():
    text = (REPOSITORY / "tests" / "run.sh").read_text()
    chosen = dict(re.findall(r"^    (\S+)\) set -- (.*) ;;$", text, re.MULTILINE))
    assert chosen["--all"] == '"${@:2}"'
    assert all("not long" in chosen[name] for name in ("--fast", "*"))


def test_an_unknown_stage_is_refused_with_the_list():
    done = subprocess.run([REPOSITORY / "tests/gpu/run.sh", "kernel"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2
    assert "no stage 'kernel'" in done.stderr and "start | kernels | models" in done.stderr


@pytest.mark.timeout(900)
def test_what_runs_on_a_gpu_still_runs(tmp_path):
    """The stages' own code, by one family on this CPU: everywhere else these tests are skipped, and would rot unseen."""
    references = tmp_path / "references"
    options = {"cwd": REPOSITORY, "capture_output": True, "text": True, "timeout": 440}
    made = subprocess.run(
        [PYTHON_WITH_TRAINER, "tests/gpu/references.py", str(references), "--family", "olmoe"], **options
    )
    assert made.returncode == 0, made.stderr[-3000:]
    stages = [f"tests/gpu/test_{name}.py" for name in ("1_start", "2_kernels", "3_models", "7_invariance")]
    chosen = "nccl or (test_2 and sink and gpt_oss) or (test_3 and (olmoe or kept)) or (test_7 and (logits or gpt_oss))"
    command = [PYTHON_WITH_TRAINER, "-m", "pytest", "-q", "-p", "no:cacheprovider", *stages, "-k", chosen]
    done = subprocess.run([*command, "--on-cpu", "--references", str(references)], **options)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 20, done.stdout[-3000:]
