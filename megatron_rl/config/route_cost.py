"""Cost of tables of routes, in arithmetic: plans are made without torch."""

from typing import NamedTuple


def id_bytes(experts: int) -> int:
    """Bytes of an expert's id in a table: one while 255 is free to be the sentinel, two from 256 experts on."""
    return 1 if experts <= 255 else 2


class CacheCost(NamedTuple):
    """Cost of Pr2 for one response, as in Table 3 of the paper."""

    index_bytes: int
    """Replayed expert ids of all tokens."""
    feature_bytes: int
    """Bytes that the predictors learn from: router input (bf16) and logits (fp32) of the cached tokens."""
    flops_per_token: int
    """Operations of the predictors on a token while routes are recorded."""


def cache_cost(
    layers: int, hidden: int, experts: int, topk: int, tokens: int, cached_tokens: int, *, index_bytes: int = 4
) -> CacheCost:
    """Pr2, Appendix E.2: index cache b k L T, feature cache (2 d + 4 E) L C, work 2 L d E a token.

    layers: those with experts. tokens, cached_tokens: of one response. index_bytes: b of one expert id; the paper's are
    int32, ours are 1 (2 from 256 experts on). Errors: ValueError for a size below 1, or more cached tokens than tokens.
    """
    sizes = {"layers": layers, "hidden": hidden, "experts": experts, "topk": topk, "tokens": tokens}
    for name, size in {**sizes, "cached_tokens": cached_tokens, "index_bytes": index_bytes}.items():
        if size < 1:
            raise ValueError(f"cache_cost: {name} = {size}; it must be at least 1")
    if topk > experts:
        raise ValueError(f"cache_cost: topk = {topk} of {experts} experts")
    if cached_tokens > tokens:
        raise ValueError(f"cache_cost: cached_tokens = {cached_tokens} of {tokens} tokens")
    return CacheCost(
        index_bytes=index_bytes * topk * layers * tokens,
        feature_bytes=(2 * hidden + 4 * experts) * layers * cached_tokens,
        flops_per_token=2 * layers * hidden * experts,
    )
