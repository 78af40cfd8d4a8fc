"""Write docs/configuration.md from megatron_rl/config/: every key with its type, default and meaning.

python tools/config_reference.py > docs/configuration.md
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_rl.config.reference import all_keys

HEAD = """# Configuration

Every key of the YAML files, and of the command line as `--section.key VALUE`. This page is made from
`megatron_rl/config/` by `tools/config_reference.py`; a test keeps them equal.

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


def page() -> str:
    lines = [HEAD, "| key | type | default | meaning |", "|---|---|---|---|"]
    for row in all_keys():
        cells = [cell.replace("|", "\\|") for cell in row]
        lines.append(f"| `{cells[0]}` | `{cells[1]}` | `{cells[2]}` | {cells[3]} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
