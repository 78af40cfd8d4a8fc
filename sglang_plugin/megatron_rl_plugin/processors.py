"""Finds a request's logit processor by its name. SGLang itself would unpickle the content of the request."""

from __future__ import annotations

PRUNE_TAIL = "megatron_rl_plugin.PruneTail"
"""Value of the field custom_logit_processor in a request."""


def class_named(name: str) -> type:
    """Return the processor class of this name (replaces SGLang's `_cache_from_str`). Errors: ValueError for any other name."""
    if name != PRUNE_TAIL:
        raise ValueError(f"custom_logit_processor: this server supports only {PRUNE_TAIL}")
    from megatron_rl_plugin.pruning import PruneTail  # imports SGLang's processors

    return PruneTail
