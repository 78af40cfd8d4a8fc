"""Write docs/configuration.md from megatron_rl/config/: every key with its type, default and meaning.

python tools/config_reference.py > docs/configuration.md
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_rl.config.reference import all_keys

HEAD = """# Configuration

This page lists every key of the YAML files. On the command line each key is a flag, `--section.key VALUE`.
`tools/config_reference.py` writes the page from `megatron_rl/config/`, and a test checks that both agree.

- **Files** are YAML in UTF-8. Each dot of a key is a section: `batch.epochs` is the key `epochs` below `batch:`. Numbers
  follow YAML 1.2 (1e-6; 010 is ten, 0o10 is eight, 0x10 is sixteen); 1_000 is a number too. A key that occurs twice is
  an error, and so is NaN or infinity.
- **Flags** override the file. If a flag occurs twice, the last one counts. The value of a text key is exactly the typed
  text: add no quotes beyond those of the shell. `null`, `~` or an empty value means none, if the key may be none. Lists
  of texts are `a,b` or `[a, b]`; all other values are YAML.
- **Mappings** can be set as a whole or by parts. `--data.options '{}'` empties the mapping, and
  `--data.options.name VALUE` adds an entry. In an entry, a VALUE in brackets or quotes, a number, true or null is read
  as YAML. Any other VALUE is a text exactly as typed.
- **Types**: `Positive` is a whole number from 1 and `Count` one from 0. `PositiveFloat` is a number above 0,
  `NonNegativeFloat` one from 0, and `Fraction` one from 0 to 1. `Secret` is `env:NAME` (environment variable) or
  `file:PATH`.
- **Conditions** are in parentheses at the end of a meaning. A key `only with` another key is read only if the other key
  has one of the listed values, or differs from its default if no values are listed. `not with` is the opposite.
- **Keys without effect**: `train`, `sft`, `reward` and `dpo` print one line at their start. This line names the keys
  that differ from their defaults and that the command never reads, such as `algorithm.aggregation` in SFT. `eval`,
  `rollout`, `prune` and `quantize` accept the config of any run without this line.
"""


def page() -> str:
    lines = [HEAD, "| key | type | default | meaning |", "|---|---|---|---|"]
    for row in all_keys():
        cells = [cell.replace("|", "\\|") for cell in row]
        lines.append(f"| `{cells[0]}` | `{cells[1]}` | `{cells[2]}` | {cells[3]} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
