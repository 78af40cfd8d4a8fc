"""Losses, advantages and hooks from outside the package: by module:name or file, checked at the start."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.algorithms.losses import LossInputs, policy_terms
from megatron_rl.algorithms.segments import Segments
from megatron_rl.config.load import build_config
from megatron_rl.errors import UserError
from megatron_rl.run.update_hooks import update_hooks
from megatron_rl.trainer.objective import Policy, policy_loss

SOURCE = """
import torch
from megatron_rl.algorithms.losses import LossTerms, PolicyLoss

def doubled(inputs):
    return LossTerms(-2 * inputs.advantages * inputs.log_probs, torch.zeros_like(inputs.mask))

per_token = PolicyLoss(doubled)
"""


def test_a_loss_of_a_file_is_the_loss(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    draw = lambda: torch.randn(6, dtype=torch.float64)  # noqa: E731
    log_probs, advantages, mask = draw().requires_grad_(), draw(), torch.tensor([1, 1, 0, 1, 0, 1]).bool()
    inputs = LossInputs(log_probs, draw(), advantages, mask, Segments(torch.zeros(6, dtype=torch.long), 1), 0.2, 0.2)
    for name, per_token in (("doubled", False), ("per_token", True)):
        config = build_config({"algorithm": {"loss": f"{tmp_path}/mine.py:{name}"}})
        assert policy_loss(config.algorithm).per_token is Policy(config).per_token is per_token
        terms, _ = policy_terms(policy_loss(config.algorithm), inputs)
        torch.testing.assert_close(terms, torch.where(mask, -2 * advantages * log_probs, 0.0))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpso", "algorithm.loss: there is no loss 'gpso'; did you mean 'gspo'"),
        ("no_such_module:loss", "algorithm.loss: no_such_module:loss: there is no module 'no_such_module'"),
        ("megatron_rl.errors:loss", "algorithm.loss: megatron_rl.errors has no 'loss'"),
    ],
)
def test_a_name_that_there_is_not(name, said):
    with pytest.raises(UserError, match=said):
        policy_loss(build_config({"algorithm": {"loss": name}}).algorithm)


HOOKS = """
from megatron_rl.trainer.hooks import UpdateHook

class Mine(UpdateHook):
    def __init__(self, config):
        self.steps = config.steps

def none(config):
    return config.name
"""


def test_hooks_of_a_file_come_after_those_of_the_config(tmp_path):
    (tmp_path / "mine.py").write_text(HOOKS)

    def hooks(*names: str, **options) -> list:
        settings = {"steps": 7, "rollout": {"agreement_floor": None}, "routing": {"source": "pr2"}}
        return update_hooks(build_config({**settings, "hooks": [f"{tmp_path}/mine.py:{n}" for n in names]}), **options)

    own, mine = hooks(), hooks("Mine", "Mine")
    assert [type(h).__name__ for h in mine] == [*(type(h).__name__ for h in own), "Mine", "Mine"] and mine[
        -1
    ].steps == 7
    assert len(hooks("Mine", scores_alone=True)) == len(own), "who is never updated has none"
    with pytest.raises(UserError, match=r"hooks: .*mine.py:none returned 'run'; it must return an UpdateHook"):
        hooks("none")
    with pytest.raises(UserError, match=r"hooks: .*mine.py has no 'Mien'; did you mean 'Mine'"):
        hooks("Mien")
