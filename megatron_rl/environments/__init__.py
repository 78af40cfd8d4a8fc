"""Tasks, verifiers and the stream of prompts: what is asked and how answers are judged."""

from megatron_rl.environments.build import build_task
from megatron_rl.environments.preferences import Judged, Preference, Step
from megatron_rl.environments.stream import PromptStream, fitting
from megatron_rl.environments.task import Prompt, Task, combine
from megatron_rl.environments.text import encode_text

__all__ = [
    "Judged",
    "Preference",
    "Prompt",
    "PromptStream",
    "Step",
    "Task",
    "build_task",
    "combine",
    "encode_text",
    "fitting",
]
