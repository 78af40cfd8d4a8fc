"""An example of your own agent: it uses only the plain `openai` client, and may call a calculator.

    megatron-rl train configs/agentic_quickstart.yaml --rollout.program openai_agent \
      --agent.function examples/calculator_agent.py:calculator_agent

Its requests and replies are recorded and trained without changes. It returns no reward, so the task scores its last reply.
"""

from __future__ import annotations

import json

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from megatron_rl.tasks import Prompt
from megatron_rl.tools.calculator import Calculator, calculate
from megatron_rl.tools.tool import ToolError

TURNS = 3
TOOLS = [Calculator().schema]


async def calculator_agent(prompt: Prompt, base_url: str) -> None:
    messages = [{"role": "user", "content": prompt.text}]
    plain = DefaultAsyncHttpxClient(verify=False)  # plain http on this machine, so clients need not load certificates
    async with AsyncOpenAI(base_url=base_url, api_key="none", timeout=600, http_client=plain) as client:
        for _ in range(TURNS):
            completion = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
            reply = completion.choices[0].message
            if not reply.tool_calls:
                return
            messages.append(reply.model_dump(exclude_none=True))
            for call in reply.tool_calls:
                messages.append(
                    {"role": "tool", "tool_call_id": call.id, "content": result_of(call.function.arguments)}
                )


def result_of(arguments: str) -> str:
    try:
        return str(calculate(str(json.loads(arguments)["expression"])))
    except (ToolError, ValueError, KeyError) as error:
        return f"Error: {error}"
