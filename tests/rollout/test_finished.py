"""Samples on disk as they finish: what is read again, and what is not."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.data.trajectory import Trajectory, Turn, WeightSpan
from megatron_rl.rollout.sample_journal import SampleJournal, Samples, delete_journal, key_of


def sample(request: int, versions: list[str], parts: int = 1) -> list[Trajectory]:
    rng = np.random.default_rng()
    made = []
    for part in range(parts):
        length = int(rng.integers(len(versions), 20))
        found = Trajectory(
            prompt_id=f"prompt {request}",
            group_id=request // 4,
            tokens=rng.integers(0, 1000, 3 + length).astype(np.int32),
            prompt_length=3,
            finish_reason=random.choice(["stop", "length"]),
            support={"top_p": 0.9},
            kept=[np.sort(rng.choice(1000, 3, replace=False)).astype(np.int32) for _ in range(length)],
            routes=rng.integers(0, 8, (2 + length, 2, 2)).astype(np.uint8),
            weight_spans=[WeightSpan(v, i, i + 1 if v != versions[-1] else length) for i, v in enumerate(versions)],
            text="said",
            reward_parts={"correct": 1.0},
            turns=[Turn("assistant", 0, length, calls=["calculator"])],
            part=part,
        )
        found["rollout_log_probs"] = rng.normal(-2, 1, length).astype(np.float32)
        found["loss_mask"] = rng.random(length) < 0.8
        made.append(found)
    return made


def same(a: list[Trajectory], b: list[Trajectory]) -> None:
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        assert one.fields.keys() == other.fields.keys()
        for name in one.fields:
            assert np.array_equal(one[name], other[name])
        assert np.array_equal(one.tokens, other.tokens)
        assert one.routes is not None and other.routes is not None and np.array_equal(one.routes, other.routes)
        assert one.kept is not None and other.kept is not None
        assert all(np.array_equal(x, y) for x, y in zip(one.kept, other.kept, strict=True))
        for name in (
            "prompt_id",
            "group_id",
            "prompt_length",
            "finish_reason",
            "support",
            "weight_spans",
            "text",
            "part",
        ):
            assert getattr(one, name) == getattr(other, name)
        assert one.turns == other.turns and one.reward_parts == other.reward_parts


@pytest.fixture
def written(tmp_path) -> tuple[Path, Samples]:
    """By two data-parallel ranks, of weights '7' with digest x."""
    samples: Samples = {request: sample(request, ["7"], parts=random.randint(1, 3)) for request in range(8)}
    for rank in (0, 1):
        store = SampleJournal(tmp_path, 7, rank, "key")
        mine = [r for r in samples if r % 2 == rank]
        store.add({r: samples[r] for r in mine[:3]}, {"7": "x", "6": "y"})
        store.add({r: samples[r] for r in mine[3:]}, {"7": "x"})
    return tmp_path, samples


def test_samples_come_back_as_they_were_on_any_layout(written):
    folder, samples = written
    found = SampleJournal(folder, 7, 0, "key").read(range(2, 8), {"7": "x"})
    assert sorted(found) == [2, 3, 4, 5, 6, 7], "those of the other rank too, and none that is not wanted"
    for request, one in found.items():
        same(one, samples[request])


@pytest.mark.parametrize(("step", "key"), [(6, "key"), (8, "key"), (7, "other")])
def test_those_of_another_step_or_another_question_are_not_read(written, step, key):
    assert not SampleJournal(written[0], step, 0, key).read(range(8), {"7": "x"})


def test_weights_are_those_of_this_run(tmp_path):
    """By digest; a response may be of several."""
    digests = {"3": "three", "4": "four", "5": "five"}
    store = SampleJournal(tmp_path, 5, 0, "key")
    spans = {0: ["3"], 1: ["4"], 2: ["5"], 3: ["3", "5"], 4: ["somebody's"]}
    for request, versions in spans.items():
        store.add({request: sample(request, versions)}, digests)

    def found(**pushed: str) -> list[int]:
        return sorted(store.read(range(5), {version.removeprefix("v"): digest for version, digest in pushed.items()}))

    assert found(v3="three", v4="four", v5="five") == [0, 1, 2, 3]
    assert found(v3="three", v4="four", v5="other") == [0, 1], "the run has learned otherwise since then"
    assert found(v3="three", v4="four") == [0, 1], "of weights that are not there yet"
    assert found(v4="five") == found() == []
    store.add({2: sample(2, ["5"])}, {})
    store.add({1: sample(1, ["4"])}, {"4": ""})
    assert found(v4="four", v5="five") == [1, 2], "one whose weights nobody knows does not hide another"
    assert found(v4="") == [], "no digest is the same as no other"


def test_a_record_that_was_cut_off_is_left_out_and_what_is_added_is_found(written, caplog):
    folder, samples = written
    [own] = folder.glob("*.rank0")
    whole = own.read_bytes()
    for cut in random.sample(range(1, len(whole)), 25):
        own.write_bytes(whole[:cut])
        store = SampleJournal(folder, 7, 0, "key")
        left = store.read([0, 2, 4, 6], {"7": "x"})
        for request, one in left.items():
            same(one, samples[request])
        store.mend()
        store.add({0: sample(0, ["7"]), 6: samples[6]}, {"7": "x"})
        caplog.clear()
        again = store.read([0, 2, 4, 6], {"7": "x"})
        assert again.keys() == left.keys() | {0, 6} and not caplog.records
        same(again[6], samples[6])


def test_a_damaged_record_ends_a_file(written, caplog):
    folder, _ = written
    [own] = folder.glob("*.rank0")
    content = bytearray(own.read_bytes())
    content[-random.randint(1, 200)] ^= 1
    own.write_bytes(content)
    found = SampleJournal(folder, 7, 0, "key").read([0, 2, 4, 6], {"7": "x"})
    assert sorted(found) == [0, 2, 4] and own.name in caplog.text


def test_what_a_checkpoint_has_is_forgotten(tmp_path):
    for step in (8, 9, 10, 123456):
        SampleJournal(tmp_path, step, 0, "key").add({0: sample(0, ["7"])}, {})
    (tmp_path / "notes.txt").write_text("mine")
    delete_journal(tmp_path, 10)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["notes.txt", "step_000010.key.rank0", "step_123456.key.rank0"]
    delete_journal(tmp_path / "missing", 10)


def test_a_key_is_of_what_is_asked():
    asked = {"seed": "1/train/0", "tokens": [[1, 2], [3]], "routes": None}
    assert key_of(asked) == key_of(dict(reversed(asked.items())))
    for change in ({"seed": "1/train/1"}, {"tokens": [[1], [2, 3]]}, {"routes": 1}):
        assert key_of(asked | change) != key_of(asked)
