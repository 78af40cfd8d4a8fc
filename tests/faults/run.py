"""Plants faults one at a time in a copy of a commit, and says whether the tests that claim one catch it.

    python tests/faults/run.py [NAME ...] [--commit REV] [--json FILE] [--check-clean]

A fault is tests/faults/NAME.patch: what is wrong, the tests that claim it, and the diff of one line. Exit status 1 where one is
not caught. The patches are those of this checkout, code and tests those of the commit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

FAULTS = Path(__file__).resolve().parent
REPOSITORY = FAULTS.parent.parent
TIMEOUT_S = 600
HEADER = re.compile(r"# what: (.+)\n# claimed: (.+)\n(?=diff --git a/(\S+) )")
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: \((?:setup|call|teardown)\)| - .*)?$", re.MULTILINE)
NO_CODE = re.compile(r"^(?:E +)?(?:ImportError|ModuleNotFoundError|NameError|SyntaxError|IndentationError): .*", re.MULTILINE)


@dataclass
class Fault:
    name: str
    what: str
    claimed: list[str]
    """Files or ids of tests."""
    file: str
    """What it changes."""
    outcome: str = "BROKEN"
    """caught, MISSED or BROKEN; with --check-clean passes, FAILS or BROKEN."""
    seconds: float = 0.0
    by: str = ""
    """The first test that failed; of a broken one the reason."""


def patch_of(name: str) -> Path:
    return FAULTS / f"{name}.patch"


def read(name: str) -> Fault:
    """Errors: ValueError for a name that is none's, and for a patch without its header."""
    if not patch_of(name).is_file():
        raise ValueError(f"there is no fault {name}; tests/faults has {', '.join(names())}")
    if not (header := HEADER.match(patch_of(name).read_text())):
        raise ValueError(f"{patch_of(name)}: must begin with '# what: ...', '# claimed: ...' and the diff of git")
    return Fault(name, header[1], header[2].split(), header[3])


def names() -> list[str]:
    return sorted(path.stem for path in FAULTS.glob("*.patch"))


class Copy:
    """A commit in a folder of its own, with the environments and compiled extensions of this checkout."""

    def __init__(self, folder: Path, commit: str) -> None:
        self.folder, self.python = folder, str(folder / ".venv" / "bin" / "python")
        archive = subprocess.run(["git", "archive", commit], cwd=REPOSITORY, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
        for environment in (".venv", ".venv-rollout", ".venv-verifiers"):
            (folder / environment).symlink_to((REPOSITORY / environment).resolve())
        for built in REPOSITORY.glob("megatron_rl/**/*.so"):
            shutil.copy(built, folder / built.relative_to(REPOSITORY))
        # Before the editable install of the environments.
        self.environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(folder)}
        if subprocess.run(["git", "diff", "--quiet", commit, "--", "csrc", "setup.py"], cwd=REPOSITORY).returncode:
            self.build()
        self.extensions = {path: path.read_bytes() for path in folder.glob("megatron_rl/**/*.so")}
        found = self.call("-c", "import megatron_rl; print(megatron_rl.__file__)", cwd=folder.parent).strip()
        assert Path(found).is_relative_to(folder), f"{found} is imported, and not what is in {folder}"
        print(found, flush=True)

    def call(self, *arguments: str, cwd: Path | None = None) -> str:
        command = [self.python, *arguments]
        done = subprocess.run(command, cwd=cwd or self.folder, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    def build(self) -> None:
        self.call("setup.py", "-q", "build_ext", "--inplace")

    def apply(self, fault: Fault, *options: str) -> str:
        """Returns why git does not apply it, '' where it does."""
        command = ["git", "apply", *options, str(patch_of(fault.name))]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True).stderr.strip()

    def restore(self, fault: Fault) -> None:
        self.apply(fault, "--reverse")
        for path, content in self.extensions.items():
            if path.read_bytes() != content:
                path.write_bytes(content)

    def test(self, tests: list[str]) -> tuple[int | None, str]:
        """Pytest's exit status, None where it took too long, and its output. All that it started is ended."""
        command = [self.python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            options = {"cwd": self.folder, "env": self.environment, "stdout": log, "stderr": subprocess.STDOUT}
            process, status = subprocess.Popen(command, start_new_session=True, **options), None
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(TIMEOUT_S)
            finally:
                with contextlib.suppress(ProcessLookupError):  # nothing is left
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            log.seek(0)
            return status, log.read()


def judge(copy: Copy, fault: Fault, *, planted: bool) -> None:
    """Run the claimed tests, and note what they say of the fault; not planted: whether they pass."""
    if planted and (problem := copy.apply(fault)):
        fault.by = problem
        return
    start = time.monotonic()
    try:
        if planted and fault.file.startswith("csrc/"):
            copy.build()
        status, output = copy.test(fault.claimed)
    finally:
        if planted:
            copy.restore(fault)
    fault.seconds = round(time.monotonic() - start, 1)
    first, no_code = FAILED.search(output), planted and NO_CODE.search(output)
    if status == 0:
        fault.outcome = "MISSED" if planted else "passes"
    elif status == 1 and first and not no_code:
        fault.outcome, fault.by = "caught" if planted else "FAILS", first[1]
    else:
        ended = f"over {TIMEOUT_S} s" if status is None else f"exit status {status}"
        fault.by = no_code[0] if no_code else f"{ended}: {' '.join(output[-400:].split())}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant faults, and see whether the tests that claim them fail.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of tests/faults/NAME.patch (default: all)")
    parser.add_argument("--commit", default="HEAD", metavar="REV", help="whose code and tests (default: HEAD)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record of each fault")
    parser.add_argument("--check-clean", action="store_true", help="plant nothing: the claimed tests are to pass")
    options = parser.parse_args()
    try:
        faults = [read(name) for name in options.names or names()]
    except ValueError as error:
        parser.error(str(error))
    good, done = "passes" if options.check_clean else "caught", []
    with tempfile.TemporaryDirectory(prefix="megatron-rl-faults-", ignore_cleanup_errors=True) as folder:
        copy = Copy(Path(folder).resolve(), options.commit)
        for fault in faults:
            judge(copy, fault, planted=not options.check_clean)
            done.append(fault)
            print(f"{fault.outcome:7}{fault.seconds:6.0f} s  {fault.name}  {fault.by}", flush=True)
            if options.json:
                options.json.write_text(json.dumps([asdict(one) for one in done], indent=1) + "\n")
    found = sum(fault.outcome == good for fault in faults)
    print(f"{found} of {len(faults)} {good}, in {sum(fault.seconds for fault in faults) / 60:.1f} min")
    return int(found < len(faults))


if __name__ == "__main__":
    sys.exit(main())
