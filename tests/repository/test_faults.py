"""The planted faults of tests/faults fit the code as it is, and say what they are; that they are caught is run.py's to say."""

from __future__ import annotations

import subprocess

import pytest

from tests.faults import run
from tests.faults.run import PATCHES, REPOSITORY, Fault, read

FAULTS = 85
MOST_OF_CSRC = 4
"""They cost a build each."""


@pytest.fixture(scope="module")
def faults() -> list[Fault]:
    return [read(name) for name in PATCHES]


def test_there_are_so_many_over_all_rooms(faults):
    assert len(faults) == FAULTS
    assert sum(fault.file.startswith("csrc/") for fault in faults) <= MOST_OF_CSRC
    rooms = {fault.file.split("/")[1] for fault in faults if fault.file.startswith("megatron_rl/")}
    wanted = "algorithms config data metrics models ops rollout routing run sandbox sync tasks trainer verifiers vp2o"
    assert rooms >= set(wanted.split())
    assert len({fault.what for fault in faults}) == FAULTS


def test_each_changes_one_line_of_the_product(faults):
    for fault in faults:
        assert fault.file.startswith(("megatron_rl/", "sglang_plugin/", "csrc/")), fault.name
        lines = PATCHES[fault.name].read_text().splitlines()
        removed = [line[1:] for line in lines if line.startswith("-") and not line.startswith("--- a/")]
        added = [line[1:] for line in lines if line.startswith("+") and not line.startswith("+++ b/")]
        assert len(removed) == 1 and len(added) <= 1 and removed != added, fault.name
        assert sum(line.startswith("diff ") for line in lines) == 1, fault.name


def test_all_apply(faults):
    for fault in faults:
        command = ["git", "apply", "--check", str(PATCHES[fault.name])]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=20)
        assert done.returncode == 0, f"{fault.name}: make the patch anew, for {fault.file} as it is: {done.stderr}"


def test_claims_are_tests_that_exist(faults):
    for fault in faults:
        for claim in fault.claimed:
            file, _, test = claim.partition("::")
            assert (REPOSITORY / file).is_file(), f"{fault.name}: {file}"
            defined = f"\ndef {test.partition('[')[0]}("
            assert not test or defined in (REPOSITORY / file).read_text(), f"{fault.name}: {claim}"


def test_what_is_no_fault_is_named(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="there is no fault nothing; tests/faults has [a-z0-9_]+, "):
        read("nothing")
    monkeypatch.setitem(PATCHES, "bare", tmp_path / "bare.patch")
    PATCHES["bare"].write_text("diff --git a/setup.py b/setup.py\n")
    with pytest.raises(SystemExit, match=r"bare\.patch: must begin with '# what: \.\.\.', '# claimed: "):
        read("bare")


@pytest.mark.parametrize(
    ("line", "test"),
    [
        ("FAILED tests/config/test_plan.py::test_sizes (call)", "tests/config/test_plan.py::test_sizes"),
        ("ERROR tests/a/test_b.py::test_c[x - y] (setup)", "tests/a/test_b.py::test_c[x - y]"),
        ("FAILED tests/a/test_b.py::test_c[1-2] - assert 0", "tests/a/test_b.py::test_c[1-2]"),
    ],
)
def test_the_first_failing_test_is_read(line, test):
    assert run.FAILED.search(f"...\n{line}\nmore\n")[1] == test
