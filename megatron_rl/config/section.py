"""Building blocks of the config: the `section` decorator, and types of values that are checked."""

from __future__ import annotations

import re
import unicodedata
from typing import Annotated, cast, dataclass_transform

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError


@dataclass_transform(frozen_default=True, kw_only_default=True)
def section[T](cls: type[T]) -> type[T]:
    """A part of the tree: a frozen dataclass whose values are checked. Its numbers are finite."""
    made = dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))(cls)
    return cast("type[T]", made)  # pydantic names a type of its own


Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Secret = Annotated[str, Field(pattern=r"^(env|file):.+")]
"""Where a secret is: env:NAME or file:PATH (credentials.py)."""


def _run_name(name: str) -> str:
    """It becomes a folder below runs_dir. Whatever else it becomes a part of has to quote it."""
    parts = name.split("/")
    odd = any(unicodedata.category(sign) in ("Cc", "Cs") for sign in name)  # controls, and halves of surrogate pairs
    if odd or len(name.encode()) > 200 or any(not p or p != p.strip() or p.startswith((".", "-")) for p in parts):
        raise PydanticCustomError(
            "run_name",
            "a run's name has at most 200 bytes and no control characters; / makes folders of runs, and no part between them is"
            " empty, begins with . or -, or has a blank at an end",
        )
    return name


def job_name(name: str) -> str:
    """A run's name as that of a job and of its logs: SLURM has an own meaning for some signs, whoever quotes them."""
    return re.sub(r"[^\w .()+=,@-]", "-", name)


RunName = Annotated[str, AfterValidator(_run_name)]


def _set_name(name: str) -> str:
    """It stands between eval/ and the names of metrics, and between dots on the command line."""
    if not re.fullmatch(r"\w[\w+-]*", name) or name in ("agent", "reward"):
        raise PydanticCustomError(
            "set_name",
            "a set's name has letters, digits and any of _-+, begins with a letter, a digit or _, and is not agent or reward,"
            " whose metrics are other things'",
        )
    return name


SetName = Annotated[str, AfterValidator(_set_name)]
