"""Building blocks of the config: the `section` decorator, and the checked types of values."""

from __future__ import annotations

import re
import unicodedata
from typing import Annotated, cast, dataclass_transform

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError


@dataclass_transform(frozen_default=True, kw_only_default=True)
def section[T](cls: type[T]) -> type[T]:
    """Make a class a section of the config: a frozen dataclass that checks its values. All its numbers are finite."""
    made = dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))(cls)
    return cast("type[T]", made)  # pydantic's annotation names another type


Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Secret = Annotated[str, Field(pattern=r"^(env|file):.+")]
"""Reference to a secret: env:NAME or file:PATH (credentials.py)."""


def _run_name(name: str) -> str:
    """Return `name` if it can be a folder below runs_dir. Code that uses the name elsewhere has to quote it."""
    parts = name.split("/")
    odd = any(unicodedata.category(sign) in ("Cc", "Cs") for sign in name)  # controls, halves of surrogate pairs
    if odd or len(name.encode()) > 200 or any(not p or p != p.strip() or p.startswith((".", "-")) for p in parts):
        raise PydanticCustomError(
            "run_name",
            "a run's name has at most 200 bytes and no control characters; / makes nested folders, and each part"
            " between slashes must not be empty, begin with . or -, or begin or end with a blank",
        )
    return name


def job_name(name: str) -> str:
    """Return a run's name as the name of a SLURM job and of its logs.

    SLURM gives some characters a meaning even in quotes; these become '-'.
    """
    return re.sub(r"[^\w .()+=,@-]", "-", name)


RunName = Annotated[str, AfterValidator(_run_name)]


def _set_name(name: str) -> str:
    """Return `name` if it can be part of metric names (eval/NAME/score) and of keys of the command line."""
    if not re.fullmatch(r"\w[\w+-]*", name) or name in ("agent", "reward"):
        raise PydanticCustomError(
            "set_name",
            "a set's name has letters, digits and any of _-+, and begins with a letter, a digit or _; agent and"
            " reward are not allowed, because other metrics use these names",
        )
    return name


SetName = Annotated[str, AfterValidator(_set_name)]
