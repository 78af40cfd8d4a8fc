"""The CUDA kernels of csrc/ on CPU tensors, compiled by g++ against cuda_emulation.h."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parent
CSRC = TESTS.parent.parent / "csrc"
CACHE = TESTS.parents[1] / ".tools" / "emulated"
"""Libraries by the content of their sources: those of planted bugs are compiled once."""
MARGIN = 1024
"""Elements around a guarded tensor; a multiple of 16 bytes."""


def compile_emulated(
    name: str, folder: Path, edits: dict[str, tuple[str, str]] | None = None, alignment: bool = True
) -> ctypes.CDLL:
    """The library of tests/csrc/{name}_emulated.cpp. `edits`: per file of csrc/ a text that stands there once, and another.

    Without the check of addresses' alignment it is compiled a third faster.
    """
    sources = shutil.copytree(CSRC, folder / "csrc")
    for file, (old, new) in (edits or {}).items():
        text = (sources / file).read_text()
        assert text.count(old) == 1 and new != old, f"{old!r} stands {text.count(old)} times in {file}"
        (sources / file).write_text(text.replace(old, new))
    compiler = ["g++", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas", "-Wno-unused-variable"]
    compiler += ["-fsanitize=bounds" + ",alignment" * alignment, "-x", "c++"]
    inputs = [
        TESTS / f"{name}_emulated.cpp",
        *sorted(TESTS.glob("*.h")),
        *sorted(p for p in sources.rglob("*") if p.is_file()),
    ]
    content = hashlib.sha256(repr((compiler, _compiler_version())).encode())
    for path in inputs:
        content.update(
            f"{path.relative_to(folder if path.is_relative_to(folder) else TESTS)}\n".encode() + path.read_bytes()
        )
    library = CACHE / f"{name}-{content.hexdigest()[:32]}.so"
    if not library.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        made = folder / f"{name}.so"
        command = [*compiler, str(inputs[0]), f"-I{sources}", f"-I{TESTS}", "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        part = CACHE / f"{library.name}.{os.getpid()}"
        shutil.copy(made, part)
        part.rename(library)  # whole, also where another process writes it too
    return ctypes.CDLL(str(library))


@functools.cache
def _compiler_version() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, timeout=20, check=True).stdout


class Guarded:
    """A tensor inside a larger one that is NaN around it, so that what reads or writes beyond its ends shows."""

    def __init__(self, tensor: torch.Tensor, offset: int = 0):
        start, count = MARGIN + offset, tensor.numel()
        self.whole = torch.full((count + 2 * MARGIN + offset,), torch.nan, dtype=tensor.dtype)
        self.outside = torch.ones(len(self.whole), dtype=torch.bool)
        self.outside[start : start + count] = False
        self.tensor = self.whole[start : start + count].view(tensor.shape)
        self.tensor.copy_(tensor)

    def check(self) -> None:
        assert self.whole[self.outside].isnan().all(), "a kernel wrote beyond its tensor"


class Emulated:
    """Calls of the library's functions; tensors are given as pointers. RuntimeError with the text that a call returns."""

    def __init__(self, library: ctypes.CDLL):
        self.library = library

    def set_schedule(self, seed: int) -> None:
        self.library.set_schedule(ctypes.c_uint(seed))

    def call(self, function: str, *arguments) -> None:
        def convert(x):
            if isinstance(x, torch.Tensor):
                return ctypes.c_void_p(x.data_ptr())
            return ctypes.c_float(x) if isinstance(x, float) else ctypes.c_int64(x)

        entry = self.library[function]
        entry.restype = ctypes.c_char_p
        if error := entry(*map(convert, arguments)):
            raise RuntimeError(error.decode())


def fails(check: Callable[[int], None], seeds: int = 200) -> bool:
    """Whether check(seed) fails for one of them."""
    for seed in range(seeds):
        try:
            check(seed)
        except (AssertionError, RuntimeError):
            return True
    return False
