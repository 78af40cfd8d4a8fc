"""A task set of the `verifiers` package for tests: words, and a reward that is the share of the letter "a"."""

from __future__ import annotations

import os

import verifiers.v1 as vf

__all__ = ["Letters"]


class Word(vf.Task[vf.TaskData]):
    @vf.reward
    async def share(self, trace: vf.Trace) -> float:
        if "raise" in self.data.prompt:
            raise ValueError("cannot be judged")
        if "die" in self.data.prompt:
            os._exit(3)
        said = trace.last_reply
        return said.count("a") / max(1, len(said))

    @vf.reward(weight=0.5)
    async def answered(self, trace: vf.Trace) -> float:
        return 1.0


class Letters(vf.Taskset[Word, vf.TasksetConfig]):
    def load(self):
        print("what a package prints is no answer")
        for number in range(40):
            yield Word(vf.TaskData(prompt=f"word {number}", system_prompt="Be brief."))
        yield Word(vf.TaskData(prompt="raise"))
        yield Word(vf.TaskData(prompt="die"))
