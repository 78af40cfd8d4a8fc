"""Whose weights a server has: a run's versions are RUN.STEP there, with the run's own random id."""

from __future__ import annotations

FROM_FOLDER = "default"
"""SGLang's version of the weights that it was started with."""
RELEASED = "released"
"""Version of weights that a run has left on a server which it no longer uses."""


def version_of(run: str, step: int | str) -> str:
    """The version of a run's weights of a step, as servers have it; of a run without an id the step alone."""
    return f"{run}.{step}" if run else str(step)


def owner_of(version: object) -> str:
    """The run that pushed a version, as a server says it; empty: none, or one without an id."""
    return str(version or "").rpartition(".")[0]


def as_own(version: str, run: str) -> str:
    """The step of a version of this run; other versions as they are."""
    return version.rpartition(".")[2] if owner_of(version) == run else version
