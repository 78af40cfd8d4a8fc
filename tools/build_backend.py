"""Build backend: setuptools, plus the pinned torch for isolated builds, which compile the kernels against it."""

from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  # all hooks that pip and build call

NEEDED = ("torch", "ninja")


def _pins() -> list[str]:
    pins = Path(__file__).parents[1].joinpath("requirements", "trainer.txt").read_text().splitlines()
    return [pin for pin in pins if pin.split("==")[0] in NEEDED]


def get_requires_for_build_wheel(config_settings=None):
    return build_meta.get_requires_for_build_wheel(config_settings) + _pins()


def get_requires_for_build_editable(config_settings=None):
    return build_meta.get_requires_for_build_editable(config_settings) + _pins()
