"""What a process on a GPU machine without Transformer Engine imports, where neither is here; and that what the tests, tools
and examples import is there, as much of it is first imported by a process of a test that takes long."""

from __future__ import annotations

import ast
import importlib
import subprocess
from pathlib import Path

from tests.preloaded import PYTHON_WITH_PACKAGES

REPOSITORY = Path(__file__).resolve().parents[2]


def test_every_module_imports_with_a_gpu_and_without_transformer_engine():
    """torch says that there is a GPU, so that nothing of the platform stands in for one."""
    source = """
import importlib, pkgutil
import torch
torch.cuda.is_available = lambda: True
import megatron_rl
found = [m.name for m in pkgutil.walk_packages(megatron_rl.__path__, "megatron_rl.")]
names = [n for n in found if not n.endswith("__main__")]
for name in names:
    importlib.import_module(name)
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron_rl.platform import activate
assert not HAVE_TE and activate() == {"Transformer Engine", "fused Adam"}
print(len(names))
"""
    command = [PYTHON_WITH_PACKAGES, "-W", "ignore", "-c", source]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    modules = list((REPOSITORY / "megatron_rl").rglob("*.py"))
    assert int(done.stdout.split()[-1]) >= len(modules) - 2  # without megatron_rl itself and platform's __main__


def _imported() -> list[tuple[str, str, str]]:
    """(file and line, module, name) of all that files outside the package import from it."""
    found = []
    for path in (
        p for folder in ("tests", "tools", "benchmarks", "examples") for p in (REPOSITORY / folder).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "megatron_rl":
                place = f"{path.relative_to(REPOSITORY)}:{node.lineno}"
                found += [(place, str(node.module), alias.name) for alias in node.names]
    return found


def test_what_tests_and_tools_import_exists():
    def exists(module: str, name: str) -> bool:
        if hasattr(importlib.import_module(module), name):
            return True
        try:
            importlib.import_module(f"{module}.{name}")
        except ModuleNotFoundError:
            return False
        return True

    imported = _imported()
    assert len(imported) > 500
    assert [f"{place}: {module} has no {name}" for place, module, name in imported if not exists(module, name)] == []
