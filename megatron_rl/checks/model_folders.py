"""Which keys of a config name models, and the folders that they are: ids of the hub become folders before anything reads them.

A run's config.yaml has ids with the commit that they meant, which a run that goes on takes again.
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
"""Who reads models: a run of some kind, the attribution of a mismatch, a server by itself."""
Place = tuple[str | int, ...]
"""Place of a value in the tree: names of fields, keys of a dict, positions of a list."""
MODEL_FLAGS = ("--speculative-draft-model-path", "--speculative-draft-model", "--tokenizer-path")
"""Flags of SGLang behind which a model's folder stands."""


def model_places(config: Config) -> dict[Place, str]:
    """All that names a model in the config, and what it says there."""
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
    """The part of `model_places` that a reader reads."""
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
    """The config with a folder in the place of each id that is read.

    config_alone: config.json is enough, for plans. Errors: UserError naming the key of what is not there.
    """
    if not config.model.path:
        raise UserError(
            "config: model.path is empty; give a Hugging Face model folder, or an id of the hub (owner/name)"
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
                f"{error}; {config.run_dir} has learned from that commit so far: to go on from another one, say"
                f" {_key(place)}: {text}@main"
            ) from None
        if place[0] not in ("lora", "rollout") and not of_server and not (Path(folder) / "config.json").is_file():
            raise UserError(f"model folder {folder}: has no config.json (config: {_key(place)})")
        config = _replaced(config, place, folder)
    return config


def with_ids(config: Config) -> Config:
    """The config with owner/name@commit in the place of folders of huggingface_hub's cache, as a run's config.yaml has it."""
    for place, text in model_places(config).items():
        config = _replaced(config, place, as_id(text))
    return config


def check_alike(mine: Mapping[Place, str], first: Mapping[Place, str]) -> None:
    """Refuse models of this process that are others than the first one's, as where a branch moved between two look-ups.

    mine, first: `model_places` of configs as `with_ids` has them. Errors: UserError naming the key.
    """
    for place, text in first.items():
        if mine[place] != text:
            raise UserError(
                f"config: {_key(place)}: this process has found {mine[place]}, and the first one {text}; name one of the two"
                " commits in the config"
            )


def overrides_of(before: Config, after: Config) -> list[str]:
    """Command-line words that put the models of `after` into a config that has those of `before`."""
    said: dict[str, Any] = {}
    for place, text in model_places(after).items():
        if _value(before, place) == text:
            continue
        if place[0] == "rollout":
            said[_key(place)] = after.rollout.server.extra_args
        elif (
            place[0] == "rewards"
        ):  # names of reward models may have dots, so the whole mapping takes the place of the other
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
    """An id without a revision, by the commit that the run took for it so far."""
    if known is None or known == text or "@" in text:
        return text
    asked, before = hub_id(text), hub_id(known)
    same = asked is not None and before is not None and before.pinned and before.repo == asked.repo
    return known if same else text


def _ids_so_far(run_dir: Path, places: Iterable[Place]) -> dict[Place, str]:
    """Models of the run's config.yaml; nothing where there is none, or it is damaged."""
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
    """The tree with another value at a place."""
    part, *rest = place
    new = _replaced(_value(tree, [part]), rest, value) if rest else value
    if is_dataclass(tree):
        return cast("T", replace(cast("Any", tree), **{str(part): new}))
    changed = copy(cast("Any", tree))
    changed[part] = new
    return changed
