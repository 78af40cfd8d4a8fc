"""Reference of the config keys: type, default and meaning of each key, read from the source of this package."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

from megatron_rl import config
from megatron_rl.config import conditions
from megatron_rl.config.load import nearest_key
from megatron_rl.errors import UserError

Row = tuple[str, str, str, str]
"""One key: (key, type, default, meaning)."""


def all_keys() -> list[Row]:
    """Return all keys of the config, section by section."""
    trees = [ast.parse(file.read_text()) for file in sorted(Path(config.__file__).parent.glob("*.py"))]
    sections = [n for tree in trees for n in tree.body if isinstance(n, ast.ClassDef) and n.name.endswith("Config")]
    return _rows({section.name: section for section in sections}, "Config")


def _plain(annotation: ast.expr) -> str:
    """Return the text of a type annotation without the conditions that are declared in it."""
    if not isinstance(annotation, ast.Subscript) or ast.unparse(annotation.value) != "Annotated":
        return ast.unparse(annotation)
    kind, *metadata = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
    kept = [one for one in metadata if not (isinstance(one, ast.Call) and hasattr(conditions, ast.unparse(one.func)))]
    return f"Annotated[{', '.join(map(ast.unparse, [kind, *kept]))}]" if kept else ast.unparse(kind)


def print_keys(prefix: str = "") -> None:
    """Print the keys that begin with `prefix`. Errors: UserError if there is no such key."""
    found = [row for row in all_keys() if row[0].startswith(prefix)]
    if not found:
        raise UserError(f"keys: no key begins with '{prefix}'; {nearest_key(prefix)}")
    for key, kind, default, meaning in found:
        print(f"{key}: {default}   ({kind})" if default else f"{key}   ({kind})")
        for line in textwrap.wrap(meaning, 110):
            print(f"    {line}")


def _rows(
    classes: dict[str, ast.ClassDef], name: str, prefix: str = "", above: tuple[conditions.Condition, ...] = ()
) -> list[Row]:
    """Return the rows of a section, then those of its nested sections. above: conditions of the enclosing sections."""
    body, found, nested = classes[name].body, [], []
    declared = conditions.declarations(getattr(config, name))
    for index, node in enumerate(body):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        key, kind = f"{prefix}{node.target.id}", _plain(node.annotation)
        own = declared.get(node.target.id, ())
        needs = above + tuple(one for one in own if isinstance(one, conditions.Condition))
        if kind in classes:
            nested += _rows(classes, kind, f"{key}.", needs)
            continue
        after = body[index + 1] if index + 1 < len(body) else None
        text = ast.unparse(after.value) if isinstance(after, ast.Expr) else ""
        meaning = " ".join(ast.literal_eval(text).split()) if text else ""
        if named := re.fullmatch(r"dict\[\w+, (\w+Config)\]", kind):
            nested += _rows(classes, named[1], f"{key}.NAME.", needs)
        default = ast.unparse(node.value) if node.value else ""
        default = {
            "dataclasses.field(default_factory=dict)": "{}",
            "dataclasses.field(default_factory=list)": "[]",
        }.get(default, default)
        where = "; ".join(dict.fromkeys(one.text() for one in needs if key not in one.keys))
        found.append((key, kind, default, f"{meaning} ({where})".strip() if where else meaning))
    return found + nested
