"""Tasks (prompts and rewards), verifiers (scores of responses), and the stream of training prompts."""

from megatron_rl.tasks.chat import encode_text
from megatron_rl.tasks.from_config import build_task
from megatron_rl.tasks.preferences import Judged, Preference, Step
from megatron_rl.tasks.stream import PromptStream, fitting
from megatron_rl.tasks.task import Prompt, Task, combine

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
