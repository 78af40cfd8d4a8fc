"""Build of the package. Metadata is in pyproject.toml; this file declares the C++/CUDA extensions of csrc/.

The CPU part is always built. An extension's CUDA part is built if nvcc and a CUDA build of torch with the same major version
are installed; the build needs no GPU. ptxas's report on registers and spills is kept beside each extension (*.ptxas.txt).

The extras are the lists in requirements/. A wheel also holds the files that `megatron-rl setup` needs (SOURCE).
"""

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError:  # an sdist and the metadata are made without it
    from setuptools import Extension as CppExtension
    from setuptools.command.build_ext import build_ext

    class BuildExtension(build_ext):
        def build_extensions(self) -> None:
            raise SystemExit(
                "megatron_rl: torch is missing, against which the kernels are compiled: install the one of"
                " requirements/trainer.txt, or build without --no-build-isolation"
            )


NAMES = ("masked_log_softmax", "sink_attention", "batch_invariant")
ARCHITECTURES = ("80", "90a")
CXX_FLAGS = ["-O3", "-fopenmp", "-fno-math-errno", "-Wno-psabi", "-Wno-maybe-uninitialized", "-g0"]


SOURCE = (
    *(
        "LICENSE",
        "MANIFEST.in",
        "README.md",
        "pyproject.toml",
        "setup.py",
        "configs",
        "csrc",
        "examples",
        "requirements",
    ),
    *("tools", "sglang_plugin/README.md", "sglang_plugin/pyproject.toml"),
)
"""Files of a checkout, besides the packages, that `megatron-rl setup` needs. A wheel has them in megatron_rl/source/."""
EXTRAS = {
    "trainer": "trainer",
    "rollout": "rollout",
    "gpu": "gpu",
    "dev": "test",
    "docs": "docs",
    "trackers": "trackers",
}
"""Extra -> name of its list in requirements/."""
APART = ("megatron-bridge", "transformer-engine-torch", "nvidia-mmath")
"""Packages that are not in the extras, because pip cannot install them together with the rest. See docs/install.md."""


def extra(name: str) -> list[str]:
    pins = Path("requirements", f"{name}.txt").read_text().splitlines()
    return [pin for pin in pins if pin.split("==")[0] not in APART]


class BuildPackages(build_py):
    """Copies SOURCE into the wheel. An editable install uses the files of the checkout."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for name in SOURCE:
            place = Path(name)
            for path in [place] if place.is_file() else sorted(p for p in place.rglob("*") if p.is_file()):
                if "__pycache__" not in path.parts:
                    target = Path(self.build_lib, "megatron_rl", "source", path)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(path, target)


def find_nvcc() -> str | None:
    """Return the path of an nvcc with torch's major version: from this environment, else CUDA_HOME, else PATH.

    None if there is no such nvcc, or if torch is built for the CPU.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    own = [nvcc for folder in nvidia_folders("bin") if (nvcc := shutil.which("nvcc", path=folder))]
    nvcc = own[0] if own else shutil.which("nvcc", path=f"{home}/bin" if home else None)
    if nvcc is None or torch.version.cuda is None:
        return None
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\d+)\.", text)
    if release is None or release[1] != torch.version.cuda.split(".")[0]:
        print(f"megatron_rl: {nvcc} is not of CUDA {torch.version.cuda}, which torch is built for: CPU part only")
        return None
    return nvcc


def nvidia_folders(kind: str) -> list[str]:
    """Return `include`, `lib` or `bin` of CUDA's packages in site-packages. The toolkit of nvcc may only have the compiler."""
    return [str(p) for p in sorted(Path(sysconfig.get_paths()["purelib"], "nvidia").glob(f"*/{kind}")) if p.is_dir()]


def include_folders(nvcc: str) -> list[str]:
    """Return the headers that nvcc itself uses, then those of CUDA's packages."""
    text = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", "/dev/null"], capture_output=True, text=True).stderr
    return re.findall(r'INCLUDES="-I([^"]+)"', text) + nvidia_folders("include")


def source_of(extension) -> Path:
    return Path("csrc", extension.name.rsplit("._")[-1], "cuda.cu")


class Build(BuildExtension):
    """Compiles the .cu files, which do not use torch, and passes their objects to the linker."""

    def build_extensions(self) -> None:
        self.reports: dict[str, str] = {}
        nvcc = find_nvcc()
        for extension in self.extensions:
            if nvcc and source_of(extension).exists():
                self.add_cuda(nvcc, extension)
        super().build_extensions()
        for name, report in self.reports.items():
            self.report_path(name).write_text(report)

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        package = Path(self.get_finalized_command("build_py").get_package_dir("megatron_rl.ops"))
        for old in package.glob("*.ptxas.txt"):
            old.unlink()
        for name in self.reports:
            shutil.copy(self.report_path(name), package)

    def report_path(self, name: str) -> Path:
        return Path(self.build_lib, *name.split(".")).with_suffix(".ptxas.txt")

    def add_cuda(self, nvcc: str, extension) -> None:
        source = source_of(extension)
        target = Path(self.build_temp, extension.name + ".cuda.o").resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        includes = include_folders(nvcc)
        command = [nvcc, "-c", str(source), "-o", str(target), "-std=c++17", "-O3", "-lineinfo", "-Icsrc"]
        command += ["-Xcompiler", "-fPIC", "-Xptxas", "-v", "--threads", "2"]
        command += [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
        command += ["-gencode=arch=compute_90,code=compute_90"]  # PTX, which later GPUs compile at load time
        command += [f"-I{folder}" for folder in includes]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"megatron_rl: {' '.join(command)}\n{done.stdout}{done.stderr}")
        self.reports[extension.name] = done.stderr
        extension.extra_objects.append(str(target))
        extension.define_macros.append(("WITH_CUDA", None))
        extension.include_dirs += includes
        extension.library_dirs += nvidia_folders("lib")  # in a toolkit: lib beside include, or lib64 above
        extension.library_dirs += [str(Path(i).resolve().parent / lib) for i in includes for lib in ("lib", "lib64")]
        extension.libraries += ["torch_cuda", "c10_cuda"]
        extension.extra_link_args.append("-l:libcudart.so." + torch.version.cuda.split(".")[0])


def declare(name: str) -> CppExtension:
    return CppExtension(
        f"megatron_rl.ops._{name}",
        [f"csrc/{name}/binding.cpp", f"csrc/{name}/cpu.cpp"],
        include_dirs=[str(Path("csrc").resolve())],
        extra_compile_args=list(CXX_FLAGS),
        extra_link_args=["-fopenmp"],
        depends=[str(path) for path in Path("csrc").rglob("*.h")],
    )


setup(
    ext_modules=[declare(name) for name in NAMES],
    extras_require={name: extra(file) for name, file in EXTRAS.items()},
    cmdclass={"build_ext": Build, "build_py": BuildPackages},
)
