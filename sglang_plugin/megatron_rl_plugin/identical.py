"""The engine's part of `precision.identical`: a loaded model gets the trainer's operators if its config asks for them."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

FLAG = "megatron_rl_identical"
"""Key of a served model's config (--json-model-override-args). Its value is the path of the trainer's operators."""
OPERATORS = "megatron_rl_operators"
"""Name under which the trainer's operators are imported as a module."""


def load(path: str) -> None:
    """Import the trainer's operators from a file as the module OPERATORS, because SGLang's environment lacks their package."""
    spec = importlib.util.spec_from_file_location(OPERATORS, path)
    assert spec is not None and spec.loader is not None, path
    module = sys.modules[OPERATORS] = importlib.util.module_from_spec(spec)  # dataclasses look up their module here
    spec.loader.exec_module(module)


def after_load(_result: None, runner: Any, *_, **__) -> None:
    """Install the operators (hook after `ModelRunner.load_model`).

    Errors: NotImplementedError naming the unsupported module.
    """
    path = getattr(runner.model_config.hf_config, FLAG, None)
    if path is None:
        return
    load(path)
    from megatron_rl_plugin import operators  # imports much of SGLang

    operators.make_identical(runner.model, runner.model_config.hf_config.to_dict(), runner.model_config.dtype)
    operators.replace_softmax()
    runner.sampler.enable_deterministic = True  # log-probs by log-softmax, not as logs of rounded probabilities
