"""Check that a change of the code changes no number: replay recorded rollouts with the code before and after it.

    python tools/same_numbers.py record ROLLOUTS --checkout BEFORE   # real servers, once
    python tools/same_numbers.py run ROLLOUTS OLD --checkout BEFORE
    python tools/same_numbers.py run ROLLOUTS NEW                    # this checkout
    python tools/same_numbers.py compare OLD NEW

The scenarios, and renamed keys and metrics, are in same_numbers.yaml beside this tool. A result is SCENARIO.json. It has the
lines of metrics.jsonl, the figures of a report, and a SHA-256 of every tensor of the last checkpoint (weights, predictors,
critic, optimizer) and of the folder hf/. `compare` exits with 1 if an entry is missing or differs; metrics may differ by
the rounding of sums in another order. Both runs must be on one machine, because other processors add in another order.

This tool imports nothing of a checkout. It uses the checkout's command line, and reads its keys from docs/configuration.md.
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
"""Longest time of one run, in seconds."""
NOT_COMPARED = ("time/", "throughput/", "memory/")
"""Prefixes of metrics that depend on the clock and the machine."""
ROUNDING = 1e-12
"""Relative difference of a metric that another order of its sums can explain. A hundredth of it is the absolute
tolerance, for sums near zero. Tensors must be equal bit by bit."""
SHOWN = 5
"""Number of differences that are printed per scenario."""
ROLLOUTS = "{rollouts}"
"""Placeholder for the folder of the recordings in the settings of same_numbers.yaml."""
Settings = dict[str, Any]
"""Dotted config keys -> values; the values of a section may also be given together."""
Choices = Mapping[str, list[str] | None]
"""Dotted config keys -> the words that a key accepts; None if it accepts other values too."""


# -- names: pure ------------------------------------------------------------------------------------------------------


def flat(settings: Mapping[str, Any], known: Choices, prefix: str = "") -> Settings:
    """Return settings with one entry per key; only keys of `known` may have mappings as values."""
    found: Settings = {}
    for key, value in settings.items():
        section = isinstance(value, Mapping) and prefix + key not in known
        found |= flat(value, known, f"{prefix}{key}.") if section else {prefix + key: value}
    return found


def nested(settings: Settings) -> dict[str, Any]:
    """Return the tree of dotted keys: {'a.b': 1} -> {'a': {'b': 1}}."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, last = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return tree


def in_words_of(known: Choices, settings: Settings, renames: Mapping[str, Any]) -> Settings:
    """Translate settings from new names to those of a checkout whose config has the keys and words of `known`.

    An old name is used if the checkout lacks the new one. Errors: KeyError for a key that the checkout has under
    neither name.
    """
    old_keys = {new: old for old, new in renames["keys"].items()}
    found: Settings = {}
    for key, value in settings.items():
        name = key if key in known else old_keys.get(key)
        if name is None or name not in known:
            raise KeyError(f"this checkout's config has no key {key}, and renames.keys has no older name for it")
        words = known[name]
        if words is not None and value not in words:
            old_words = {new: old for old, new in renames["values"].get(key, {}).items()}
            value = old_words.get(value, value)
        found[name] = value
    return found


