"""Config: unknown keys and bad values name the key and the nearest valid one; overrides; the stored copy round-trips."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from megatron_rl.config_file import (
    RENAMED_KEYS,
    RENAMED_VALUES,
    build_config,
    key_paths,
    load_config,
    parse_overrides,
    to_yaml,
)
from megatron_rl.errors import UserError

UNFIT_NAMES = [
    "''",
    "'..'",
    "../x",
    "a/../../x",
    "/etc/x",
    "a//b",
    "a/",
    ".hidden",
    "a/.b",
    "-x",
    "'a\tb'",
    r'"a\nsbatch"',
    r'"a\u2028b"',
    r'"a\0"',
    r'"run\n"',
    "' a'",
    "'a '",
    "a$(id)",
    "a;b",
    "'a\"b'",
    "a`id`",
    "a\\b",
    "a'b",
    "x%j",
    "a*",
    "n" * 201,
    "ß" * 101,
]


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["--batch.prompt_per_step", "4"], ["batch.prompt_per_step", "did you mean 'batch.prompts_per_step'?"]),
        (["--lr", "1e-4"], ["'lr'", "optimizer.lr"]),
        (["--optimizer.lr", "-1"], ["optimizer.lr", "greater than 0"]),
        (["--optimizer.lr", "nan"], ["optimizer.lr"]),
        (["--routing.source", "ppr3"], ["routing.source", "'ppr3'", "did you mean 'pr3'?"]),
        (["--sync.transport", "nccl"], ["sync.transport", "'distributed', 'tensor' or 'disk'"]),
        (["--steps", "0"], ["steps", "greater than or equal to 1"]),
        (["--steps", "many"], ["steps", "valid integer"]),
        *((["--name", name], ["'name'", "a run's name has letters"]) for name in UNFIT_NAMES),
        (["--rollout.sampling", "3"], ["rollout.sampling"]),
        (["--steps"], ["--steps needs a value"]),
        (["steps", "3"], ["expected --key value, found 'steps'"]),
        (["--batch", "{prompt_per_step: 3}"], ["batch"]),
    ],
)
def test_bad_input_is_one_line_that_names_the_key(arguments, fragments):
    with pytest.raises(UserError) as error:
        build_config(parse_overrides(arguments))
    message = str(error.value)
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize("name", ["7", "run", "a/b_c/d-e.f", "x..y", "läuf 1 (ß)", "実験-3", "lr=1e-3,kl", "n" * 200])
def test_names_of_runs_are_folders_below_the_runs_folder(name):
    config = build_config(parse_overrides(["--name", name]))
    assert config.name == name and config.run_dir.resolve().is_relative_to(Path("runs").resolve())


def test_unknown_key_in_a_file_names_the_file_section(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("rollout:\n  sampling:\n    temprature: 0.7\n")
    with pytest.raises(UserError, match=r"rollout\.sampling\.temprature.*rollout\.sampling\.temperature"):
        load_config(path)
    path.write_text("a: [1,\n")
    with pytest.raises(UserError, match="not YAML"):
        load_config(path)
    with pytest.raises(UserError, match="No such file"):
        load_config(tmp_path / "absent.yaml")


def test_overrides_win_over_the_file_and_floats_may_lack_a_dot(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("optimizer: {lr: 1e-6, betas: [0.9, 0.99]}\ndata: {options: {a: 1}}\n")
    config = load_config(path, ["--optimizer.lr=3e-5", "--data.options.b", "x", "--rollout.addresses", "[http://h:1]"])
    assert config.optimizer.lr == 3e-5
    assert config.optimizer.betas == (0.9, 0.99)
    assert config.data.options == {"a": 1, "b": "x"}
    assert config.rollout.addresses == ["http://h:1"]


def test_the_stored_config_builds_the_same_tree():
    config = build_config({"optimizer": {"lr": 0.25}, "data": {"rewards": {"correct": 2.0}}})
    assert build_config(yaml.safe_load(to_yaml(config))) == config


def test_the_tree_is_frozen_and_has_few_knobs():
    config = build_config({})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 3
    # 280, one for operators that engine and trainer share, three for gates: recorded, replayed, and the threshold below which
    # a replayed expert is given up; two of routers' balance, and label smoothing of demonstrations and of pairs.
    assert len(key_paths()) <= 293


def test_old_names_are_errors_that_name_the_new_one():
    for old, new in RENAMED_KEYS.items():
        section, _, key = old.rpartition(".")
        values = {key: 1}
        for part in reversed(section.split(".")):
            values = {part: values}
        with pytest.raises(UserError, match=f"unknown key '{old}'; it is called '{new}' now"):
            build_config(values)
        assert new in key_paths() and old not in key_paths()
    with pytest.raises(UserError, match=r"'model\.freeze_router'; that is model\.freeze: \['\*\.mlp\.router\.\*'\]"):
        build_config({"model": {"freeze_router": True}})
    with pytest.raises(UserError, match=r"'correction\.normalize'; that is correction\.denominator: weights"):
        build_config({"correction": {"normalize": True}})
    for key, values in RENAMED_VALUES.items():
        section, _, name = key.rpartition(".")
        for old, new in values.items():
            with pytest.raises(UserError, match=f"'{key}' = '{old}': it is called '{new}' now"):
                build_config({section: {name: old}})
            build_config({section: {name: new}})


@pytest.mark.parametrize(
    ("arguments", "section", "key", "value"),
    [
        (["--model.freeze", "*.router.*,*.softmax_offset"], "model", "freeze", ["*.router.*", "*.softmax_offset"]),
        (["--data.template", "{prompt}"], "data", "template", "{prompt}"),
        (["--data.template={prompt}: [x]"], "data", "template", "{prompt}: [x]"),
        (["--data.template", "[{prompt}]"], "data", "template", "[{prompt}]"),
        (["--data.template", "'Q: {prompt}'"], "data", "template", "Q: {prompt}"),
        (["--data.answer_key", "7"], "data", "answer_key", "7"),
        (["--data.answer_key", "yes"], "data", "answer_key", "yes"),
        (["--data.path", "2024"], "data", "path", "2024"),
        (["--data.path", "null"], "data", "path", None),
        (["--rollout.addresses", "http://a:1"], "rollout", "addresses", ["http://a:1"]),
        (["--rollout.addresses", "http://a:1,http://b:2"], "rollout", "addresses", ["http://a:1", "http://b:2"]),
        (["--rollout.addresses", "[http://a:1, http://b:2]"], "rollout", "addresses", ["http://a:1", "http://b:2"]),
        (["--rollout.addresses", "[]"], "rollout", "addresses", []),
        (["--data.options", "{a: 1}"], "data", "options", {"a": 1}),
    ],
)
def test_texts_and_lists_of_texts_on_the_command_line_need_no_quotes(arguments, section, key, value):
    assert getattr(getattr(build_config(parse_overrides(arguments)), section), key) == value
