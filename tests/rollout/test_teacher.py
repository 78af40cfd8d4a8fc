"""A teacher behind a server: its log-probs of sampled tokens, and what is said where it gives none."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.data.trajectory import Trajectory
from megatron_rl.errors import UserError
from megatron_rl.rollout.scores_by_server import teacher_log_probs
from tests.rollout.conftest import assert_agree


def trajectory(prompt: list[int], response: list[int]) -> Trajectory:
    return Trajectory(
        tokens=np.asarray([*prompt, *response], np.int32),
        prompt_length=len(prompt),
        fields={"loss_mask": np.ones(len(response), bool)},
        prompt_id="0",
        group_id=0,
    )


def test_log_probs_are_those_of_transformers(server, reference):
    """Of each response token, whatever the lengths."""
    rng = np.random.default_rng()
    asked = [
        trajectory(rng.integers(4, 60, p).tolist(), rng.integers(4, 60, n).tolist())
        for p, n in 4 * ((1, 5), (7, 1), (3, 20))
    ]
    teacher_log_probs(server.address, asked, timeout_s=60)
    expected = [reference.log_probs(t.tokens.tolist())[t.prompt_length - 1 :].numpy() for t in asked]
    found, tied = [t["teacher_log_probs"] for t in asked], reference.tied(asked)
    assert_agree(found, expected, median=1e-5, largest=1e-4, tied=tied)


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(UserError, match=r"distillation\.address: no log-probs from http://127\.0\.0\.1:9/generate: "):
        teacher_log_probs("http://127.0.0.1:9", [trajectory([1], [2])], timeout_s=5)
