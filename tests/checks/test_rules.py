"""The tables of rules: every name in them is a key, and one loop refuses by the first that holds."""

from __future__ import annotations

import ast
import string
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedConfig

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.checks import identical_precision, key_rules, model_and_machine, preflight, rl_rules
from megatron_rl.checks.refusals import Refusal, Rule, Values, errors_of, refuse
from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.models.precision import Machine

FACTS = {
    "kind": "train",
    "world_size": 1,
    "support": SamplingSupport(),
    "machine": Machine(None, None, None, None),
    "vocabulary": 9,
    "hf_config": PreTrainedConfig(architectures=["LlamaForCausalLM"]),
}
VALUES = Values(Config(), FACTS)
TABLED = (rl_rules, key_rules, identical_precision, model_and_machine)
TABLES = {name: rules for table in TABLED for name, rules in vars(table).items() if name.isupper()}
RULES = {
    f"{name}[{i}]": rule
    for name, rules in TABLES.items()
    if isinstance(rules, tuple)
    for i, rule in enumerate(rules)
    if isinstance(rule, Rule)
}


@pytest.mark.parametrize("table", TABLED, ids=lambda table: table.__name__.rpartition(".")[2])
def test_conditions_look_at_keys_that_are_there(table):
    """Whether they are reached or not: `and` hides what stands behind it."""
    tree, looked = ast.parse(Path(str(table.__file__)).read_text()), 0
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.Lambda)):
        parameters = [argument.arg for argument in function.args.args]
        for node in ast.walk(function.body):
            chain = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            first, *rest = chain.split(".")
            if first not in parameters or not all(part.isidentifier() for part in rest):
                continue
            value = VALUES[first]
            for part in rest:
                if value is None:  # methods and fields of what the default has not
                    break
                assert hasattr(value, part), f"line {node.lineno}: {chain}"
                value = getattr(value, part)
            looked += 1
    assert looked


@pytest.mark.parametrize("name", RULES)
def test_conditions_and_messages_can_be_told(name):
    """Of the defaults each condition holds or not, and every text names its keys."""
    rule = RULES[name]
    VALUES.call(rule.also), VALUES.call(rule.when)
    text = rule.message if isinstance(rule.message, str) else ""
    assert not text.startswith("config") and ("; " in text or ": " in text or not text)
    for _, field, _, _ in string.Formatter().parse(text):
        if field:
            first, *rest = field.split(".")
            value = VALUES[first]
            for part in rest:
                value = getattr(value, part)


def test_every_table_is_in_the_list():
    listed = [rule for _, rules in (*preflight.RULES, *model_and_machine.RULES) for rule in rules]
    missing = [name for name, rule in RULES.items() if rule not in listed and not name.startswith("DEMONSTRATIONS")]
    assert not missing


def test_the_first_rule_that_holds_refuses():
    config = replace(Config(), steps=7)
    seen = []

    def computed(steps: int, kind: str):
        seen.append((steps, kind))
        yield Refusal(False, "nothing")
        yield Refusal(steps == 7, "{steps} as it stands")

    never = Rule(lambda steps: 1 / 0, "never looked at", also=lambda steps: steps > 7)
    refuse(config, Rule(lambda steps: steps > 7, "more"), never, lambda: None)
    with pytest.raises(UserError, match=r"^config: steps = 7 in train$"):
        refuse(config, never, Rule(lambda steps: steps == 7, "steps = {steps} in {kind}"), computed, kind="train")
    assert not seen
    with pytest.raises(UserError, match=r"^config: \{steps\} as it stands$"):
        refuse(config, computed, kind="sft")
    assert seen == [(7, "sft")]
    with pytest.raises(UserError, match=r"^config: of 7$"):
        refuse(config, Rule(lambda steps: True, lambda steps: f"of {steps}"))
    with pytest.raises(UserError, match=r"^it \(of the critic\)$"), errors_of("of the critic"):
        raise UserError("it")
