"""Runs environments of the `verifiers` package, in the Python that has it; nothing of megatron_rl is imported here.

    python verifiers_worker.py prompts LIMIT CONFIG     one line of JSON for each task
    python verifiers_worker.py serve LIMIT CONFIG       requests on standard input, answers on standard output

CONFIG: an environment's config of `verifiers.v1` as JSON. A request {"id", "task", "base_url", "model"} is answered by
{"id", "reward"} or {"id", "error"}; {"id"} alone gives it up. It ends when its standard input does, so never outlives who
started it.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import verifiers.v1 as vf


def chat_message(message: Any) -> dict[str, str]:
    """{"role", "content"} of a message of verifiers'."""
    found = message.model_dump(mode="json")
    content = found["content"]
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content or [])
    return {"role": found["role"], "content": text}


def prompt(data: vf.TaskData) -> dict[str, Any]:
    """What a task asks: its text, and the messages with which a conversation begins."""
    asked = data.prompt
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else [*map(chat_message, asked or ())]
    if data.system_prompt:
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    return {"text": data.prompt_text, "messages": messages, "name": data.name or data.id or ""}


async def play(env: vf.Env, task: vf.Task, request: dict[str, Any]) -> float:
    """The reward of one episode. Errors: RuntimeError where it did not run to its end."""
    import verifiers.v1 as vf  # where it is called: the trainer has no such package

    client = vf.EvalClientConfig(base_url=request["base_url"], api_key_var="OF_NO_MEANING_HERE")
    context = vf.ModelContext(model=request["model"], client=client)
    [slot] = env.slots(task)
    episode = await env.run_slot(slot, context)
    problems = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok and problems:
        raise RuntimeError(f"{problems[-1].type}: {' '.join(problems[-1].message.split())[:500]}")
    return sum(trace.reward for trace in episode.traces) / max(1, len(episode.traces))


async def serve(env: vf.Env, tasks: list[vf.Task], answers: TextIO) -> None:
    """Answer requests until there are no more, each as it comes."""
    loop = asyncio.get_running_loop()
    requests = asyncio.StreamReader(limit=2**24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), sys.stdin)
    playing: dict[int, asyncio.Task] = {}

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    async def one(request: dict[str, Any]) -> None:
        try:
            answer({"id": request["id"], "reward": await play(env, tasks[request["task"]], request)})
        except Exception as error:
            answer({"id": request["id"], "error": f"{type(error).__name__}: {error}"})

    async with env.serving():
        answer({"id": None})  # ready
        async for line in requests:
            request = json.loads(line)
            number = request["id"]
            if "task" in request:
                playing[number] = asyncio.create_task(one(request))
                playing[number].add_done_callback(lambda _, number=number: playing.pop(number))
            elif number in playing:
                playing[number].cancel()
        for task in playing.values():
            task.cancel()
        await asyncio.gather(*playing.values(), return_exceptions=True)


def main(kind: str, limit: str, config: str) -> None:
    """See the module."""
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print is not an answer
    env = load_environment(resolve_env_config(json.loads(config)))
    tasks = list(itertools.islice(env.taskset, int(limit)))
    if kind == "serve":
        asyncio.run(serve(env, tasks, answers))
        return
    for task in tasks:
        answers.write(json.dumps(prompt(task.data)) + "\n")
    answers.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
