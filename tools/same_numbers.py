"""Check that a change of the code changes no number: replay recorded rollouts with the code before and after it.

    python tools/same_numbers.py record ROLLOUTS --checkout BEFORE   # real servers, once
    python tools/same_numbers.py run ROLLOUTS OLD --checkout BEFORE
    python tools/same_numbers.py run ROLLOUTS NEW                    # this checkout
    python tools/same_numbers.py compare OLD NEW

The scenarios, and what was renamed in between, are in same_numbers.yaml beside it. A result is SCENARIO.json: the lines of
metrics.jsonl and the figures of a report, and a SHA-256 of every tensor of the last checkpoint (weights, predictors, critic,
optimizer) and of the folder hf/. `compare` exits with 1 where one of them differs (a metric by more than the order of its sums
explains), or is gone. Both runs have to be on one machine: other processors add up in another order.

Nothing of a checkout is imported here: it runs by its own command line, and its keys are read in its docs/configuration.md.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve()
LONGEST_S = 900
"""Of one run."""
NOT_COMPARED = ("time/", "throughput/", "memory/")
"""Beginnings of the names of metrics that are of the clock and the machine."""
ROUNDING = 1e-12
"""Relative difference of a metric that the order of its sums explains; a hundredth of it, absolute, where ones cancel. Tensors
have to be equal bit by bit."""
SHOWN = 5
"""Differences of a scenario that are named."""
ROLLOUTS = "{rollouts}"
"""Stands for the folder of the recordings in the settings of same_numbers.yaml."""
Settings = dict[str, Any]
"""Dotted config keys -> values, where a section's values may also be given together."""
Choices = Mapping[str, list[str] | None]
"""Dotted config keys -> the words that a key takes; None where it takes others too."""


# -- names: pure ------------------------------------------------------------------------------------------------------


def flat(settings: Mapping[str, Any], known: Choices, prefix: str = "") -> Settings:
    """Settings with one entry a key; only the keys of `known` have values that are mappings themselves."""
    found: Settings = {}
    for key, value in settings.items():
        section = isinstance(value, Mapping) and prefix + key not in known
        found |= flat(value, known, f"{prefix}{key}.") if section else {prefix + key: value}
    return found


def nested(settings: Settings) -> dict[str, Any]:
    """{'a.b': 1} -> {'a': {'b': 1}}."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, last = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return tree


def in_words_of(known: Choices, settings: Settings, renames: Mapping[str, Any]) -> Settings:
    """Settings in the config's new names -> those of a checkout whose config has the keys and words of `known`.

    An old name is taken where the checkout has no new one. Errors: KeyError for a key that it has under neither.
    """
    old_keys = {new: old for old, new in renames["keys"].items()}
    found: Settings = {}
    for key, value in settings.items():
        name = key if key in known else old_keys.get(key)
        if name is None or name not in known:
            raise KeyError(f"this checkout's config has no key {key}, and renames.keys has no older name of it")
        words = known[name]
        if words is not None and value not in words:
            old_words = {new: old for old, new in renames["values"].get(key, {}).items()}
            value = old_words.get(value, value)
        found[name] = value
    return found


def renamed(values: Mapping[str, Any], patterns: Mapping[str, str]) -> dict[str, Any]:
    """Values under their new names; patterns: regular expression for the whole old name -> new name with \\1 for groups.

    Errors: ValueError where two names become one.
    """
    found: dict[str, Any] = {}
    for old, value in values.items():
        matches = ((re.fullmatch(pattern, old), new) for pattern, new in patterns.items())
        name = next((match.expand(new) for match, new in matches if match), old)
        if name in found:
            raise ValueError(f"two names become {name}, one of them {old}: see renames in {HERE.stem}.yaml")
        found[name] = value
    return found


def equal(one: Any, other: Any) -> bool:
    """Whether two values of a metric are equal, but for the order in which sums of fp64 were added up."""
    numbers = isinstance(one, float) and isinstance(other, (int, float))
    return one == other or (numbers and math.isclose(one, other, rel_tol=ROUNDING, abs_tol=ROUNDING / 100))


def differences(old: Mapping[str, Any], new: Mapping[str, Any], renames: Mapping[str, Any]) -> tuple[list, list]:
    """What differs between two results of one scenario, and the metrics that NEW alone has."""
    wrong: list[str] = []
    before, after = ([line["step"] for line in result["metrics"]] for result in (old, new))
    if before != after:
        wrong.append(f"steps {before} -> {after}")
    extra: dict[str, None] = {}
    for line, now in zip(old["metrics"], new["metrics"], strict=False):
        was = renamed(line, renames["metrics"])
        where = f"step {line['step']}: "
        wrong += [f"{where}{name} is gone" for name in was if name not in now]
        both = [name for name in was if name in now]
        wrong += [f"{where}{name} {was[name]} -> {now[name]}" for name in both if not equal(was[name], now[name])]
        extra |= dict.fromkeys(name for name in now if name not in was)
    was, now = renamed(old["tensors"], renames["tensors"]), new["tensors"]
    wrong += [f"tensor {name} {'is gone' if name in was else 'is new'}" for name in sorted(was.keys() ^ now.keys())]
    wrong += [f"tensor {name} differs" for name in sorted(was.keys() & now.keys()) if was[name] != now[name]]
    return wrong, list(extra)


def choices(reference: str) -> dict[str, list[str] | None]:
    """Dotted keys of docs/configuration.md -> what a key of words alone takes, None for another."""
    found: dict[str, list[str] | None] = {}
    for key, kind in re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", reference, re.MULTILINE):
        words = re.fullmatch(r"Literal(\[[^\[\]]+\])", kind)
        found[key] = ast.literal_eval(words[1]) if words else None
    return found


def figures(report: Any, name: str = "") -> dict[str, float]:
    """The numbers of a JSON report, each under the path to it: {'loss': {'after': 2.0}} -> {'loss/after': 2.0}."""
    if isinstance(report, (dict, list)):
        parts = report.items() if isinstance(report, dict) else enumerate(report)
        return {k: v for part, value in parts for k, v in figures(value, f"{name}/{part}").items()}
    return {name.removeprefix("/"): report} if isinstance(report, (int, float)) else {}


def steps_of(preferences: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Rows of responses in steps, one a number, each with a label: 1 in a chosen response, 0 in a rejected one."""
    responses = [(row["prompt"], row[which].split(), which) for row in preferences for which in ("chosen", "rejected")]
    return [
        {"prompt": prompt, "steps": steps, "labels": [float(which == "chosen")] * len(steps)}
        for prompt, steps, which in responses
        if steps
    ]


