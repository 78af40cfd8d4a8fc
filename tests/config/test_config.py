"""Config: unknown keys and bad values name the key and the nearest valid one; overrides; the stored copy round-trips."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_rl.config import job_name
from megatron_rl.config.load import (
    RENAMED_KEYS,
    RENAMED_VALUES,
    build_config,
    key_paths,
    load_config,
    parse_overrides,
    parse_yaml,
    to_yaml,
)
from megatron_rl.errors import UserError

UNFIT_NAMES = [
    *("", "..", ".", "../x", "a/../../x", "a/./b", "/etc/x", "a//b", "a/", "/", ".hidden", "a/.b", "-x", "a/-b"),
    *(
        "a\tb",
        "a\nsbatch",
        "a\0b",
        "run\n",
        "a\x7f",
        "a\x85b",
        "a\x1b[1mb",
        "a\ud800",
        " a",
        "a ",
        "a/ b",
        "a\xa0",
        "\u2028a",
    ),
    *("n" * 201, "ß" * 101),
]
NAMES = [
    *(
        "7",
        "run",
        "a/b_c/d-e.f",
        "x..y",
        "läuf 1 (ß)",
        "実験-3",
        "lr=1e-3,kl",
        "n" * 200,
        "a #b",
        "läuf \u2028 # y",
        "''",
    ),
    *(
        "a$(id)",
        "a;b",
        'a"b',
        "a`id`",
        "a\\b",
        "a'b",
        "x%j",
        "a*",
        "[bold]x[/]",
        "<b>&amp;",
        "{a: 1}",
        "null",
        "~",
        "!x",
        "a: b",
    ),
]


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["--batch.prompt_per_step", "4"], ["batch.prompt_per_step", "did you mean 'batch.prompts_per_step'?"]),
        (["--lr", "1e-4"], ["'lr'", "optimizer.lr"]),
        (["--optimizer.lr", "-1"], ["optimizer.lr", "greater than 0"]),
        (["--optimizer.lr", "nan"], ["optimizer.lr"]),
        (["--routing.source", "ppr3"], ["routing.source", "'ppr3'", "did you mean 'pr3'?"]),
        (["--sync.adapters", "none"], ["sync.adapters", "'merged' or 'unmerged'"]),
        (["--steps", "0"], ["steps", "greater than or equal to 1"]),
        (["--steps", "many"], ["steps", "valid integer"]),
        *((["--name", name], ["'name'", "a run's name has at most"]) for name in UNFIT_NAMES),
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


@pytest.mark.parametrize("name", NAMES)
def test_names_of_runs_are_folders_below_the_runs_folder(name):
    config = build_config(parse_overrides(["--name", name]))
    assert config.name == name and config.run_dir.resolve().is_relative_to(Path("runs").resolve())
    assert build_config(parse_yaml(to_yaml(config))) == config
    assert re.fullmatch(r"[\w .()+=,@-]+", job_name(name)) and len(job_name(name)) == len(name)


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


UNREADABLE = {
    "latin-1": ("name: läuf\n".encode("latin-1"), "not text in UTF-8"),
    "UTF-16": ("steps: 3\n".encode("utf-16"), "not text in UTF-8"),
    "nothing": (b"", "the file is empty"),
    "comments": (b"# steps: 3\n", "the file is empty"),
    "a list": (b"- steps: 3\n", "found a list"),
    "an empty list": (b"[]\n", "found a list"),
    "a text": (b"hello\n", "found a str"),
    "false": (b"false\n", "found a bool"),
    "two documents": (b"steps: 3\n---\nsteps: 5\n", "not YAML: line 2"),
    "a tab": (b"batch:\n\tprompts_per_step: 4\n", "not YAML: line 2"),
    "a NUL": (b"steps: 3\0\n", "not YAML"),
    "an object": (b"steps: !!python/object/apply:os.getpid []\n", "not YAML"),
    "a tag": (b"eval: {greedy: !!bool x}\n", "not YAML"),
    "another tag": (b"name: !!timestamp x\n", "not YAML"),
    "a third tag": (b"optimizer: {lr: !!float ''}\n", "not YAML"),
    "digits": (b"steps: " + b"9" * 5000, "not YAML"),
    "nests": (b"data: {options: " + b"[" * 1000, "not YAML"),
    "a section twice": (
        b"batch: {prompts_per_step: 4}\nsteps: 3\nbatch: {}\n",
        "'batch' is given twice, in lines 1 and 3",
    ),
    "a key twice": (b"steps: 3\n'steps': 5\n", "'steps' is given twice, in lines 1 and 2"),
    "in a section": (b"kl: 1\nbatch:\n  a: 4\n\n  a: 8\n", "'batch.a' is given twice, in lines 3 and 5"),
    "in a line": (b"data: {rewards: {a: 1, b: 2, a: 0}}\n", "'data.rewards.a' is given twice, in lines 1 and 1"),
    "in a list": (
        b"data:\n  options:\n    x:\n      - {a: 1}\n      - {a: 1, a: 1}\n",
        "'data.options.x.a' is given twice",
    ),
    "a dotted key": (b"batch.prompts_per_step: 4\n", "write 'prompts_per_step:' below 'batch:'"),
    "a deep one": (b"rollout:\n  server.tensor: 4\n", "write 'tensor:' below 'rollout.server:'"),
    "a section's value": (b"batch: 4\n", "'batch' is a section"),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_file_that_is_no_config_is_one_line_that_names_it(what, tmp_path):
    content, problem = UNREADABLE[what]
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        load_config(path)
    message = str(error.value)
    assert problem in message and "\n" not in message and len(message) < 400
    assert str(path) in message or "'" in message, "the file, or the key"


def test_folders_are_no_configs_and_flags_alone_are(tmp_path):
    with pytest.raises(UserError, match=f"config {tmp_path}: Is a directory"):
        load_config(tmp_path)
    assert load_config("/dev/null", ["--steps", "3"]).steps == 3
    path = tmp_path / "c.yaml"
    path.write_text("\ufeffbase: &b {a: 1}\n".replace("base", "data: {options: {x") + "  , y: {<<: *b, a: 2}}}\n")
    assert load_config(path).data.options == {"x": {"a": 1}, "y": {"a": 2}}, "what is merged in may be changed"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(
            ("010", 10),
            ("0010", 10),
            ("08", 8),
            ("-010", -10),
            ("+7", 7),
            ("0", 0),
            ("00", 0),
            ("0o10", 8),
            ("0x1F", 31),
        ),
        *(("0b101", 5), ("1_000", 1000), ("2:4", "2:4"), ("1e3", 1e3), (".5", 0.5), ("5.", 5.0), ("1e-6", 1e-6)),
        *(("01.5", 1.5), ("0x", "0x"), ("1_000.5", "1_000.5"), ("0o8", "0o8"), ("'010'", "010")),
    ],
)
def test_numbers_are_those_of_yaml_1_2(text, value):
    found = parse_yaml(f"a: {text}")["a"]
    assert found == value and type(found) is type(value)
    assert parse_overrides(["--data.options.a", text]) == {"data": {"options": {"a": value}}}


def floats(tree: Any = None, prefix: str = "") -> dict[str, Any]:
    """Dotted keys with a number that may be a fraction -> what is wrapped around it in a file."""
    found = {}
    for key, kind in key_paths(tree).items():
        arguments = typing.get_args(kind)
        if float in (kind, *arguments) and typing.get_origin(kind) is not dict:
            found[prefix + key] = [0.5] if typing.get_origin(kind) is tuple else None
        if typing.get_origin(kind) is dict and arguments[1] is float:
            found[f"{prefix}{key}.part"] = None
        elif typing.get_origin(kind) is dict and dataclasses.is_dataclass(arguments[1]):
            found |= floats(arguments[1], f"{prefix}{key}.part.")
    return found


def test_no_number_of_a_config_is_nan_or_infinite():
    found = floats()
    assert {
        "data.rewards.part",
        "rewards.models.part.shift",
        "rollout.demonstrations.min_reward",
        "optimizer.betas",
    } <= set(found)
    assert len(found) > 60
    for key, before in found.items():
        for number in (math.nan, math.inf, -math.inf):
            tree: Any = number if before is None else [*before, number]
            for part in reversed(key.split(".")):
                tree = {part: tree}
            with pytest.raises(UserError, match=key.replace(".", r"\.")):
                build_config(tree)
            with pytest.raises(UserError, match=key.replace(".", r"\.")):
                build_config(
                    parse_overrides(
                        [
                            f"--{key}",
                            yaml.safe_dump(
                                number if before is None else [*before, number], default_flow_style=True
                            ).split("\n")[0],
                        ]
                    )
                )


@pytest.mark.parametrize("key", ["data.template", "name", "data.task", "data.path", "rollout.api_key", "model.path"])
@settings(max_examples=60)
@given(
    text=st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
    | st.lists(
        st.sampled_from(["#", " #", "\n", "{}", "'", '"', ": ", "null", "- ", "[", "\\n", "%", "&a", "!", "7", "yes"]),
        min_size=1,
        max_size=5,
    ).map("".join)
)
def test_a_text_is_what_was_typed(key, text):
    assume(text not in ("null", "~") or key not in ("data.path", "rollout.api_key"))
    section, _, name = key.rpartition(".")
    for arguments in ([f"--{key}", text], [f"--{key}={text}"]):
        found = parse_overrides(arguments)
        assert (found[section] if section else found)[name] == text


def test_a_flag_stands_for_the_key_of_the_file_and_the_last_one_counts(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "data: {options: {corrupt: 0.5, deep: {a: 1}}, path: x}\nrewards: {models: {helpful: {path: a, shift: 1}}}\n"
    )

    def loaded(*flags):
        return load_config(path, list(flags))

    assert loaded().data.options == {"corrupt": 0.5, "deep": {"a": 1}}
    assert loaded("--data.options", "{}").data.options == {} and loaded("--rewards.models", "{}").rewards.models == {}
    assert loaded("--data.options={b: 1}").data.options == {"b": 1}
    assert loaded("--data.options", "{}", "--data.options.b", "a # b").data.options == {"b": "a # b"}
    assert loaded("--data.options.b", "1", "--data.options", "{}").data.options == {}
    assert loaded("--data.options.deep", "{}").data.options == {"corrupt": 0.5, "deep": {}}
    assert loaded("--data.options.deep.b", "null").data.options == {"corrupt": 0.5, "deep": {"a": 1, "b": None}}
    assert loaded("--data.options.b", "Q: {prompt}", "--data.options.c", "'7'").data.options["b"] == "Q: {prompt}"
    assert loaded("--data.options.c", "'7'").data.options["c"] == "7", "quotes make a text of a number"
    helpful = loaded("--rewards.models.helpful.path", "a #b", "--rewards.models.other.path", "7").rewards.models
    assert (helpful["helpful"].path, helpful["helpful"].shift, helpful["other"].path) == ("a #b", 1, "7")
    assert loaded("--steps", "3", "--steps", "5").steps == 5
    assert loaded("--data.path", "null").data.path is None is loaded("--data.path", "").data.path
    assert loaded("--data.verifier", "none").data.verifier == "none"
    with pytest.raises(UserError, match=r"'data\.options\.corrupt' is a section: give keys below it, not 0\.5"):
        loaded("--data.options.corrupt.a", "1")
    with pytest.raises(UserError, match="rewards.models.helpful.shft"):
        loaded("--rewards.models.helpful.shft", "1")


def test_the_stored_config_builds_the_same_tree():
    config = build_config({"optimizer": {"lr": 0.25}, "data": {"rewards": {"correct": 2.0}}})
    assert build_config(yaml.safe_load(to_yaml(config))) == config


NUMERALS = ["0809", "08", "09_1", "0o17", "1e3", "1E-6", "5e1", "+7", "0x1F", "2:4", "1_000", "null", "~", "yes"]


@pytest.mark.parametrize("text", NUMERALS)
def test_texts_that_look_like_something_else_stay_texts(text):
    """By the reader of configs, of YAML 1.2, and by that of YAML 1.1, which others have."""
    config = build_config({"name": text.replace("~", "a"), "data": {"template": f"{text}", "options": {"a": text}}})
    for read in (parse_yaml, yaml.safe_load):
        assert build_config(read(to_yaml(config))) == config


def test_the_tree_is_frozen_and_has_few_knobs():
    config = build_config({})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 3
    # 280, one for operators that engine and trainer share, three for gates: recorded, replayed, and the threshold below which
    # a replayed expert is given up; two of routers' balance, two label smoothings; five for epochs,
    # early stopping, a limit of advantages, and SAPO's two temperatures; one each for several evaluation sets, stragglers,
    # histories as they are in use, and the tools of rows; four of another optimizer, half of them the critic's.
    assert len(key_paths()) <= 306


@pytest.mark.parametrize("name", ["ppo_epochs", "num_ppo_epochs", "num_iterations", "max_epochs"])
def test_epochs_by_their_names_elsewhere(name):
    """Names of verl, TRL's PPO and GRPO, and OpenRLHF; in a file and on the command line, in whatever section."""
    for section in ("batch", "algorithm"):
        with pytest.raises(UserError, match=rf"unknown key '{section}\.{name}'; did you mean 'batch\.epochs'\?"):
            build_config({section: {name: 4}})
    with pytest.raises(UserError, match=r"did you mean 'batch\.epochs'\?"):
        parse_overrides([f"--batch.{name}", "4"])


