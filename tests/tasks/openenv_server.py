"""An OpenEnv server for tests, in the Python that has the package: `openenv_server.py PORT SESSIONS`.

Three steps an episode; the reward of a step is the share of the letter "a" in the text. Some texts ask for trouble.
"""

from __future__ import annotations

import itertools
import os
import sys
import time

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

resets = itertools.count()


class Say(Action):
    text: str


class Heard(Observation):
    said: str
    number: int = 0


class Letters(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, fickle=False, **others):
        self.number = 0
        return Heard(said=f"episode {next(resets) if fickle else seed}: speak")

    def step(self, action, timeout_s=None, **others):
        if action.text == "die":
            os._exit(3)
        if action.text == "hang":
            time.sleep(600)
        if action.text == "raise":
            raise ValueError("not that")
        self.number += 1
        share = action.text.count("a") / max(1, len(action.text))
        return Heard(said=f"step {self.number}", number=self.number, reward=share, done=self.number == 3)

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    app = create_app(Letters, Say, Heard, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(
        app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", ws_ping_interval=1, ws_ping_timeout=2
    )
