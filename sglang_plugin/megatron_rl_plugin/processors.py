"""The logit processor that a request asks for, found by its name: SGLang would unpickle what the request holds."""

from __future__ import annotations

PRUNE_TAIL = "megatron_rl_plugin.PruneTail"
"""The value that a request has as its custom_logit_processor."""


def class_named(name: str) -> type:
    """In the place of SGLang's `_cache_from_str`. Errors: ValueError for any other text."""
    if name != PRUNE_TAIL:
        raise ValueError(f"custom_logit_processor: this server knows {PRUNE_TAIL} alone")
    from megatron_rl_plugin.pruning import PruneTail  # it imports SGLang's own

    return PruneTail