def test_old_names_are_errors_that_name_the_new_one():
    for old, new in RENAMED_KEYS.items():
        section, _, key = old.rpartition(".")
        values = {key: 1}
        for part in reversed(section.split(".")):
            values = {part: values}
        with pytest.raises(UserError, match=f"unknown key '{old}'; it is called '{new}' now"):
            build_config(values)
        assert new in key_paths() and old not in key_paths()
    with pytest.raises(UserError, match=r"'model\.freeze_router'; use model\.freeze: \['\*\.mlp\.router\.\*'\]"):
        build_config({"model": {"freeze_router": True}})
    with pytest.raises(UserError, match=r"'correction\.normalize'; use correction\.denominator: weights"):
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
        (["--data.template", "'Q: {prompt}'"], "data", "template", "'Q: {prompt}'"),
        (
            ["--data.template", "Q {prompt}\nEnd with #### and the number\n "],
            "data",
            "template",
            "Q {prompt}\nEnd with #### and the number\n ",
        ),
        (["--model.freeze", "a #b, c"], "model", "freeze", ["a #b", "c"]),
        (["--model.freeze", "7"], "model", "freeze", ["7"]),
        (["--model.freeze", ""], "model", "freeze", []),
        (["--model.keep_zeros", "*.a,*.b"], "model", "keep_zeros", ["*.a", "*.b"]),
        (["--model.keep_zeros", "[a, '*.b']"], "model", "keep_zeros", ["a", "*.b"]),
        (["--model.keep_zeros", "true"], "model", "keep_zeros", True),
        (["--optimizer.decay", "linear"], "optimizer", "decay", "linear"),
        (["--correction.mode", "none"], "correction", "mode", "none"),
        (["--critic.clip", "null"], "critic", "clip", None),
        (["--eval.pass_at", "[1, 2]"], "eval", "pass_at", [1, 2]),
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
