"""Plants faults one at a time in a copy of a commit, and says whether the tests that claim one catch it.

A fault is tests/faults/NAME.patch: what is wrong, the tests that claim it, and the diff of one line. Patches are those of this
checkout; code and tests are those of the commit. Exit status 1 where a fault is not caught.
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

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PATCHES = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.patch"))}
TIMEOUT_S = 600
BUILD = ("setup.py", "-q", "build_ext", "--inplace")
HEADER = re.compile(r"# what: (.+)\n# claimed: (.+)\n(?=diff --git a/(\S+) )")
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/[^\s[]+(?:\[.*?\])?)(?: \((?:setup|call|teardown)\)| - .*)?$", re.M)
NO_CODE = re.compile(r"^(?:E +)?(?:Import|ModuleNotFound|Name|Syntax|Indentation)Error: .*", re.M)


@dataclass
class Fault:
    name: str
    what: str
    claimed: list[str]  # files or ids of tests
    file: str  # that it changes
    outcome: str = "BROKEN"  # caught, MISSED or BROKEN; with --check-clean passes, FAILS or BROKEN
    seconds: float = 0.0
    by: str = ""  # the first test that failed; of a broken one the reason


def read(name: str) -> Fault:
    """Errors: SystemExit for a name that is none's, and for a patch without its header."""
    if name not in PATCHES:
        raise SystemExit(f"there is no fault {name}; tests/faults has {', '.join(PATCHES)}")
    if not (header := HEADER.match(PATCHES[name].read_text())):
        raise SystemExit(f"{PATCHES[name]}: must begin with '# what: ...', '# claimed: ...' and the diff of git")
    return Fault(name, header[1], header[2].split(), header[3])


class Copy:
    """A commit in a folder of its own, with the environments and compiled extensions of this checkout."""

    def __init__(self, folder: Path, commit: str) -> None:
        self.folder = folder
        archive = subprocess.run(["git", "archive", commit], cwd=REPOSITORY, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
        for environment in (".venv", ".venv-rollout", ".venv-verifiers"):
            (folder / environment).symlink_to((REPOSITORY / environment).resolve())
        for built in REPOSITORY.glob("megatron_rl/**/*.so"):
            shutil.copy(built, folder / built.relative_to(REPOSITORY))
        # The path comes before that of an editable install. Hundreds of processes import what the first one compiles.
        path = f"{folder}{os.pathsep}{folder / 'sglang_plugin'}"
        self.environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)
        if subprocess.run(["git", "diff", "--quiet", commit, "--", "csrc", "setup.py"], cwd=REPOSITORY).returncode:
            self.python(*BUILD)
        self.extensions = {path: path.read_bytes() for path in folder.glob("megatron_rl/**/*.so")}
        for package in ("megatron_rl", "megatron_rl_plugin"):
            print(found := self.python("-P", "-c", f"import {package}; print({package}.__file__)").strip(), flush=True)
            assert Path(found).is_relative_to(folder), f"{found} is imported, and not what is in {folder}"

    def python(self, *arguments: str) -> str:
        command = [str(self.folder / ".venv" / "bin" / "python"), *arguments]
        done = subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    def apply(self, fault: Fault, *options: str) -> str:
        """Returns why git does not apply it, '' where it does."""
        command = ["git", "apply", *options, str(PATCHES[fault.name])]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True).stderr.strip()

    def restore(self, fault: Fault) -> None:
        self.apply(fault, "--reverse")
        for path, content in self.extensions.items():
            path.write_bytes(content)

    def test(self, tests: list[str]) -> tuple[int | None, str]:
        """Pytest's exit status, None after TIMEOUT_S, and its output. All that it started is ended."""
        command = [str(self.folder / ".venv" / "bin" / "python"), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            options = {"cwd": self.folder, "env": self.environment, "stdout": log, "stderr": subprocess.STDOUT}
            process, status = subprocess.Popen([*command, *tests], start_new_session=True, **options), None
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(TIMEOUT_S)
            finally:
                with contextlib.suppress(ProcessLookupError):  # nothing is left
                    os.killpg(process.pid, signal.SIGKILL)
            log.seek(0)
            return status, log.read()


def judge(copy: Copy, fault: Fault, *, planted: bool) -> None:
    """Note what the claimed tests say of the fault; not planted: whether they pass."""
    start = time.monotonic()
    if planted and (problem := copy.apply(fault)):
        fault.by = problem
        return
    try:
        if planted and fault.file.startswith("csrc/") and fault.file.endswith((".cpp", ".h")):
            copy.python(*BUILD)
        status, output = copy.test(fault.claimed)
    finally:
        if planted:
            copy.restore(fault)
    fault.seconds = round(time.monotonic() - start, 1)
    first, no_code = FAILED.search(output), NO_CODE.search(output)
    if status == 0:
        fault.outcome = "MISSED" if planted else "passes"
    elif status == 1 and first and not no_code:
        fault.outcome, fault.by = "caught" if planted else "FAILS", first[1]
    else:
        fault.by = no_code[0] if no_code else f"exit status {status or 'none in time'}: {output[-400:]!r}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant faults, and see whether the tests that claim them fail.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of tests/faults/NAME.patch (default: all)")
    parser.add_argument("--commit", default="HEAD", metavar="REV", help="whose code and tests (default: HEAD)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record of each fault")
    parser.add_argument("--check-clean", action="store_true", help="plant nothing: the claimed tests are to pass")
    options = parser.parse_args()
    faults = [read(name) for name in options.names or PATCHES]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what runs is ended, and the copy removed
    with tempfile.TemporaryDirectory(prefix="megatron-rl-faults-", ignore_cleanup_errors=True) as folder:
        copy = Copy(Path(folder).resolve(), options.commit)
        for number, fault in enumerate(faults, 1):
            judge(copy, fault, planted=not options.check_clean)
            print(f"{fault.outcome:7}{fault.seconds:6.0f} s  {fault.name}  {fault.by}", flush=True)
            if options.json:
                options.json.write_text(json.dumps([asdict(one) for one in faults[:number]], indent=1) + "\n")
    good, minutes = "passes" if options.check_clean else "caught", sum(fault.seconds for fault in faults) / 60
    found = sum(fault.outcome == good for fault in faults)
    print(f"{found} of {len(faults)} {good}, in {minutes:.1f} min")
    return int(found < len(faults))


if __name__ == "__main__":
    sys.exit(main())
