"""GPU code of a library by architecture; all but one can be zeroed in place, after which it compresses to next to nothing.

    python tests/gpu/fatbin.py LIBRARY.so             # bytes by kind and architecture
    python tests/gpu/fatbin.py LIBRARY.so --keep 90   # the machine code of sm_90 stays, in place

CUDA keeps its images in sections of an ELF file as containers, each a header and entries of a kind (1 PTX, 2 machine code) and
an architecture. Headers and sizes stay, so that nothing in the file moves; the driver reads the entry of its own GPU alone.
"""

from __future__ import annotations

import argparse
import mmap
import re
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAGIC = 0xBA55ED50
PTX, MACHINE_CODE = 1, 2


@dataclass(frozen=True)
class Image:
    kind: int
    architecture: int
    start: int
    size: int


def sections(library: Path) -> Iterator[tuple[int, int]]:
    """Offset and size of each section that holds containers."""
    listed = subprocess.run(["readelf", "-S", "-W", str(library)], capture_output=True, text=True, check=True).stdout
    for name, start, size in re.findall(r"\] +(\S*[fF]at[bB]in\S*) +\S+ +[0-9a-f]+ +([0-9a-f]+) +([0-9a-f]+)", listed):
        if name != ".nvFatBinSegment":  # pointers to the containers
            yield int(start, 16), int(size, 16)


def images(data: bytes | mmap.mmap, start: int, size: int) -> Iterator[Image]:
    """Entries of the containers in one section."""
    at, end = start, start + size
    while at + 16 <= end:
        magic, _, header, length = struct.unpack_from("<IHHQ", data, at)
        if magic != MAGIC:
            at += 8
            continue
        entry, stop = at + header, at + header + length
        while entry < stop:
            kind, _, header, payload = struct.unpack_from("<HHIQ", data, entry)
            (architecture,) = struct.unpack_from("<I", data, entry + 28)
            if header == 0:
                break
            yield Image(kind, architecture, entry + header, payload)
            entry += header + payload
        at = -(-stop // 8) * 8


def read(library: Path) -> list[Image]:
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return [image for section in sections(library) for image in images(data, *section)]


def keep(library: Path, architecture: int) -> int:
    """Zero everything but the machine code of one architecture; returns the bytes that are left.

    Errors: ValueError where nothing would be left.
    """
    found = read(library)
    kept = {image for image in found if (image.kind, image.architecture) == (MACHINE_CODE, architecture)}
    if not kept:
        raise ValueError(f"{library} has no machine code of sm_{architecture}")
    with library.open("r+b") as file:
        for image in found:
            if image not in kept:
                file.seek(image.start)
                file.write(bytes(image.size))
    return sum(image.size for image in kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("--keep", type=int, metavar="ARCHITECTURE")
    options = parser.parse_args()
    sizes: Counter[tuple[int, int]] = Counter()
    for image in read(options.library):
        sizes[image.kind, image.architecture] += image.size
    for (kind, architecture), size in sorted(sizes.items()):
        name = {PTX: "PTX", MACHINE_CODE: "machine code"}.get(kind, f"kind {kind}")
        print(f"{name} {architecture}: {size / 2**20:.1f} MiB")
    if options.keep is not None:
        print(f"kept: {keep(options.library, options.keep) / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
