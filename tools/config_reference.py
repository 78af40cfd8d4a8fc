"""Write docs/configuration.md from megatron_rl/config.py: every key with its type, default and meaning.

python tools/config_reference.py > docs/configuration.md
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "megatron_rl" / "config.py"
HEAD = """# Configuration

Every key of the YAML files, and of the command line as `--section.key VALUE`. This page is made from
`megatron_rl/config.py` by `tools/config_reference.py`; a test keeps them equal.

- **Files** are YAML in UTF-8, with sections for the dots of a key. Numbers are those of YAML 1.2 (1e-6; 010 is ten,
  0o10 eight, 0x10 sixteen) and 1_000. A key that is given twice is an error, and so is NaN or infinity.
- **Flags** take the place of what the file says, and of a flag that is given twice the last one counts. Where a key is
  a text, its value is what was typed, to the letter: no quotes but the shell's. `null`, `~` or nothing is none, where a
  key may be none. Lists of texts are `a,b` or `[a, b]`; all else is YAML. A mapping is replaced by one:
  `--data.options '{}'` empties it, and `--data.options.name VALUE` adds to it, where a VALUE in brackets or quotes, a
  number, true or null is YAML's, and any other a text as it was typed.
- **Keys that a command does nothing with** are named in one line at its start: those that `train`, `sft`, `reward` or
  `dpo` never reads, such as `algorithm.aggregation` in an SFT, where they are away from their defaults. `eval`,
  `rollout`, `prune` and `quantize` take the config of a run as it is.
"""


def sections() -> dict[str, ast.ClassDef]:
    tree = ast.parse(SOURCE.read_text())
    return {n.name: n for n in tree.body if isinstance(n, ast.ClassDef) and n.name.endswith("Config")}


def rows(classes: dict[str, ast.ClassDef], name: str, prefix: str = "") -> list[tuple[str, str, str, str]]:
    """(key, type, default, meaning) of a section and, below it, of the sections inside it."""
    body, found, nested = classes[name].body, [], []
    for index, node in enumerate(body):
        if not isinstance(node, ast.AnnAssign):
            continue
        key, kind = f"{prefix}{node.target.id}", ast.unparse(node.annotation)
        if kind in classes:
            nested += rows(classes, kind, f"{key}.")
            continue
        after = body[index + 1] if index + 1 < len(body) else None
        text = ast.unparse(after.value) if isinstance(after, ast.Expr) else ""
        meaning = " ".join(ast.literal_eval(text).split()) if text else ""
        if named := re.fullmatch(r"dict\[str, (\w+Config)\]", kind):
            nested += rows(classes, named[1], f"{key}.NAME.")
        default = ast.unparse(node.value) if node.value else ""
        default = {
            "dataclasses.field(default_factory=dict)": "{}",
            "dataclasses.field(default_factory=list)": "[]",
        }.get(default, default)
        found.append((key, kind, default, meaning))
        if of_each := re.fullmatch(r"dict\[\w+, (\w+Config)\]", kind):
            nested += rows(classes, of_each[1], f"{key}.NAME.")
    return found + nested


def page() -> str:
    classes = sections()
    lines = [HEAD, "| key | type | default | meaning |", "|---|---|---|---|"]
    for row in rows(classes, "Config"):
        cells = [cell.replace("|", "\\|") for cell in row]
        lines.append(f"| `{cells[0]}` | `{cells[1]}` | `{cells[2]}` | {cells[3]} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
