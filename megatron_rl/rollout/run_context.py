"""The parts of a run that sampling needs, as an interface: `megatron_rl.run.run.Run` has them."""

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
    """The run that asks for responses. Every process has one."""

    config: Config
    kind: Kind
    id: str
    """Random id of the run; empty for one that only asks."""
    step: int
    """Steps that are done."""
    ranks: Ranks
    hf_config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    support: SamplingSupport
    program: SingleTurn
    stream: PromptStream
    logger: RunLogger

    def begin_step(self) -> None:
        """From here on a step may be given up, until something is changed (all ranks)."""
        ...

    def asked_to_stop(self) -> bool:
        """True if this process was asked to stop."""
        ...

    def stop_tokens(self) -> list[int]:
        """Tokens that end a response."""
        ...

    def gather_from_leaders(self, items: list[T]) -> list[T]:
        """The lists of all copies of the model, one after the other."""
        ...

    def current_clock(self, part: str) -> AbstractContextManager[Any]:
        """Measure a part of the step."""
        ...
