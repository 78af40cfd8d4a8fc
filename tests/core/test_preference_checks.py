"""Refused before anything starts: keys of reward models, DPO and rewards that do nothing, and folders that do not fit."""

from __future__ import annotations

import json
import shutil

import pytest
from weights import classifier

from megatron_rl.config_file import build_config
from megatron_rl.errors import UserError
from megatron_rl.launch.preference_checks import check_preferences

REFUSED = {
    "centered order": (
        "reward",
        {"reward_model": {"loss": "plackett_luce", "center": 0.1}},
        r"reward_model\.center = 0\.1 does nothing",
    ),
    "top of a pair": (
        "reward",
        {"reward_model": {"top": 1}},
        r"reward_model\.top = 1 does nothing: it is of plackett_luce",
    ),
    "margin of a score": (
        "reward",
        {"reward_model": {"loss": "squared_error", "margin": 1.0}},
        r"reward_model\.margin = 1\.0 does nothing: it is of bradley_terry, hinge, squared_gap, and reward_model\.loss is",
    ),
    "smooth hinge": (
        "dpo",
        {"dpo": {"loss": "hinge", "label_smoothing": 0.1}},
        r"dpo\.label_smoothing = 0\.1 does nothing",
    ),
    "mean of single responses": (
        "dpo",
        {"dpo": {"loss": "kto", "length_normalized": True}},
        r"dpo\.length_normalized = True",
    ),
    "desirable pairs": (
        "dpo",
        {"dpo": {"desirable_weight": 2.0}},
        r"dpo\.desirable_weight = 2\.0 does nothing: it is of kto",
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
        "ask",
        {"rewards": {"models": {"liked": {"address": "http://host:1", "step_aggregation": "mean"}}}},
        r"rewards\.models\.liked\.step_aggregation = mean does nothing: rewards\.models\.liked\.steps is false",
    ),
    "steps by a server": (
        "ask",
        {"rewards": {"models": {"liked": {"address": "http://host:1", "steps": True}}}},
        r"rewards\.models\.liked\.steps: .* leave address out",
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


def test_reward_models_and_references_that_do_not_fit(tiny_model, tmp_path):
    policy, other = tiny_model("llama"), tiny_model("llama", "--tokenizer", "numbers", "--vocab", "64")
    fits = classifier(policy, tmp_path / "fits", seed=0)
    foreign = classifier(other, tmp_path / "foreign", seed=0)

    def check(kind: str, **sections: dict) -> None:
        check_preferences(build_config({"model": {"path": str(policy)}} | sections), kind, 1)

    check("train", rewards={"models": {"liked": {"path": str(fits)}}})
    check("train", rewards={"models": {"liked": {"path": str(foreign), "address": "http://host:1"}}})
    with pytest.raises(
        UserError, match=r"rewards\.models\.liked\.path: .* has no head of one number; give the folder of a"
    ):
        check("train", rewards={"models": {"liked": {"path": str(policy)}}})
    with pytest.raises(
        UserError, match=r"rewards\.models\.liked\.path = .*/none: does not exist; give a local Hugging Face folder"
    ):
        check("train", rewards={"models": {"liked": {"path": str(tmp_path / "none")}}})
    with pytest.raises(UserError, match=r"data\.verifier: none judges no response, .* name a reward model"):
        check("train", data={"verifier": "none"})
    check("train", data={"verifier": "none"}, rewards={"models": {"liked": {"path": str(fits)}}})
    steps: dict = {"path": str(fits), "steps": True, "step_separator": "\n"}
    models = {"models": {"liked": steps}}
    for advantage in ("gae", "reinforce_plus_plus", "grpo", "dr_grpo"):
        check("train", rewards=models, algorithm={"advantage": advantage})
    for advantage in ("rloo", "tilt", "reinforce_plus_plus_baseline", "somewhere:mine"):
        check("ask", rewards=models, algorithm={"advantage": advantage})
        with pytest.raises(
            UserError, match=rf"algorithm\.advantage = {advantage} knows no rewards of steps; set one of gae"
        ):
            check("train", rewards=models, algorithm={"advantage": advantage})
        in_one = {"models": {"liked": steps | {"step_placement": "response"}}}
        check("train", rewards=in_one, algorithm={"advantage": advantage})
    for more, message in (
        ({"step_separator": None}, r"liked\.steps: .*/fits does not say what ends a step .* set .*\.step_separator"),
        ({"step_aggregation": "product"}, r"product multiplies probabilities; set sigmoid: true"),
    ):
        with pytest.raises(UserError, match=message):
            check("train", rewards={"models": {"liked": steps | more}})
    check("train", rewards={"models": {"liked": steps | {"step_aggregation": "product", "sigmoid": True}}})
    with pytest.raises(UserError, match=r"models\.liked and rewards\.models\.other both have rewards at the ends"):
        check("train", rewards={"models": {"liked": steps, "other": steps}})
    with pytest.raises(UserError, match=r"rollout\.program = agent is no text in steps"):
        check("train", rewards=models, rollout={"program": "agent"})
    by_lines = tmp_path / "by_lines"
    shutil.copytree(fits, by_lines)
    hf_config = json.loads((by_lines / "config.json").read_text()) | {"reward_step_separator": "\n\n"}
    (by_lines / "config.json").write_text(json.dumps(hf_config))
    check("train", rewards={"models": {"liked": {"path": str(by_lines), "steps": True}}})
    with pytest.raises(
        UserError, match=r"step_separator = '\\n', and .*by_lines has learned from steps that end with '\\n\\n'"
    ):
        check("train", rewards={"models": {"liked": steps | {"path": str(by_lines)}}})
    mean = tmp_path / "mean"
    shutil.copytree(fits, mean)
    hf_config = json.loads((mean / "config.json").read_text()) | {"reward_pooling": "mean"}
    (mean / "config.json").write_text(json.dumps(hf_config))
    check("reward", model={"path": str(mean)}, reward_model={"pooling": "mean"})
    with pytest.raises(
        UserError, match=r"pooling = last, and the reward model .*/mean has learned with mean; set pooling"
    ):
        check("reward", model={"path": str(mean)})
    start = {"checkpoint": {"load": "runs/x/checkpoints/step_000010"}}
    check("train", **start)
    check("dpo", dpo={"reference": str(policy)}, **start)
    for kind, key, section in (
        ("dpo", "dpo", {}),
        ("train", r"algorithm\.kl", {"algorithm": {"kl": {"coefficient": 0.1}}}),
    ):
        with pytest.raises(UserError, match=rf"checkpoint\.load without {key}\.reference: .* its reference as .*llama"):
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
        check("ask", rewards={"models": {"liked": {"path": "nowhere"}}})
