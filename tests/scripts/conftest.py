"""Scripts of examples/ as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def ablation(request):
    """The script examples/NAME.py of the test file test_NAME.py, imported as if it were started from its folder."""
    name = Path(request.fspath).stem.removeprefix("test_")
    sys.path.insert(0, str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]
    sys.path.remove(str(EXAMPLES))
