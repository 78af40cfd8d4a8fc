"""The engine's side of `precision.identical`: whether a server is asked for it, and when its model is given the operators."""

from __future__ import annotations

from typing import Any

FLAG = "megatron_rl_identical"
"""Key of a served model's config that asks for it: --json-model-override-args."""


def after_load(_result: None, runner: Any, *_, **__) -> None:
    """Called after `ModelRunner.load_model`. Errors: NotImplementedError naming a module that is not known."""
    if not getattr(runner.model_config.hf_config, FLAG, False):
        return
    from megatron_rl_plugin import operators  # it imports much of SGLang

    operators.make_identical(runner.model, runner.model_config.hf_config.to_dict(), runner.model_config.dtype)
    operators.replace_softmax()
    runner.sampler.enable_deterministic = True  # log-probs by log-softmax, and not as the logarithm of rounded shares
