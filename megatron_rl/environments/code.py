"""Programs that a model writes, judged by tests in the sandbox: the verifier `code`, for data like HumanEval or MBPP."""

from __future__ import annotations

import ast
import re
import secrets
from typing import Any

from megatron_rl.environments import sandbox
from megatron_rl.errors import UserError

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


def program_of(response: str, prompt: str = "") -> str:
    """The code in a response: its last fenced block, or else all of it; a body alone is put behind the prompt's code."""
    blocks = _BLOCK.findall(response)
    code = blocks[-1] if blocks else response
    for whole in (code, f"{prompt}{code}"):
        try:
            if any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in ast.parse(whole).body):
                return whole
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return code


def passes_tests(response: str, answer: Any, prompt: str = "", timeout_s: float = 10.0) -> dict[str, float]:
    """correct: the response's program passes the tests in `answer`, to their end; answered: there is a program at all.

    Errors: UserError where the machine cannot contain programs: that is no fault of the response.
    """
    program, end = program_of(response, prompt), secrets.token_hex(16)
    # A program that ends before its tests do ends well, too.
    found = sandbox.run_python(f"{program}\n\n{answer}\nprint('{end}')\n", timeout_s=timeout_s)
    if found.reason == "refused":
        raise UserError(f"data.verifier: code: {found.stderr}")
    passed = found.reason == "ok" and found.stdout.endswith(f"{end}\n")
    return {"correct": float(passed), "answered": float(bool(program.strip()))}