def renamed(values: Mapping[str, Any], patterns: Mapping[str, str]) -> dict[str, Any]:
    r"""Return values under their new names.

    patterns: regular expression for the whole old name -> new name, with \\1 for groups. Errors: ValueError if two
    names become one.
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
    """Return whether two values of a metric are equal, up to the order in which sums of fp64 were added."""
    numbers = isinstance(one, float) and isinstance(other, (int, float))
    return one == other or (numbers and math.isclose(one, other, rel_tol=ROUNDING, abs_tol=ROUNDING / 100))


def differences(old: Mapping[str, Any], new: Mapping[str, Any], renames: Mapping[str, Any]) -> tuple[list, list]:
    """Return the differences between two results of one scenario, and the metrics that only NEW has."""
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
    """Return the keys of docs/configuration.md -> the words that a key accepts, None for keys with other values."""
    found: dict[str, list[str] | None] = {}
    for key, kind in re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", reference, re.MULTILINE):
        words = re.fullmatch(r"Literal(\[[^\[\]]+\])", kind)
        found[key] = ast.literal_eval(words[1]) if words else None
    return found


def figures(report: Any, name: str = "") -> dict[str, float]:
    """Return the numbers of a JSON report by their paths: {'loss': {'after': 2.0}} -> {'loss/after': 2.0}."""
    if isinstance(report, (dict, list)):
        parts = report.items() if isinstance(report, dict) else enumerate(report)
        return {k: v for part, value in parts for k, v in figures(value, f"{name}/{part}").items()}
    return {name.removeprefix("/"): report} if isinstance(report, (int, float)) else {}


def steps_of(preferences: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Return rows of responses in steps, one step per number, with label 1 in chosen and 0 in rejected responses."""
    responses = [(row["prompt"], row[which].split(), which) for row in preferences for which in ("chosen", "rejected")]
    return [
        {"prompt": prompt, "steps": steps, "labels": [float(which == "chosen")] * len(steps)}
        for prompt, steps, which in responses
        if steps
    ]


# -- runs -------------------------------------------------------------------------------------------------------------


class Runs:
    """Runs of one checkout's code in their own folder, with the models and data in the folder of the recordings."""

    def __init__(self, checkout: Path, out: Path, rollouts: Path, plan: Mapping[str, Any]) -> None:
        self.checkout, self.out, self.rollouts, self.plan = checkout, out, rollouts, plan
        out.mkdir(parents=True, exist_ok=True)
        self.known = choices((checkout / "docs" / "configuration.md").read_text())
        scripts = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["scripts"]
        self.command_line: str = scripts["megatron-rl"].partition(":")[0]

    def start(self, name: str, about: Mapping[str, Any], more: Settings) -> Path:
        """Run a scenario from its first step to its end, and return its folder.

        about: entry of same_numbers.yaml; more: further settings.
        """
        folder, config = self.out / "runs" / name, self.out / "runs" / f"{name}.yaml"
        shutil.rmtree(folder, ignore_errors=True)  # else the run would resume
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
        """Keys that same_numbers.yaml may name: the keys of the checkout, and their new names."""
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
        """Record the rollouts of the scenarios that have their own, each with a real server, after making all models and data.

        Existing models and data are kept.
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
            print(f"{name}: created", flush=True)
        for name in names:
            about = self.plan["scenarios"][name]
            if "rollouts" not in about and about.get("command", "train") == "train":
                self.start(name, about, {"rollout.record": True} | flat(about.get("record", {}), self.plan_keys))
                print(f"{name}: recorded", flush=True)

    def replay(self, name: str) -> None:
        """Replay a scenario from recorded rollouts, and write SCENARIO.json."""
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
    """Return name -> SHA-256 of dtype, shape and bytes of every tensor of a distributed checkpoint.

    The checkpoint must be trusted: torch's reader executes code that its metadata names.
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
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # no_dist asks for exactly this
        load(state, storage_reader=reader, no_dist=True)
    return {name: tensor_hash(tensor) for name, tensor in sorted(state.items())}


def folder_hashes(folder: Path) -> dict[str, str]:
    """Return the same hashes for the safetensors in a Hugging Face folder; empty if there are none."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor_hash(tensor) for file in files for name, tensor in sorted(load_file(file).items())}


def tensor_hash(tensor) -> str:
    import torch

    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def compare(old: Path, new: Path, renames: Mapping[str, Any]) -> int:
    """Print a line for each scenario of OLD, and return how many differ."""
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
            this.add_argument(
                "--jobs",
                type=int,
                default=1,
                metavar="N",
                help="number of scenarios to run at the same time (default 1)",
            )
        this.add_argument(
            "--checkout", type=Path, default=HERE.parents[1], help="checkout whose code runs (default: this one)"
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
