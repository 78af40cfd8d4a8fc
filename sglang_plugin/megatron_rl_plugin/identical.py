"""The engine's side of `precision.identical`: whether a server is asked for it, and when its model is given the operators."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

FLAG = "megatron_rl_identical"
"""Key of a served model's config that asks for it (--json-model-override-args): the path of the trainer's operators."""
OPERATORS = "megatron_rl_operators"
"""Name of the module that is loaded from there."""


def load(path: str) -> None:
    """Import the trainer's operators, whose package is not in SGLang's environment, under the name OPERATORS."""
    spec = importlib.util.spec_from_file_location(OPERATORS, path)
    assert spec is not None and spec.loader is not None, path
    module = sys.modules[OPERATORS] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)


def after_load(_result: None, runner: Any, *_, **__) -> None:
    """Called after `ModelRunner.load_model`. Errors: NotImplementedError naming a module that is not known."""
    path = getattr(runner.model_config.hf_config, FLAG, None)
    if path is None:
        return
    load(path)
    from megatron_rl_plugin import operators  # it imports much of SGLang

    operators.make_identical(runner.model, runner.model_config.hf_config.to_dict(), runner.model_config.dtype)
    operators.replace_softmax()
    runner.sampler.enable_deterministic = True  # log-probs by log-softmax, and not as the logarithm of rounded shares
