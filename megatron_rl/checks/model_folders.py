"""Config keys that name models, and the models' folders. Hub ids are replaced by folders before anything reads a model.

A run's config.yaml stores ids with the commit that they resolved to; a resumed run uses the same commit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import asdict, is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from megatron_rl.config import Config
from megatron_rl.config.plan import Kind
from megatron_rl.data.hub import CONFIG, MODEL, TEXTS, as_folder, as_id, hub_id
from megatron_rl.errors import UserError

Reader = Kind | Literal["attribution", "server"]
"""User of a config: a run of some kind, the attribution of a mismatch, or a server alone. The user determines
which models are loaded."""
Place = tuple[str | int, ...]
"""Path of a value in the config: names of fields, keys of a dict, indices of a list."""
MODEL_FLAGS = ("--speculative-draft-model-path", "--speculative-draft-model", "--tokenizer-path")
"""Flags of SGLang whose value is a model folder."""


def model_places(config: Config) -> dict[Place, str]:
    """Return {path in the config: model name} for all values of the config that name a model."""
    scorers = {("rewards", "models", name, "path"): model.path for name, model in config.rewards.models.items()}
    extra = config.rollout.server.extra_args
    flags = {
        ("rollout", "server", "extra_args", at + 1): value
        for at, (flag, value) in enumerate(pairwise(extra))
        if flag in MODEL_FLAGS
    }
    places: dict[Place, str | None] = {
        ("model", "path"): config.model.path,
        ("lora", "path"): config.lora.path,
        ("algorithm", "kl", "reference"): config.algorithm.kl.reference,
        ("critic", "path"): config.critic.path,
        ("dpo", "reference"): config.dpo.reference,
        ("distillation", "teacher"): config.distillation.teacher,
        **scorers,
        **flags,
    }
    return {place: text for place, text in places.items() if text}


def read_places(config: Config, reader: Reader) -> dict[Place, str]:
    """Return the entries of `model_places` that a reader uses."""
    reads = {
        "model": True,
        "lora": reader in ("train", "sft", "reward", "dpo", "attribution", "server"),
        "algorithm": reader == "train" and config.algorithm.kl.coefficient > 0,
        "critic": reader == "train" and config.algorithm.advantage == "gae",
        "dpo": reader == "dpo",
        "distillation": reader in ("train", "sft"),
        "rewards": reader in ("train", "sample"),
        "rollout": reader == "server" or (reader in ("train", "sample") and not config.rollout.external),
    }
    return {place: text for place, text in model_places(config).items() if reads[str(place[0])]}


def with_folders(config: Config, reader: Reader, *, config_alone: bool = False) -> Config:
    """Return the config in which folders replace the Hub ids of all models that `reader` uses.

    config_alone: True to download only config.json, which is enough for plans. Errors: UserError that names the key of a
    missing model.
    """
    if not config.model.path:
        raise UserError(
            "config: model.path is empty; set it to a Hugging Face model folder, or to an id on the Hugging Face Hub"
            " (owner/name)"
        )
    known = _ids_so_far(config.run_dir, model_places(config))
    for place, text in read_places(config, reader).items():
        if config_alone and place[0] in ("lora", "rollout"):
            continue
        of_server = place[0] == "rewards" and config.rewards.models[str(place[2])].address is not None
        wanted = CONFIG if config_alone else TEXTS if of_server else MODEL
        asked = _pinned(text, known.get(place))
        try:
            folder = as_folder(asked, f"config: {_key(place)}", wanted)
        except UserError as error:
            if asked == text:
                raise
            raise UserError(
                f"{error}; {config.run_dir} has used that commit so far: to continue with another commit, set"
                f" {_key(place)}: {text}@main"
            ) from None
        if place[0] not in ("lora", "rollout") and not of_server and not (Path(folder) / "config.json").is_file():
            raise UserError(f"model folder {folder} has no config.json (config: {_key(place)})")
        config = _replaced(config, place, folder)
    return config


def with_ids(config: Config) -> Config:
    """Return the config with folders of huggingface_hub's cache replaced by owner/name@commit, as in a run's config.yaml."""
    for place, text in model_places(config).items():
        config = _replaced(config, place, as_id(text))
    return config


def check_alike(mine: Mapping[Place, str], first: Mapping[Place, str]) -> None:
    """Refuse models that differ between this process and the first one: a Hub branch may change between two look-ups.

    mine, first: `model_places` of configs from `with_ids`. Errors: UserError that names the key.
    """
    for place, text in first.items():
        if mine[place] != text:
            raise UserError(
                f"config: {_key(place)}: this process found {mine[place]}, and the first process {text}; name one of"
                " the two commits in the config"
            )


def overrides_of(before: Config, after: Config) -> list[str]:
    """Return command-line arguments that replace the models of config `before` by the models of config `after`."""
    said: dict[str, Any] = {}
    for place, text in model_places(after).items():
        if _value(before, place) == text:
            continue
        if place[0] == "rollout":
            said[_key(place)] = after.rollout.server.extra_args
        elif place[0] == "rewards":  # names of reward models may contain dots, so the whole mapping is replaced
            said["rewards.models"] = asdict(after.rewards)["models"]
        else:
            said[_key(place)] = text
    return [
        word
        for key, value in said.items()
        for word in (f"--{key}", value if isinstance(value, str) else json.dumps(value))
    ]


def _key(place: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in place if isinstance(part, str))


def _pinned(text: str, known: str | None) -> str:
    """Add the commit that the run has used so far (`known`) to an id without a revision. Return other texts unchanged."""
    if known is None or known == text or "@" in text:
        return text
    asked, before = hub_id(text), hub_id(known)
    same = asked is not None and before is not None and before.pinned and before.repo == asked.repo
    return known if same else text


def _ids_so_far(run_dir: Path, places: Iterable[Place]) -> dict[Place, str]:
    """Return the models in the run's config.yaml; empty if the file is missing or damaged."""
    try:
        before = yaml.safe_load((run_dir / "config.yaml").read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    found: dict[Place, str] = {}
    for place in places:
        with suppress(LookupError, TypeError):
            found[place] = str(_value(before, place))
    return found


def _value(tree: Any, place: Sequence[str | int]) -> Any:
    for part in place:
        tree = getattr(tree, str(part)) if is_dataclass(tree) else tree[part]
    return tree


def _replaced[T](tree: T, place: Sequence[str | int], value: Any) -> T:
    """Return a copy of the tree in which the value at `place` is replaced."""
    part, *rest = place
    new = _replaced(_value(tree, [part]), rest, value) if rest else value
    if is_dataclass(tree):
        return cast("T", replace(cast("Any", tree), **{str(part): new}))
    changed = copy(cast("Any", tree))
    changed[part] = new
    return changed
