"""Which stage a machine with a GPU should run next: the first, in order of worth, without a stored result for the present code.

    python tests/gpu/next_stage.py          # the queue, and the command for the next stage

A result is docs/results/GPU/STAGE.json of a commit since which nothing has changed in the files that the stage speaks for.
Where there is a bundle, its COMMIT becomes this checkout's: on a machine without git it is the commit of the results.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "docs" / "results"
GPUS = ("h100", "h200")
BUNDLE = REPOSITORY / "gpu-bundle"
CALL_MIB = 64
"""Limit of one call to a machine without a network, the repository's REPOSITORY_MIB included."""
REPOSITORY_MIB = 10


@dataclass(frozen=True)
class Stage:
    name: str
    archives: tuple[str, ...]
    """What has to be carried to a machine without a network, or has been before."""
    seconds: int
    """At most, without what comes before the first test; of those with a stored result, its own time and a fifth."""
    files: tuple[str, ...]
    """What its result speaks for."""
    budget: int | None = None
    """Seconds after which it should begin no test, to end in time."""


TRAINER = ("megatron_rl/distributed", "megatron_rl/models", "megatron_rl/trainer", "megatron_rl/ops", "csrc")
TWO_MODELS = ("references/models/qwen3_moe", "references/models/gpt_oss")
STAGES = (
    Stage(
        "engine",
        ("trainer", "rollout", "references/engine"),
        540,
        (*TRAINER, "megatron_rl/rollout", "megatron_rl/servers", "megatron_rl/sync"),
        390,
    ),
    Stage("te", ("trainer", "rollout", "te", "references/engine", *TWO_MODELS), 480, TRAINER),
    Stage("speed", ("trainer",), 90, ("megatron_rl/ops", "megatron_rl/models/experts.py", "csrc")),
    Stage("attention", ("trainer", "te", "fa4"), 120, ("megatron_rl/ops", "csrc/sink_attention")),
    Stage("kernels", ("trainer",), 50, ("megatron_rl/ops", "csrc")),
    Stage("models", ("trainer", "references/models"), 110, TRAINER),
    Stage(
        "training", ("trainer", "references/training"), 210, (*TRAINER, "megatron_rl/algorithms", "megatron_rl/sync")
    ),
    Stage("slices", ("trainer",), 110, TRAINER),
    Stage("batch_invariant", ("trainer",), 130, ("megatron_rl/ops/batch_invariant.py", "csrc/batch_invariant")),
    Stage("invariance", ("trainer",), 20, ("megatron_rl/ops", "csrc")),
    Stage("start", ("trainer",), 50, ("setup.py", "megatron_rl/run", "megatron_rl/checks", "megatron_rl/platform")),
)


def stored(stage: Stage, results: Path = RESULTS) -> dict | None:
    """Its newest result."""
    found = [json.loads(path.read_text()) for gpu in GPUS if (path := results / gpu / f"{stage.name}.json").is_file()]
    return max(found, key=lambda result: result["machine"]["date"], default=None)


def changed(stage: Stage, commit: str) -> int | None:
    """How many of its files have changed since, uncommitted ones too; None where the commit is unknown."""
    command = ["git", "diff", "--name-only", commit, "--", *stage.files]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    return len(done.stdout.split()) if done.returncode == 0 else None


def state(stage: Stage, results: Path = RESULTS) -> tuple[bool, str]:
    """Whether its result is one of the present code, and what there is in words."""
    result = stored(stage, results)
    if result is None:
        return False, "never run"
    machine = result["machine"]
    failed = sum(test["outcome"] == "failed" for test in result["tests"].values())
    text = f"{machine.get('device', 'no GPU')}, {machine['date']}" + (f", {failed} failed" if failed else "")
    commit = re.match(r"[0-9a-f]{7,40}", machine.get("commit") or "")
    files = changed(stage, commit[0]) if commit else None
    if files is None:
        return False, f"{text}, of an unknown commit"
    return files == 0 and not failed, text if files == 0 else f"{text}, {files} files changed since"


def write_commit(bundle: Path) -> None:
    """bundle/COMMIT: this checkout's, "-dirty" where files differ from it; nothing where git knows none."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode == 0:
        (bundle / "COMMIT").write_text(done.stdout)


def parts(name: str, bundle: Path) -> list[Path]:
    """Files of an archive, or the folder of references of that name; empty where the bundle has none."""
    return [path for path in [bundle / name] if path.is_dir()] or sorted(bundle.glob(f"{name}.tar.xz*"))


def calls(stage: Stage, bundle: Path, limit: int = (CALL_MIB - REPOSITORY_MIB) * 2**20) -> list[tuple[list[str], str]]:
    """(paths to carry, command) of each call: the last runs the stage, those before unpack, and compile SGLang's kernels."""
    carried: list[list[str]] = [[]]
    room = limit
    for path in (path for name in stage.archives for path in parts(name, bundle)):
        size = sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file())
        if carried[-1] and size > room:
            carried.append([])
            room = limit
        carried[-1].append(str(path.relative_to(bundle)))
        room -= size
    last = f"tests/gpu/run.sh {stage.name}" + (f" --budget-s {stage.budget}" if stage.budget else "")
    return [(paths, "tests/gpu/run.sh start") for paths in carried[:-1]] + [(carried[-1], last)]


def main() -> None:
    if BUNDLE.is_dir():
        write_commit(BUNDLE)
    following = None
    for stage in STAGES:
        current, text = state(stage)
        following = following or (None if current else stage)
        print(f"{stage.name:16}{stage.seconds / 60:4.1f} min  {text}")
    if following is None:
        print("every stage has a result of the present code")
        return
    print("\nnext, where the network is:")
    print(f"    tools/setup.sh --gpu && {calls(following, BUNDLE)[-1][1]}")
    print(f"on a machine without one, in calls of at most {CALL_MIB} MiB, each with the repository:")
    if missing := [name for name in following.archives if not parts(name, BUNDLE)]:
        print(f"    (not packed yet: {', '.join(missing)}; python tests/gpu/bundle.py)")
    for paths, command in calls(following, BUNDLE):
        print(f"    {command}")
        print(f"        with {' '.join(f'gpu-bundle/{path}' for path in [*paths, 'SHA256SUMS', 'COMMIT'])}")


if __name__ == "__main__":
    main()
