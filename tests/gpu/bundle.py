"""Packs what a machine with a GPU, torch 2.11, nvcc and no network (pins/there.txt) lacks for tests/gpu/run.sh.

    python tests/gpu/bundle.py                 # everything into gpu-bundle/
    python tests/gpu/bundle.py rollout te      # these alone
    python tests/gpu/bundle.py --pin           # pins/*.txt anew: versions of requirements/, hashes of the package index

    trainer      packages of a trainer process and of the tests, and our kernels, compiled
    rollout      SGLang
    te           Transformer Engine, compiled for that torch
    fa4          FlashAttention 4
    references   models, and a CPU's results with them (tests/gpu/references.py)

Each becomes an archive NAME.tar.xz, cut into files of at most --piece-mib, and a line of SHA256SUMS for each file. A machine
with a network, 12 GB of disk, Python 3.12 with pip, g++ and binutils makes all of it: on two cores in 26 minutes, of which
compiling Transformer Engine takes 7 and the references 12. What is compiled is kept in gpu-bundle/compiled/ for as long as
its sources and its pins are the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path.append(str(HERE))

import fatbin  # noqa: E402
import next_stage  # noqa: E402

PINS = HERE / "pins"
MIB = 2**20
ARCHITECTURE = 90
PYTHON = Path(sys.base_prefix, "bin", "python3.12")  # an environment of uv has no pip


@dataclass(frozen=True)
class Bundle:
    unused: tuple[str, ...] = ()
    """Patterns below the packages' folder of what no process there reads."""
    gpu_code: tuple[str, ...] = ()
    """Libraries whose code for other GPUs is zeroed."""
    stand_ins: dict[str, str] = field(default_factory=dict)
    """Modules that are written instead of packed."""


DUAL_GEMM = '''"""Stands for a kernel of Blackwell GPUs; all that dense Qwen3 and Llama ask of it on others."""

from enum import IntEnum

MAX_DUAL_GEMM_DECODE_TOKENS = 0
MODES = "STATIC_PER_TENSOR STATIC_PER_TOKEN DYNAMIC_PER_TENSOR DYNAMIC_PER_TOKEN UNQUANT"
DualGemmQuantMode = IntEnum("DualGemmQuantMode", MODES, start=0)


def can_use_dual_gemm(*args, **kwargs):
    return False
'''
CHARTS = '''"""Stands for 84 MB that draw the charts of a report's page, which has none there."""


def javascript_bundle():
    return ""
'''
BUNDLES = {
    # Of bpe_openai the vocabulary that openai-harmony is given, 2 of 75 MB.
    "trainer": Bundle(
        unused=("bin", "pulp/solverdir", "bpe_openai/_bindings*", "bpe_openai/data/[!o]*"),
        stand_ins={"vl_convert.py": CHARTS},
    ),
    "rollout": Bundle(
        unused=(
            *("bin", "sglang/multimodal_gen", "sglang/test", "sglang/srt/rust_extensions"),
            # It reads tensors as torch 2.14 lays them out; without it SGLang takes its tree in Python.
            "sglang/srt/mem_cache/rust_tree_core/*.so",
            # flash_ops is FlashAttention 3: 1.1 GB, for --attention-backend fa3 alone.
            *("sgl_kernel/sm100", "sgl_kernel/flash_ops*", "sgl_kernel/flashmla_ops*", "sgl_kernel/infllm_ops*"),
            *("torch_memory_saver_hook_mode_*cu12*", "torch_memory_saver_hook_mode_preload.abi3.so"),
            "torch_memory_saver_hook_mode_torch.abi3.so",
        ),
        gpu_code=("sgl_kernel/sm90/common_ops.abi3.so",),
        stand_ins={
            "soundfile.py": '"""Stands for a package that reads audio, which no test serves."""\n',
            # Its own imports CUTLASS's DSL, also on GPUs that do not take it.
            "sglang/kernels/ops/gemm/cutedsl_dual_gemm.py": DUAL_GEMM,
        },
    ),
    "te": Bundle(
        unused=("bin", "transformer_engine/jax", "transformer_engine/wheel_lib/nccl_ep"),
        gpu_code=("transformer_engine/wheel_lib/libtransformer_engine.so",),
    ),
    "fa4": Bundle(unused=("bin", "build_backend.py", "nvidia_cutlass_dsl/dsl_packages/iket")),
}

