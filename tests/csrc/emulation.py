"""The CUDA kernels of csrc/ on CPU tensors, compiled by g++ against cuda_emulation.h."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parent
CSRC = TESTS.parent.parent / "csrc"
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
    library = folder / f"{name}.so"
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas", "-Wno-unused-variable"]
    command += ["-fsanitize=bounds" + ",alignment" * alignment]
    command += ["-x", "c++", str(TESTS / f"{name}_emulated.cpp"), f"-I{sources}", f"-I{TESTS}", "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


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
