"""Finds the places of Megatron-Core that speak of a GPU, and that the platform neither replaces nor explains."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.platform.megatron import cuda, rules
from megatron_rl.platform.megatron.coverage import REVIEWED, UNREACHED, rewritten

_ATTRIBUTES = ("cuda", "is_cuda", "pin_memory", "record_stream", "compile")
_TEXT = re.compile(r"^cuda(:.*)?$|^torch\.cuda(\.\w+)?$")


@dataclass(frozen=True)
class Place:
    """A place of Megatron that still speaks of a GPU."""

    path: str
    """Below megatron/."""
    line: int
    what: str


def uncovered(root: Path) -> list[Place]:
    """Places that no rule replaces and neither table explains, and names that our torch.cuda does not have."""
    places = []
    for path, tree, _ in rewritten(root):
        left = list(_left(tree, path))
        if any(path.startswith(prefix) for prefix in UNREACHED):
            left = [place for place in left if place.what.endswith("counterpart")]
        counts = Counter(place.what for place in left)
        places += [p for p in left if counts[p.what] > REVIEWED.get((path, p.what), (0,))[0]]
    return places


def wrong_swaps(root: Path) -> list[str]:
    """Entries of SWAPS that no longer match the source as often as they say."""
    found: Counter = Counter()
    for swap in rules.SWAPS:
        base = root / Path(*swap.module.split(".")[1:])
        file = base.with_suffix(".py") if base.with_suffix(".py").exists() else base / "__init__.py"
        if file.exists():
            _, sites = rules.rewrite(file.read_bytes(), swap.module, str(file))
            found[swap] = sum(site.rule == "swap" and site.what == swap.old for site in sites)
    return [f"{s.module}: `{s.old}` {found[s]} times, not {s.count}" for s in rules.SWAPS if found[s] != s.count]


def _left(tree: ast.Module, path: str) -> Iterator[Place]:
    for node in ast.walk(tree):
        if isinstance(node, ast.expr | ast.stmt | ast.keyword):
            yield from (Place(path, node.lineno, what) for what in _mentions(node))


def _mentions(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        if isinstance(node.value, ast.Name) and node.value.id == rules.SHIM:
            if not _has(node.attr):
                yield f"torch.cuda.{node.attr} has no counterpart"
        elif node.attr in _ATTRIBUTES and (node.attr != "compile" or ast.unparse(node.value) == "torch"):
            yield f".{node.attr}"
    elif isinstance(node, ast.ImportFrom) and node.module == rules.SHIM_MODULE:
        yield from (f"torch.cuda.{a.name} has no counterpart" for a in node.names if not _has(a.name))
    elif isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
        yield from ("import cuda" for name in names if "cuda" in name.split("."))
    elif isinstance(node, ast.keyword) and node.arg == "pin_memory":
        if not (isinstance(node.value, ast.Constant) and node.value.value is False):
            yield "pin_memory="
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _TEXT.match(node.value):
        yield repr(node.value)


def _has(name: str) -> bool:
    return name in cuda.NO_COUNTERPART or name in vars(cuda)