# -- which packages, and from where ------------------------------------------------------------------------------------

LISTS = ("trainer", "rollout", "te", "fa4", "build", "sources")
FROM_SOURCE = ("--no-build-isolation", "--no-binary=:all:")


def name_of(requirement: str) -> str:
    return re.split(r"[=\[; ]", requirement)[0].lower().replace("_", "-")


def project_pins(*lists: str) -> dict[str, str]:
    """Name -> NAME==VERSION of requirements/LIST.txt; an earlier list overrules a later one."""
    found: dict[str, str] = {}
    for name in lists:
        for line in (REPOSITORY / "requirements" / f"{name}.txt").read_text().splitlines():
            if "==" in line:
                found.setdefault(name_of(line), line.strip())
    return found


def asked(file: str) -> list[str]:
    """Lines of a file in pins/."""
    return [line for line in (PINS / file).read_text().split("\n") if line and line[0] != "#"]


def wanted(name: str) -> list[str]:
    """The requirements of pins/NAME.txt, without hashes: versions are the project's own, where NAME.in says no other."""
    if name == "trainer":
        left_out = {name_of(line) for file in ("there.txt", "unused.in") for line in asked(file)}
        from_torch = re.compile(r"torch|triton|cuda-.*|nvidia-(?!modelopt|mmath).*")
        lines = project_pins("trainer", "test").items()
        return [line for package, line in lines if package not in left_out and not from_torch.fullmatch(package)]
    pins = project_pins("rollout") if name == "rollout" else project_pins("gpu", "trainer")
    return [line if "==" in line else pins[line] for line in asked(f"{name}.in")]


