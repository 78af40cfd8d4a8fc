"""Interface to the parts of a run that sampling needs, implemented by `megatron_rl.run.run.Run`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.config import Config
from megatron_rl.config.plan import Kind
from megatron_rl.distributed.parallel import Ranks
from megatron_rl.metrics.logger import RunLogger
from megatron_rl.rollout.program import SingleTurn
from megatron_rl.tasks import PromptStream

T = TypeVar("T")


class RunContext(Protocol):
    """The run that requests responses. Every process has one."""

    config: Config
    kind: Kind
    id: str
    """Random id of the run; empty for a run that does not train."""
    step: int
    """Number of finished steps."""
    ranks: Ranks
    hf_config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    support: SamplingSupport
    program: SingleTurn
    stream: PromptStream
    logger: RunLogger

    def begin_step(self) -> None:
        """Mark the start of a step on all ranks. The step can be abandoned until it changes the state of the run."""
        ...

    def asked_to_stop(self) -> bool:
        """Return whether this process was asked to stop."""
        ...

    def stop_tokens(self) -> list[int]:
        """Return the tokens that end a response."""
        ...

    def gather_from_leaders(self, items: list[T]) -> list[T]:
        """Return the lists of all data-parallel leaders, concatenated."""
        ...

    def current_clock(self, part: str) -> AbstractContextManager[Any]:
        """Return a context manager that measures the time of the named part of the step."""
        ...
