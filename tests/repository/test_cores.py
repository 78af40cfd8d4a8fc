"""Ranks of a test share a core with each other, and with no other test's ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks


@pytest.fixture
def busy(monkeypatch, tmp_path):
    """A machine with the cores 3 and 5, and as many processes to run as are set."""
    monkeypatch.setattr(ranks.os, "sched_getaffinity", lambda _: {3, 5})
    monkeypatch.setattr(ranks.TRAINER, "folder", lambda: tmp_path)
    running = [3]
    monkeypatch.setattr(Path, "read_text", lambda self: f"9.00 8.00 7.00 {running[0]}/99 1234")
    return running


def test_two_tests_have_a_core_each_and_a_third_one_all(busy):
    with ranks.shared_core(2) as first:
        with ranks.shared_core(4) as second, ranks.shared_core(2) as third, ranks.shared_core(1) as alone:
            assert (first, second, third, alone) == ([3], [5], [3, 5], [3, 5])
        with ranks.shared_core(2) as next_one:
            assert next_one == [5], "which is free again"


def test_a_machine_with_little_to_do_has_all_cores_for_them(busy):
    busy[0] = 2
    with ranks.shared_core(2) as cores:
        assert cores == [3, 5]
