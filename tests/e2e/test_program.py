"""A rollout program from outside the package: two turns, by `megatron-rl rollout` and its own server."""

from __future__ import annotations

import json

import numpy as np

from megatron_rl.cli import main
from megatron_rl.data.trajectory import file_of, load_trajectories
from megatron_rl.distributed import parallel

FOLLOW_UP = [5, 6, 7]
PROGRAM = f"""
from dataclasses import replace

import numpy as np

from megatron_rl.tasks import Prompt
from megatron_rl.rollout.collect import Collection
from megatron_rl.rollout.program import SingleTurn

FOLLOW_UP = {FOLLOW_UP}


class TwoTurns(Collection):
    second = None

    @property
    def complete(self):
        return self.second is not None and self.second.complete

    def run(self, client):
        super().run(client)
        if self.second is None:
            asked = [Prompt(t.prompt_id, "", tokens=[*t.tokens, *FOLLOW_UP]) for t in super().trajectories()]
            more = dict(samples_per_prompt=1, max_new_tokens=self.max_new_tokens, stop_token_ids=self.stop_token_ids)
            self.second = Collection(asked, self.support, **more, seed=f"{{self.seed}}/second")
        self.second.run(client)

    def trajectories(self):
        return [self.join(*turns) for turns in zip(super().trajectories(), self.second.trajectories())]

    def join(self, first, second):
        between = {{"loss_mask": np.zeros(len(FOLLOW_UP), bool), "rollout_log_probs": np.zeros(len(FOLLOW_UP), np.float32)}}
        fields = {{n: np.concatenate([first.fields[n], between[n], second.fields[n]]) for n in between}}
        return replace(first, tokens=second.tokens, fields=fields, finish_reason=second.finish_reason)


class TwoTurnProgram(SingleTurn):
    collection = TwoTurns
"""


def test_a_program_of_two_turns(tmp_path, tiny_model, capsys):
    (tmp_path / "turns.py").write_text(PROGRAM)
    tree = {
        "name": "turns",
        "runs_dir": str(tmp_path / "runs"),
        "model": {"path": str(tiny_model("qwen3_moe", "--layers", "2", "--tokenizer", "numbers"))},
        "data": {"task": "number_sorting"},
        "batch": {"prompts_per_step": 2, "samples_per_prompt": 4},
        "precision": {"train": "fp32", "rollout": "fp32"},
        "rollout": {"max_new_tokens": 8, "context_length": 64, "server": {"threads": 1, "max_total_tokens": 4096}},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(tree))
    command = ["rollout", str(tmp_path / "config.yaml"), "--rollout.program"]
    try:
        assert main([*command, f"{tmp_path / 'turns.py'}:TwoTurnProgam"]) == 2
        assert "rollout.program" in (message := capsys.readouterr().err) and "did you mean 'TwoTurnProgram'" in message
        assert main([*command, f"{tmp_path / 'turns.py'}:TwoTurnProgram"]) == 0
    finally:
        parallel.shutdown()
    found = load_trajectories(file_of(tmp_path / "runs" / "turns" / "rollouts", 0, 0))
    assert len(found) == 8
    for t in found:
        response, mask = t.tokens[t.prompt_length :].tolist(), t.fields["loss_mask"]
        [start] = np.flatnonzero(np.diff(np.concatenate([[True], mask]).astype(int)) == -1)
        assert response[start : start + 3] == FOLLOW_UP and (~mask).sum() == 3
        assert 1 <= start <= 8 and start + 3 < len(response) <= start + 11
        assert t.reward in (0.0, 1.0)
