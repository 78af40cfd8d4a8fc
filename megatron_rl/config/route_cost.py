"""Memory and floating-point operations of routing replay and prediction, computed from shapes.

The memory plan uses this module without torch.
"""

from typing import NamedTuple


def id_bytes(experts: int) -> int:
    """Return the bytes of an expert id in a route table: 1 if id 255 is free for the sentinel, else 2."""
    return 1 if experts <= 255 else 2


class CacheCost(NamedTuple):
    """Cost of Pr2 for one response, as in Table 3 of the Pr2 paper."""

    index_bytes: int
    """Bytes of the replayed expert ids (routes) of all tokens."""
    feature_bytes: int
    """Bytes of the predictors' training data: router inputs (bf16) and logits (fp32) of the cached tokens."""
    flops_per_token: int
    """Floating-point operations of the predictors per token, while routes are recorded."""


def cache_cost(
    layers: int, hidden: int, experts: int, topk: int, tokens: int, cached_tokens: int, *, index_bytes: int = 4
) -> CacheCost:
    """Return the cost as in Appendix E.2 of the Pr2 paper.

    layers: L, number of layers with experts. hidden: d. experts: E. topk: k. tokens: T, of one response. cached_tokens:
    C, of one response. index_bytes: b, bytes of one expert id: 4 in the paper (int32), 1 in this package (2 from 256
    experts on). The routes take b k L T bytes, and the predictors' training data (2 d + 4 E) L C bytes. The predictors need
    2 L d E operations per token.

    Errors: ValueError if a size is below 1, if topk is above experts, or if there are more cached tokens than
    tokens.
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