# -- runs -------------------------------------------------------------------------------------------------------------


class Runs:
    """Runs of one checkout's code, in a folder of their own, on the models and data of the folder of the recordings."""

    def __init__(self, checkout: Path, out: Path, rollouts: Path, plan: Mapping[str, Any]) -> None:
        self.checkout, self.out, self.rollouts, self.plan = checkout, out, rollouts, plan
        out.mkdir(parents=True, exist_ok=True)
        self.known = choices((checkout / "docs" / "configuration.md").read_text())
        scripts = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["scripts"]
        self.command_line: str = scripts["megatron-rl"].partition(":")[0]

    def start(self, name: str, about: Mapping[str, Any], more: Settings) -> Path:
        """A run from its first step to its end; its folder. about: as in same_numbers.yaml; more: further settings."""
        folder, config = self.out / "runs" / name, self.out / "runs" / f"{name}.yaml"
        shutil.rmtree(folder, ignore_errors=True)  # else it would go on
        command = about.get("command", "train")
        parts = [self.plan["every"], self.plan["train"] if command == "train" else {}, about.get("settings", {})]
        settings = {key: value for part in parts for key, value in flat(part, self.plan_keys).items()}
        own = {"name": name, "runs_dir": str(self.out / "runs")}
        own["model.path"] = str(self.rollouts / about.get("model", "runs/warm/hf"))
        config.parent.mkdir(exist_ok=True)
        text = yaml.safe_dump(nested(in_words_of(self.known, own | settings | more, self.plan["renames"])))
        config.write_text(text.replace(ROLLOUTS, str(self.rollouts)))
        processes = str(about.get("processes", 1))
        arguments = ["-m", self.command_line, command, str(config), "--nproc", processes]
        self._python(*arguments, log=config.with_suffix(".log"))
        return folder

    @property
    def plan_keys(self) -> Choices:
        """Keys that same_numbers.yaml may name: those of the checkout, under their new names."""
        return self.known | dict.fromkeys(self.plan["renames"]["keys"].values())

    def _python(self, *arguments: str, log: Path) -> None:
        """Run this Python on the checkout's code. Errors: SystemExit with the end of its output."""
        path = f"{self.checkout}{os.pathsep}{self.checkout / 'sglang_plugin'}"
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file:
            done = subprocess.run(
                [sys.executable, *arguments],
                cwd=self.checkout,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=LONGEST_S,
                check=False,
            )
        if done.returncode:
            lines = log.read_text(errors="replace").splitlines()
            errors = [line for line in lines if "error:" in line] or lines[-20:]
            raise SystemExit("\n".join([f"same_numbers: {' '.join(arguments)} failed [{log}]", *errors]))

    # -- commands -----------------------------------------------------------------------------------------------------

    def record(self, names: list[str]) -> None:
        """The rollouts of the scenarios that have their own, each with a real server; first the models and data of all.

        What is there of the latter stays as it is.
        """
        tools = self.checkout / "tools"
        for name, (family, *flags) in self.plan["models"].items():
            if not (self.out / name).is_dir():
                arguments = [str(tools / "make_tiny_model.py"), family, str(self.out / name), *map(str, flags)]
                self._python(*arguments, log=self.out / f"{name}.log")
        for name, about in self.plan["before"].items():
            samples, preferences = about["command"] == "rollout", self.out / "preferences.jsonl"
            if (preferences if samples else self.out / "runs" / name / "hf").exists():
                continue
            folder = self.start(name, about, {})
            if samples:
                [responses] = (folder / "rollouts").glob("*.jsonl")
                arguments = [str(tools / "make_preferences.py"), str(responses), str(preferences)]
                self._python(*arguments, log=self.out / "preferences.log")
                rows = steps_of([json.loads(line) for line in preferences.read_text().splitlines()])
                (self.out / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            print(f"{name}: made", flush=True)
        for name in names:
            about = self.plan["scenarios"][name]
            if "rollouts" not in about and about.get("command", "train") == "train":
                self.start(name, about, {"rollout.record": True} | flat(about.get("record", {}), self.plan_keys))
                print(f"{name}: recorded", flush=True)

    def replay(self, name: str) -> None:
        """A scenario from recorded rollouts -> SCENARIO.json."""
        about = self.plan["scenarios"][name]
        recorded = self.rollouts / "runs" / about.get("rollouts", name) / "rollouts"
        train = about.get("command", "train") == "train"
        folder = self.start(name, about, {"rollout.load": str(recorded)} if train else {})
        lines = []
        if (folder / "metrics.jsonl").exists():
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        if "report" in about:
            lines.append({"step": 0} | figures(json.loads((folder / about["report"]).read_text())))
        metrics = [{k: v for k, v in line.items() if not k.startswith(NOT_COMPARED)} for line in lines]
        tensors: dict[str, str] = {}
        for checkpoint in (folder / "checkpoints").glob("step_*"):
            tensors |= tensor_hashes(checkpoint)
        tensors |= {f"hf/{key}": value for key, value in folder_hashes(folder / "hf").items()}
        if not metrics or not tensors:
            raise SystemExit(f"same_numbers: {folder} has no metrics, or neither a checkpoint nor hf/")
        (self.out / f"{name}.json").write_text(json.dumps({"metrics": metrics, "tensors": tensors}, indent=1))
        print(f"{name}: {len(metrics)} steps, {len(metrics[-1])} metrics, {len(tensors)} tensors", flush=True)


def tensor_hashes(checkpoint: Path) -> dict[str, str]:
    """Name -> SHA-256 of dtype, shape and bytes of every tensor of a distributed checkpoint, whatever wrote it.

    The checkpoint has to be one's own: torch's reader executes what its metadata name.
    """
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(checkpoint)
    found = reader.read_metadata().state_dict_metadata
    of_tensors = {name: about for name, about in found.items() if isinstance(about, TensorStorageMetadata)}
    state = {name: torch.empty(about.size, dtype=about.properties.dtype) for name, about in of_tensors.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which is what no_dist asks for
        load(state, storage_reader=reader, no_dist=True)
    return {name: tensor_hash(tensor) for name, tensor in sorted(state.items())}


def folder_hashes(folder: Path) -> dict[str, str]:
    """The same of the safetensors in a Hugging Face folder; empty where there is none."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor_hash(tensor) for file in files for name, tensor in sorted(load_file(file).items())}


def tensor_hash(tensor) -> str:
    import torch

    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def compare(old: Path, new: Path, renames: Mapping[str, Any]) -> int:
    """A line for each scenario of OLD. Returns how many differ."""
    failed = 0
    results = sorted(old.glob("*.json"))
    if not results:
        raise SystemExit(f"same_numbers: {old} has no results")
    for file in results:
        name = file.stem
        if not (new / file.name).exists():
            wrong, extra = [f"not in {new}"], []
        else:
            before, after = (json.loads((folder / file.name).read_text()) for folder in (old, new))
            wrong, extra = differences(before, after, renames)
        failed += bool(wrong)
        more = [f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        print(f"{name}: " + ("; ".join(["DIFFERENT", *wrong[:SHOWN], *more]) if wrong else "same"))
        if extra:
            print(f"    new metrics: {', '.join(extra)}")
    return failed


def main(arguments: list[str] | None = None) -> int:
    plan = yaml.safe_load(HERE.with_suffix(".yaml").read_text())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("record", "run"):
        this = commands.add_parser(command)
        this.add_argument("rollouts", type=Path, help="folder of the recordings")
        if command == "run":
            this.add_argument("out", type=Path, help="folder of the results")
            this.add_argument("--jobs", type=int, default=1, metavar="N", help="scenarios at a time (1)")
        this.add_argument(
            "--checkout", type=Path, default=HERE.parents[1], help="whose code runs; by default this one's"
        )
        this.add_argument("--only", nargs="+", choices=list(plan["scenarios"]), default=list(plan["scenarios"]))
    this = commands.add_parser("compare")
    for name in ("old", "new"):
        this.add_argument(name, type=Path)
    args = parser.parse_args(arguments)
    if args.command == "compare":
        return int(compare(args.old, args.new, plan["renames"]) > 0)
    checkout, rollouts = args.checkout.resolve(), args.rollouts.resolve()
    if args.command == "record":
        Runs(checkout, rollouts, rollouts, plan).record(args.only)
        return 0
    runs = Runs(checkout, args.out.resolve(), rollouts, plan)
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(runs.replay, args.only))
    return 0


if __name__ == "__main__":
    sys.exit(main())
