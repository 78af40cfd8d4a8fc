"""These tests take a machine for themselves: they start SLURM's daemons, as root. Only `tests/cluster/run.sh` runs them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.slurm import Slurm, missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    absent = missing()
    reason = (
        f"needs {', '.join(absent)}: tests/cluster/run.sh installs them" if absent else "tests/cluster/run.sh runs it"
    )
    for item in items:
        if item.path.is_relative_to(here) and (absent or os.environ.get("CLUSTER_TESTS") != "1"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    """Two nodes."""
    with Slurm(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster
