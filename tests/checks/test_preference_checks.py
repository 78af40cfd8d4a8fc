"""Refused before anything starts: keys of reward models, DPO and rewards that do nothing, and folders that do not fit."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
from weights import classifier

from megatron_rl.checks import model_and_machine, preference_learning
from megatron_rl.checks.preflight import check_keys
from megatron_rl.checks.refusals import refuse
from megatron_rl.config import Config
from megatron_rl.config.conditions import Kind
from megatron_rl.config.load import build_config
from megatron_rl.dpo import TAKES as DPO
from megatron_rl.errors import UserError
from megatron_rl.offline import check_kind
from megatron_rl.reward_model import TAKES as REWARD


def check_preferences(config: Config, kind: Kind, world_size: int) -> None:
    """By the keys alone, and by the folders that they name."""
    check_keys(config, kind, world_size)
    found = [check for kinds, checks in model_and_machine.RULES if kind in kinds for check in checks]
    mine = [check for check in found if check in vars(preference_learning).values()]
    refuse(config, *mine, kind=kind, world_size=world_size)


REFUSED = {
    "centered order": (
        "reward",
        {"reward_model": {"loss": "plackett_luce", "center": 0.1}},
        r"reward_model\.center = 0\.1 does nothing",
    ),
    "top of a pair": (
        "reward",
        {"reward_model": {"top": 1}},
        r"reward_model\.top = 1 does nothing with .*; set reward_model.loss: plackett_luce, or leave it out",
    ),
    "margin of a score": (
        "reward",
        {"reward_model": {"loss": "squared_error", "margin": 1.0}},
        r"reward_model\.margin = 1 does nothing with reward_model\.loss = \w+; set .*loss: bradley_terry, hinge or squared_gap",
    ),
    "smooth gap": (
        "reward",
        {"reward_model": {"loss": "squared_gap", "label_smoothing": 0.1}},
        r"reward_model\.label_smoothing = 0\.1 does nothing with .*; set reward_model.loss: bradley_terry, or leave it out",
    ),
    "smooth hinge": (
        "dpo",
        {"dpo": {"loss": "hinge", "label_smoothing": 0.1}},
        r"dpo\.label_smoothing = 0\.1 does nothing",
    ),
    "mean of single responses": (
        "dpo",
        {"dpo": {"loss": "kto", "length_normalized": True}},
        r"dpo\.length_normalized = true",
    ),
    "desirable pairs": (
        "dpo",
        {"dpo": {"desirable_weight": 2.0}},
        r"dpo\.desirable_weight = 2 does nothing with dpo\.loss = .*; set dpo\.loss: kto",
    ),
    "kto of one": (
        "dpo",
        {"dpo": {"loss": "kto"}, "batch": {"prompts_per_step": 1}},
        r"prompts_per_step = 1 with dpo\.loss = kto",
    ),
    "a model of nowhere": (
        "train",
        {"rewards": {"models": {"liked": {}}}},
        r"rewards\.models\.liked has neither a path nor an",
    ),
    "steps of a whole": (
        "sample",
        {"rewards": {"models": {"liked": {"address": "http://host:1", "step_aggregation": "mean"}}}},
        r"rewards\.models\.liked\.step_aggregation = mean does nothing without rewards\.models\.liked\.steps; set .*: true",
    ),
    "steps by a server": (
        "sample",
        {"rewards": {"models": {"liked": {"address": "http://host:1", "steps": True}}}},
        r"rewards\.models\.liked\.steps: .* remove address",
    ),
    **{
        f"a judge {name}": (
            "sample",
            {"rewards": {"judges": {"wise": {"address": "http://h:1/v1", "model": "m"} | keys}}},
            said,
        )
        for name, (keys, said) in {
            "of nowhere": (
                {"address": ""},
                r"judges\.wise\.address = '': give the address of an OpenAI-compatible server",
            ),
            "at a path": ({"address": "/v1"}, r"judges\.wise\.address = '/v1'"),
            "by file": ({"address": "file:///etc/passwd"}, r"judges\.wise\.address = 'file:"),
            "without a model": ({"model": ""}, r"judges\.wise\.model is empty"),
            "that sees nothing": (
                {"prompt": "Is {prompt} good? {respons}"},
                r"judges\.wise\.prompt has no \{response\}",
            ),
            "without a scale": ({"scale": [3, 3]}, r"judges\.wise\.scale = \[3, 3\]"),
            "upside down": ({"scale": [10, 0]}, r"judges\.wise\.scale = \[10, 0\]"),
            "of no pattern": ({"pattern": r"(\d"}, r"judges\.wise\.pattern = .* it is not a regular expression \("),
            "without a group": ({"pattern": r"\d"}, r"judges\.wise\.pattern = .* has 0 groups"),
            "of two groups": ({"pattern": r"(\d)(\d)"}, r"judges\.wise\.pattern = .* has 2 groups"),
            "in two forms": (
                {"pattern": r"(\d)", "json_key": "x"},
                r"judges\.wise\.pattern and \.json_key are both given",
            ),
            "without its key": (
                {"api_key": "env:NOWHERE_AT_ALL"},
                r"judges\.wise\.api_key: the environment variable NOWHERE",
            ),
        }.items()
    },
    "two of a name": (
        "sample",
        {
            "rewards": {
                "models": {"wise": {"address": "http://host:1"}},
                "judges": {"wise": {"address": "http://host:1/v1", "model": "m"}},
            }
        },
        r"rewards\.judges\.wise: rewards\.models has a part with this name",
    ),
    "all too long": (
        "train",
        {"rewards": {"overlong_buffer": 9}, "rollout": {"max_new_tokens": 8}},
        r"overlong_buffer = 9 is more than rollout\.max_new_tokens = 8",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, tiny_model):
    kind, changes, message = REFUSED[case]
    config = build_config({"model": {"path": str(tiny_model("llama"))}, **changes})
    with pytest.raises(UserError, match=message) as refusal:
        check_preferences(config, kind, 1)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("takes", "loss", "kind", "words"),
    [
        (
            REWARD,
            "cross_entropy",
            "pair",
            "labels, scores or steps, but the data has pairs: set reward_model.loss: bradley_terry",
        ),
        (
            REWARD,
            "cross_entropy",
            "list",
            "labels, scores or steps, but the data has lists: set reward_model.loss: bradley_terry",
        ),
        (REWARD, "hinge", "steps", "pairs or lists, but the data has steps: set reward_model.loss: squared_error"),
        (
            REWARD,
            "bradley_terry",
            "point",
            "pairs or lists, but the data has scores: set reward_model.loss: squared_error",
        ),
        (DPO, "sigmoid", "steps", "pairs or lists, but the data has steps: give pairs or lists"),
        (DPO, "kto", "point", "labels or pairs, but the data has scores: give labels or pairs"),
    ],
)
def test_preferences_of_another_kind_are_named_in_words(takes, loss, kind, words):
    key = "reward_model.loss" if takes is REWARD else "dpo.loss"
    comparison = SimpleNamespace(kind=kind)
    run: Any = SimpleNamespace(
        task=SimpleNamespace(comparison=lambda prompt, rng: comparison), stream=SimpleNamespace(prompts=["one"])
    )
    with pytest.raises(UserError) as refusal:
        check_kind(run, takes, key, loss)
    assert str(refusal.value) == f"config: {key} = {loss} learns from {words}"
    comparison.kind = takes[loss][0]
    check_kind(run, takes, key, loss)


@pytest.mark.parametrize(
    ("address", "key", "warns"),
    [
        ("http://judge.example/v1", True, True),
        ("http://10.0.0.9:80/v1", True, True),
        ("https://judge.example/v1", True, False),
        ("http://127.0.0.1:30000/v1", True, False),
        ("http://localhost/v1", True, False),
        ("http://judge.example/v1", False, False),
    ],
)
def test_a_judges_key_over_plain_http_is_named(address, key, warns, tiny_model, tmp_path, caplog):
    (tmp_path / "key").write_text("sk-secret\n")
    judge = {"address": address, "model": "m"} | ({"api_key": f"file:{tmp_path / 'key'}"} if key else {})
    models = {"judges": {"wise": judge}}
    config = build_config(
        {"model": {"path": str(tiny_model("llama"))}, "data": {"verifier": "none"}, "rewards": models}
    )
    check_preferences(config, "train", 1)  # a judge is enough of a reward
    assert ("its key is sent to" in caplog.text) == warns and "sk-secret" not in caplog.text


def test_reward_models_and_references_that_do_not_fit(tiny_model, tmp_path):
    policy, other = tiny_model("llama"), tiny_model("llama", "--tokenizer", "numbers", "--vocab", "64")
    fits = classifier(policy, tmp_path / "fits", seed=0)
    foreign = classifier(other, tmp_path / "foreign", seed=0)

    def check(kind: str, **sections: dict) -> None:
        check_preferences(build_config({"model": {"path": str(policy)}} | sections), kind, 1)

    check("train", rewards={"models": {"liked": {"path": str(fits)}}})
    check("train", rewards={"models": {"liked": {"path": str(foreign), "address": "http://host:1"}}})
    with pytest.raises(
        UserError, match=r"rewards\.models\.liked\.path: .* has no head with a single output; give the folder of a"
    ):
        check("train", rewards={"models": {"liked": {"path": str(policy)}}})
    with pytest.raises(
        UserError, match=r"rewards\.models\.liked\.path = .*/none: does not exist; give a Hugging Face folder, or an id"
    ):
        check("train", rewards={"models": {"liked": {"path": str(tmp_path / "none")}}})
    with pytest.raises(UserError, match=r"data\.verifier: none scores no response, .* name a reward model"):
        check("train", data={"verifier": "none"})
    check("train", data={"verifier": "none"}, rewards={"models": {"liked": {"path": str(fits)}}})
    steps: dict = {"path": str(fits), "steps": True, "step_separator": "\n"}
    models = {"models": {"liked": steps}}
    for advantage in ("gae", "reinforce_plus_plus", "grpo", "dr_grpo"):
        check("train", rewards=models, algorithm={"advantage": advantage})
    for advantage in ("rloo", "tilt", "reinforce_plus_plus_baseline", "somewhere:mine"):
        check("sample", rewards=models, algorithm={"advantage": advantage})
        with pytest.raises(
            UserError, match=rf"algorithm\.advantage = {advantage} cannot use rewards of steps; set one of gae"
        ):
            check("train", rewards=models, algorithm={"advantage": advantage})
        in_one = {"models": {"liked": steps | {"step_placement": "response"}}}
        check("train", rewards=in_one, algorithm={"advantage": advantage})
    for more, message in (
        (
            {"step_separator": None},
            r"liked\.steps: .*/fits does not name the text that ends a step .* set .*\.step_separator",
        ),
        ({"step_aggregation": "product"}, r"product needs probabilities; set sigmoid: true"),
    ):
        with pytest.raises(UserError, match=message):
            check("train", rewards={"models": {"liked": steps | more}})
    check("train", rewards={"models": {"liked": steps | {"step_aggregation": "product", "sigmoid": True}}})
    with pytest.raises(UserError, match=r"models\.liked and rewards\.models\.other both place rewards at the ends"):
        check("train", rewards={"models": {"liked": steps, "other": steps}})
    with pytest.raises(UserError, match=r"rollout\.program = agent cannot be split into steps"):
        check("train", rewards=models, rollout={"program": "agent"})
    by_lines = tmp_path / "by_lines"
    shutil.copytree(fits, by_lines)
    hf_config = json.loads((by_lines / "config.json").read_text()) | {"reward_step_separator": "\n\n"}
    (by_lines / "config.json").write_text(json.dumps(hf_config))
    check("train", rewards={"models": {"liked": {"path": str(by_lines), "steps": True}}})
    with pytest.raises(
        UserError, match=r"step_separator = '\\n', but .*by_lines was trained with steps that end with '\\n\\n'"
    ):
        check("train", rewards={"models": {"liked": steps | {"path": str(by_lines)}}})
    mean = tmp_path / "mean"
    shutil.copytree(fits, mean)
    hf_config = json.loads((mean / "config.json").read_text()) | {"reward_pooling": "mean"}
    (mean / "config.json").write_text(json.dumps(hf_config))
    check("reward", model={"path": str(mean)}, reward_model={"pooling": "mean"})
    with pytest.raises(
        UserError, match=r"pooling = last, but the reward model .*/mean was trained with mean; set pooling"
    ):
        check("reward", model={"path": str(mean)})
    start = {"checkpoint": {"load": "runs/x/checkpoints/step_000010"}}
    check("train", **start)
    check("dpo", dpo={"reference": str(policy)}, **start)
    for kind, key, section in (
        ("dpo", "dpo", {}),
        ("train", r"algorithm\.kl", {"algorithm": {"kl": {"coefficient": 0.1}}}),
    ):
        with pytest.raises(
            UserError, match=rf"checkpoint\.load without {key}\.reference: .* the reference from .*llama"
        ):
            check(kind, **section, **start)
    for kind, key in (("dpo", "dpo"), ("train", "kl")):
        for folder, why in (("none", "does not exist"), ("foreign", "has another tokenizer than")):
            reference = {"coefficient": 0.1, "reference": str(tmp_path / folder)}
            sections = {"dpo": {"reference": str(tmp_path / folder)}, "algorithm": {"kl": reference}}
            with pytest.raises(UserError, match=rf"{key}\.reference = .*/{folder}: {why}"):
                check(kind, **sections)
    with pytest.raises(UserError, match=r"rewards\.models\.liked\.path = .*: has another tokenizer than"):
        check("train", rewards={"models": {"liked": {"path": str(foreign)}}})
    with pytest.raises(UserError, match=r"rewards\.models\.liked\.path = nowhere: does not exist"):
        check("sample", rewards={"models": {"liked": {"path": "nowhere"}}})
