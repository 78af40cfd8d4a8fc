"""A scorer of somebody else's can compute, and nothing else; what it changes is gone with the call."""

from __future__ import annotations

import errno
import json

import pytest

from megatron_rl.config import DataConfig
from megatron_rl.errors import UserError
from megatron_rl.sandbox import isolated
from megatron_rl.sandbox.worker_pool import Failure, WorkerPool
from megatron_rl.tasks import build_task
from tests.sandbox.hostile_scorers import ODD, TRIES
from tests.tasks.canary import Canary

pytestmark = pytest.mark.skipif(bool(isolated.problem()), reason=isolated.problem() or "isolated")


@pytest.fixture(scope="module")
def attempt():
    pool = WorkerPool("tests.sandbox.hostile_scorers:attempt", timeout_s=60.0, size=2)
    yield lambda *calls: pool.map(calls)
    pool.close()


@pytest.mark.slow
def test_nothing_but_computing_is_allowed(attempt, tmp_path):
    """As root and as anybody else: what the folder's mode would allow is refused by the kernel's filter."""
    path = tmp_path / "canary"
    there = tmp_path / "canary.there"
    there.write_text("x")
    for folder in (tmp_path, there):
        folder.chmod(0o777)
    found = dict(zip(TRIES, attempt(*((name, str(path)) for name in TRIES)), strict=True))
    refused = {errno.EPERM, errno.EACCES}
    assert {name: result for name, result in found.items() if int(result["errno"]) not in refused} == {}
    assert not path.exists() and there.read_text() == "x" and there.stat().st_mode & 0o777 == 0o777


def test_a_call_changes_nothing_for_the_next_one(attempt):
    for _ in range(3):
        assert attempt(("changes", "")) == [{"score": 1.0, "pi": 3.0}]
    assert attempt(("computes", "")) == [{"score": pytest.approx(0.4999950)}]


def test_what_it_may_and_what_is_no_result(attempt):
    found = dict(zip(ODD, attempt(*((name, "") for name in ODD)), strict=True))
    good = {name: result["score"] for name, result in found.items() if not isinstance(result, Failure)}
    assert good == {
        "changes": 1.0,
        "computes": pytest.approx(0.499995),
        "reads": 1.0,
        "descriptors": 1.0,
        "a forged result": 1.0,
    }
    assert found["without end"].timed_out and "longer than its limit" in found["without end"].reason
    for name, result in found.items():
        if name not in good and name != "without end":
            assert "Unscored" in result.reason and not result.timed_out and len(result.reason) < 400, (name, result)


def test_a_worker_goes_on_after_any_call(attempt):
    [before] = attempt(("computes", ""))
    for name in ("without end", "an end", "an abort"):
        attempt((name, ""))
    assert attempt(("computes", "")) == [before]


@pytest.mark.slow
def test_a_verifier_of_the_users_is_isolated_by_choice(tmp_path):
    """A response changes nothing by what it has it do, and is nothing but computing."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{n}", "answer": "a"}) + "\n" for n in range(30)))
    settings = {
        "path": str(path),
        "verifier": "tests.sandbox.hostile_scorers:own",
        "rewards": {"correct": 1, "seen": 0},
    }
    with Canary(tmp_path) as canary:
        for alone in (True, False):
            task = build_task(DataConfig(**settings, options={"isolated": alone, "verifier_timeout_s": 20}))
            try:
                write = f"eval(\"open({str(canary.file)!r}, 'w') and 'a'\")"
                found = task.score(task.prompts("train")[:4], ["a", "b", "eval('CHANGED.clear() or \"a\"')", write])
                assert [parts["correct"] for parts in found[:3]] == [1.0, 0.0, 1.0]
                assert canary.file.exists() != alone and found[3]["correct"] == float(not alone)
                if alone:
                    assert [parts["seen"] for parts in found[:3]] == [1.0, 1.0, 0.0], "each is the first"
            finally:
                task.close()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"verifier": "math", "options": {"isolated": True}},
            "data.options.isolated is for a verifier of your own, and 'math'",
        ),
        ({"options": {"isolated": True}}, "for a verifier of your own, and 'exact' is built in"),
        ({"options": {"isolated": 1}}, "data.options.isolated = 1 is neither true nor false"),
    ],
)
def test_what_cannot_be_isolated_is_refused(data, message, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n')
    with pytest.raises(UserError, match=f"^config: .*{message}"):
        build_task(DataConfig(path=str(path), **data))


def test_a_machine_without_libseccomp_refuses(monkeypatch):
    def missing():
        raise OSError("no libseccomp")

    monkeypatch.setattr(isolated, "_filter", missing)
    assert isolated.problem().endswith("(no libseccomp); install libseccomp (apt-get install libseccomp2)")
