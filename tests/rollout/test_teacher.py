"""A teacher behind a server: its log-probs of sampled tokens, and what is said where it gives none."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from megatron_rl.data.trajectory import Trajectory
from megatron_rl.errors import UserError
from megatron_rl.rewards.rewards import _one
from megatron_rl.servers import scores
from megatron_rl.servers.scores import teacher_log_probs
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
    teacher_log_probs(server.address, asked, timeout_s=60, key=server.key)
    expected = [reference.log_probs(t.tokens.tolist())[t.prompt_length - 1 :].numpy() for t in asked]
    found, tied = [t["teacher_log_probs"] for t in asked], reference.tied(asked)
    assert_agree(found, expected, median=1e-5, largest=1e-4, tied=tied)


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(UserError, match=r"distillation\.address: no log-probs from http://127\.0\.0\.1:9/generate: "):
        teacher_log_probs("http://127.0.0.1:9", [trajectory([1], [2])], timeout_s=5)


@pytest.fixture
def says(monkeypatch):
    """says(bytes, status=200) -> address of a server that answers so to all."""
    made = []

    def serve(answer: bytes, status: int = 200) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_):
                pass

        made.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=made[-1].serve_forever, args=(0.05,), daemon=True).start()
        return f"http://127.0.0.1:{made[-1].server_port}"

    monkeypatch.setattr(scores, "ATTEMPTS", 1)
    yield serve
    for server in made:
        server.shutdown()
        server.server_close()


def of_entries(*entries) -> bytes:
    return json.dumps({"meta_info": {"input_token_logprobs": entries}}).encode()


@pytest.mark.parametrize(
    "answer",
    [
        b"[" * 100_000,
        b"\xff",
        b"[]",
        b"null",
        of_entries([None, 1], [float("nan"), 2]),
        of_entries([None, 1], [None, 2]),
        of_entries([None, 1], [0.5, 2]),
        of_entries([None, 1], ["-0.5", 2]),
        of_entries([None, 1], [-0.5, 2**70]),
        of_entries([None, 1]),
        of_entries([None, 1], [-0.5, 3]),
    ],
)
def test_answers_that_are_no_log_probs_are_told_in_one_line(says, answer):
    with pytest.raises(UserError, match=r"distillation\.address: no log-probs from") as error:
        teacher_log_probs(says(answer), [trajectory([1], [2])], timeout_s=30)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("status", [401, 403])
def test_a_teacher_with_another_key_is_asked_once_and_told_apart(says, status):
    with pytest.raises(
        UserError, match=r"it asks for another key; set the api_key beside its address to the place of that key"
    ):
        teacher_log_probs(says(b"", status), [trajectory([1], [2])], timeout_s=30)


def test_log_probs_of_a_scripted_teacher(says):
    asked = trajectory([1], [2, 3])
    teacher_log_probs(says(of_entries([None, 1, None], [-0.5, 2, None], [-2, 3, None])), [asked], timeout_s=30)
    assert asked["teacher_log_probs"].tolist() == [-0.5, -2.0]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), "1", None, 10**400])
def test_a_score_is_a_finite_number(number):
    with pytest.raises((ValueError, TypeError, OverflowError)):
        _one({"embedding": [number]})
