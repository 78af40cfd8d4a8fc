"""Run with SGLang's Python: what SGLang itself makes of flags on machines that are not here.

stdin: JSON list of [facts, arguments]; stdout: JSON list of {attention, moe, error}. facts: SGLang's own switches by which it
knows the platform (`runtime_context.override_platform`).
"""

from __future__ import annotations

import json
import os
import sys

answers = os.dup(1)
os.dup2(2, 1)  # SGLang's own prints

from sglang.srt.arg_groups.overrides import resolved_view  # noqa: E402
from sglang.srt.runtime_context import override_platform  # noqa: E402
from sglang.srt.server_args import prepare_server_args  # noqa: E402


def resolve(facts: dict, arguments: list[str]) -> dict:
    with override_platform(**facts):
        try:
            server_args = prepare_server_args(["--device", "cuda", *arguments])
            server_args.resolve_once()
        except (Exception, SystemExit) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        view = resolved_view(server_args)
        return {"attention": view.attention_backend, "moe": view.moe_runner_backend, "head": view.enable_fp32_lm_head}


with os.fdopen(answers, "w") as out:
    json.dump([resolve(facts, arguments) for facts, arguments in json.load(sys.stdin)], out)