def pip(*arguments: str | Path, python: Path = PYTHON, environment: dict[str, str] | None = None) -> None:
    """A command of pip in the environment of `python`, which need not have it."""
    kept = environment or {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    command = [PYTHON, "-m", "pip", "--python", python, *arguments]
    subprocess.run([*command, "--quiet", "--disable-pip-version-check"], check=True, timeout=3600, env=kept)


def pin(name: str, requirements: list[str], compiler: Compiler) -> None:
    """Write pins/NAME.txt: each requirement with the hash of the archive that this platform gets."""
    with tempfile.TemporaryDirectory() as folder:
        listed, report = Path(folder, "list.txt"), Path(folder, "report.json")
        listed.write_text("\n".join(requirements) + "\n")
        alone = () if name == "build" else ("--no-deps",)  # torch's own packages of CUDA are those that it asks for
        command = ["install", "--dry-run", "--ignore-installed", *alone, "--report", report, "--requirement", listed]
        if name == "sources":  # it asks for torch before it says what it is
            python, environment = compiler.environment()
            pip(*command, *FROM_SOURCE, python=python, environment=environment)
        else:
            pip(*command)
        lines = []
        for found in json.loads(report.read_text())["install"]:
            hashes = found["download_info"]["archive_info"]["hashes"]
            package, version = name_of(found["metadata"]["name"]), found["metadata"]["version"]
            lines.append(f"{package}=={version} --hash=sha256:{hashes['sha256']}\n")
    (PINS / f"{name}.txt").write_text("".join(sorted(lines)))
    print(f"{PINS / name}.txt: {len(lines)} packages")


def install(name: str, site: Path) -> None:
    """The packages of pins/NAME.txt, by hash."""
    command = ("install", "--no-deps", "--no-compile", "--require-hashes", "--target", site)
    pip(*command, "--requirement", PINS / f"{name}.txt")


# -- what is compiled --------------------------------------------------------------------------------------------------


class Compiler:
    """An environment with that machine's torch, made when something has to be compiled, and gone with `close`."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self._folder: tempfile.TemporaryDirectory | None = None

    def close(self) -> None:
        if self._folder:
            self._folder.cleanup()

    def get(self, name: str, stamp: str, make) -> Path:
        """The folder NAME of what `make(folder)` has compiled; as it was where the stamp is the same."""
        folder, mark = self.cache / name, self.cache / f"{name}.stamp"
        if not (mark.is_file() and mark.read_text() == stamp):
            shutil.rmtree(folder, ignore_errors=True)
            mark.unlink(missing_ok=True)
            folder.mkdir(parents=True)
            started = time.time()
            make(folder)
            mark.write_text(stamp)
            print(f"{name}: compiled in {time.time() - started:.0f} s")
        return folder

    def environment(self) -> tuple[Path, dict[str, str]]:
        """Python, and the variables by which compilers find CUDA's packages."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory()
            subprocess.run([str(PYTHON), "-m", "venv", "--without-pip", self._folder.name], check=True)
            install("build", Path(self._folder.name, "lib", "python3.12", "site-packages"))
        home = Path(self._folder.name)
        packages = home / "lib" / "python3.12" / "site-packages"
        toolkit = packages / "nvidia" / "cu13"
        if not (toolkit / "lib64").exists():  # names that linkers look for
            (toolkit / "lib64").symlink_to("lib")
            (toolkit / "lib" / "libcudart.so").symlink_to("libcudart.so.13")
            (toolkit / "lib" / "stubs").mkdir(exist_ok=True)
            stub = toolkit / "lib" / "stubs" / "libcuda.so"  # the driver's own need not be where something is compiled
            subprocess.run(
                ["g++", "-shared", "-Wl,-soname,libcuda.so.1", "-o", stub, "-x", "c++", "/dev/null"], check=True
            )
        folders = {kind: ":".join(map(str, sorted(packages.glob(f"nvidia/*/{kind}")))) for kind in ("include", "lib")}
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        variables = {"CUDA_HOME": str(toolkit), "CPATH": folders["include"], "LIBRARY_PATH": folders["lib"]}
        variables["MAX_JOBS"] = os.environ.get("MAX_JOBS", str(os.cpu_count()))
        path = os.pathsep.join((str(home / "bin"), str(packages / "bin"), os.environ["PATH"]))
        return home / "bin" / "python", kept | variables | {"PATH": path, "PYTHONPATH": str(packages)}


def kernels_stamp() -> str:
    """Hash of all that our extensions are compiled from."""
    files = [REPOSITORY / "setup.py", *sorted((REPOSITORY / "csrc").rglob("*.*")), PINS / "build.txt"]
    return digest(*(path for path in files if path.is_file()))


def compile_kernels(compiler: Compiler, folder: Path) -> None:
    python, environment = compiler.environment()
    with tempfile.TemporaryDirectory() as work:
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(REPOSITORY / name, work)
        shutil.copytree(REPOSITORY / "csrc", Path(work, "csrc"))
        package = Path(work, "megatron_rl")
        package.mkdir()
        shutil.copy(REPOSITORY / "megatron_rl" / "__init__.py", package)
        command = [str(python), "setup.py", "-q", "build_ext", "--build-lib", str(Path(work, "built"))]
        done = subprocess.run(command, cwd=work, env=environment, timeout=1800, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"our kernels could not be compiled:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        for library in Path(work, "built").rglob("*.so"):
            shutil.copy(library, folder)


def compile_te(compiler: Compiler, folder: Path) -> None:
    python, environment = compiler.environment()
    environment |= {"NVTE_CUDA_ARCHS": str(ARCHITECTURE), "NVTE_BUILD_MAX_JOBS": environment["MAX_JOBS"]}
    environment |= {"NVTE_FRAMEWORK": "pytorch", "NVTE_PYTORCH_FORCE_BUILD": "TRUE"}
    with tempfile.TemporaryDirectory() as work:
        command = ("wheel", "--no-deps", "--require-hashes", *FROM_SOURCE, "--wheel-dir", work)
        pip(*command, "--requirement", PINS / "sources.txt", python=python, environment=environment)
        (wheel,) = Path(work).glob("*.whl")
        shutil.unpack_archive(wheel, folder, "zip")


# -- archives ----------------------------------------------------------------------------------------------------------


def digest(*files: Path) -> str:
    found = hashlib.sha256()
    for path in files:
        found.update(path.read_bytes())
    return found.hexdigest()


def prune(site: Path, bundle: Bundle) -> None:
    for pattern in (*bundle.unused, "**/__pycache__"):
        for path in list(site.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for library in site.rglob("*.so*"):
        if str(library.relative_to(site)) not in bundle.gpu_code and library.is_file() and not library.is_symlink():
            subprocess.run(["strip", "--strip-debug", str(library)], check=False, stderr=subprocess.DEVNULL)


def pack(folder: Path, archive: Path, limit: int) -> list[Path]:
    """The same folder gives the same bytes: sorted, without owners and times. Files of at most `limit` bytes."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = info.mtime = 0
        info.uname = info.gname = ""
        return info

    for old in archive.parent.glob(f"{archive.name}*"):
        old.unlink()
    with lzma.open(archive, "wb", preset=6) as packed, tarfile.open(fileobj=packed, mode="w|") as tar:
        for path in sorted(folder.rglob("*")):
            tar.add(path, str(path.relative_to(folder)), recursive=False, filter=plain)
    if archive.stat().st_size <= limit:
        return [archive]
    pieces = []
    with archive.open("rb") as whole:
        while part := whole.read(limit):
            pieces.append(archive.with_name(f"{archive.name}.{len(pieces) + 1}"))
            pieces[-1].write_bytes(part)
    archive.unlink()
    return pieces


def write_sums(out: Path) -> None:
    """SHA256SUMS of all archives that lie in `out`."""
    lines = [f"{digest(path)}  {path.name}\n" for path in sorted(out.glob("*.tar.xz*"))]
    (out / "SHA256SUMS").write_text("".join(lines))


def make(name: str, out: Path, compiler: Compiler, limit: int) -> None:
    started = time.time()
    with tempfile.TemporaryDirectory(dir=out) as work:
        site = Path(work, "site")
        site.mkdir()
        bundle = BUNDLES[name]
        install(name, site)
        prune(site, bundle)
        for library in bundle.gpu_code:
            fatbin.keep(site / library, ARCHITECTURE)
        for path, text in bundle.stand_ins.items():
            (site / path).write_text(text)
        if name == "trainer":
            built = compiler.get("kernels", kernels_stamp(), lambda folder: compile_kernels(compiler, folder))
            shutil.copytree(built, Path(work, "kernels"))
            Path(work, "kernels", "STAMP").write_text(kernels_stamp())
        elif name == "te":
            stamp = digest(PINS / "build.txt", PINS / "sources.txt")
            built = compiler.get("te", stamp, lambda folder: compile_te(compiler, folder))
            shutil.copytree(built, site, dirs_exist_ok=True)
        pieces = pack(Path(work), out / f"{name}.tar.xz", limit)
    sizes = " + ".join(f"{path.stat().st_size / MIB:.1f}" for path in pieces)
    print(f"{out / name}.tar.xz: {sizes} MiB, {time.time() - started:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="those above; default: all")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "gpu-bundle")
    parser.add_argument("--piece-mib", type=float, default=50, help="largest size of a file (default 50)")
    parser.add_argument("--pin", action="store_true", help="write the lists with hashes, and pack nothing")
    options = parser.parse_args()
    known = LISTS if options.pin else (*BUNDLES, "references")
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no bundle '{unknown[0]}': {', '.join(known)}")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    compiler = Compiler(out / "compiled")
    try:
        if options.pin:
            for name in options.names or LISTS:
                pin(name, wanted(name), compiler)
            return
        for name in options.names or [*BUNDLES, "references"]:
            if name == "references":
                command = [sys.executable, "tests/gpu/references.py", out / "references"]
                subprocess.run(command, cwd=REPOSITORY, check=True)
            else:
                make(name, out, compiler, int(options.piece_mib * MIB))
    finally:
        compiler.close()
    write_sums(out)
    next_stage.write_commit(out)


if __name__ == "__main__":
    main()
