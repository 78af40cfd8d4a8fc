"""SGLang's replies, checked and typed: tokens, log-probs, routes, features, sampling masks and weight versions."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import batched, chain
from typing import Any

import numpy as np

from megatron_rl.data.engine_routes import EngineFeatures, EngineRoutes
from megatron_rl.data.sequence import RouterFeatures, TopLogProbs
from megatron_rl.data.trajectory import WeightSpan
from megatron_rl.errors import UserError

NEVER = -1e30
"""Log-probs at or below this bound mean minus infinity. If a probability is 0 in fp32, SGLang sends the lowest fp32 number."""
MOST_LOG_PROB = 1e-5
"""Largest valid log-prob. It is above 0 because in fp32 the probabilities of a vocabulary sum to 1 only within about 2^-20."""
MOST_VOCABULARY = 2**31 - 1


@dataclass
class Reply:
    """One sampled response, with p prompt tokens and m response tokens."""

    tokens: np.ndarray
    """Ids of the response tokens, [m] int32."""
    fields: dict[str, np.ndarray]
    """Arrays [m] with a value for each response token, by their name in `data.sequence.FIELDS`."""
    finish_reason: str
    """stop | length | abort."""
    weight_spans: list[WeightSpan]
    kept: list[np.ndarray] | None = None
    """Ids that top-p and top-k kept, int32, one array per token, if the request asks for them."""
    routes: np.ndarray | None = None
    """Routes (indices of the chosen experts), [p + m - 1 - routes_start, moe_layers, topk]."""
    routes_start: int = 0
    """Number of rows at the start of the routes that the caller already knew and the server did not send."""
    gates: np.ndarray | None = None
    """Gate values of the experts, float32, in the shape of `routes`, if the engine sends them."""
    features: RouterFeatures | None = None
    top: TopLogProbs | None = None
    """Likeliest tokens at the position of each token, if the request asks for them."""
    prompt_log_probs: np.ndarray | None = None
    """Log-probs [p - 1] float32 of prompt tokens 1..p-1 at temperature 1, from the prefill. If the request sets
    logprob_start_len = s, these are the log-probs of tokens s+1..p-1."""
    text: str = ""
    """Text decoded by the server; empty if the server has no tokenizer."""

    def first(self, count: int) -> Reply:
        """Return the reply as if the server had stopped after `count` tokens, by a stop rule that reads only these tokens."""
        dropped = len(self.tokens) - count
        spans = [replace(span, end=min(span.end, count)) for span in self.weight_spans if span.start < count]
        return replace(
            self,
            tokens=self.tokens[:count],
            fields={name: values[:count] for name, values in self.fields.items()},
            finish_reason="stop",
            weight_spans=spans,
            kept=self.kept and self.kept[:count],
            routes=None if self.routes is None else self.routes[: len(self.routes) - dropped],
            gates=None if self.gates is None else self.gates[: len(self.gates) - dropped],
            features=self.features and self.features.before(count),
            top=self.top and TopLogProbs(self.top.token_ids[:count], self.top.log_probs[:count]),
            text="",
        )


def parse_reply(
    reply: dict[str, Any],
    prompt_length: int,
    routes: EngineRoutes | None,
    prompt_log_probs: bool,
    *,
    routes_start: int = 0,
    features: EngineFeatures | None = None,
    kept: bool = False,
    top_log_probs: int = 0,
    max_new_tokens: int | None = None,
    vocabulary: int = MOST_VOCABULARY,
) -> Reply:
    """Parse one element of SGLang's answer.

    vocabulary: size of the model's vocabulary. max_new_tokens: limit of the request, if known. Errors: UserError that names a
    field which is missing, malformed, or impossible for this request.
    """
    try:
        meta = reply["meta_info"]
        tokens = numbers(reply["output_ids"], "output_ids", "i")
        # The log-probs of output_token_logprobs are from before the truncation.
        name = "output_token_sampling_logprobs"
        log_probs = numbers(meta[name], name) if kept else _firsts(meta, "output_token_logprobs")
        reason = meta["finish_reason"]
        ended = reason["type"] if isinstance(reason, dict) else reason
        versions = meta.get("weight_versions")
        versions = versions or [{"version": meta["weight_version"], "start": 0, "end": len(tokens)}]
        borders = numbers(
            [border for s in versions for border in (s["start"], s["end"])], "weight_versions", "i"
        ).tolist()
        spans = [WeightSpan(str(s["version"]), *pair) for s, pair in zip(versions, batched(borders, 2), strict=True)]
        sets = _split(meta["output_token_sampling_mask"], vocabulary) if kept else None
        before = _firsts(meta, "input_token_logprobs", start=1) if prompt_log_probs else None
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise UserError(f"reply of SGLang is not what release 0.5.23 sends ({type(error).__name__}: {error})") from None
    if ended == "abort" and isinstance(reason, dict) and "status_code" in reason:
        said = " ".join(str(reason.get("message")).split())[:300]
        raise UserError(f"SGLang refused a prompt of {prompt_length} tokens: {said}")
    if ended not in ("stop", "length", "abort"):
        raise UserError(f"reply of SGLang has the finish_reason {ended!r:.40}, which is none of stop, length and abort")
    count, most = len(tokens), max_new_tokens
    if most and not 1 <= count <= most:
        raise UserError(f"reply of SGLang has {count} tokens (finish_reason: {ended}), but 1 to {most} were requested")
    if len(log_probs) != count:
        raise UserError(f"reply of SGLang has {count} tokens but {len(log_probs)} log-probs")
    _check_tokens(tokens, vocabulary, "a response")
    _check_log_probs(log_probs, "a response")
    _check_spans(spans, count)
    tokens = tokens.astype(np.int32)
    fields = {"loss_mask": np.ones(count, bool), "rollout_log_probs": log_probs}
    text = reply.get("text")
    parsed = Reply(tokens, fields, ended, spans, kept=sets, text=text if isinstance(text, str) else "")
    if sets is not None:
        if len(sets) != count:
            raise UserError(f"reply of SGLang has {count} tokens but {len(sets)} sets of kept tokens")
        owners = np.repeat(np.arange(count), [len(ids) for ids in sets])
        among = np.isin(np.arange(count), owners[np.concatenate([*sets, tokens[:0]]) == tokens[owners]])
        if not among.all():
            raise UserError(f"SGLang says that token {among.argmin()} of a response is not among the kept tokens")
    if routes is not None:
        if meta.get("routed_experts") is None:
            raise UserError("SGLang returned no routed_experts: start it with --enable-return-routed-experts")
        encoded, rows = meta["routed_experts"], prompt_length + count - 1 - routes_start
        parsed.routes_start = routes_start
        if routes.gates:
            parsed.routes, parsed.gates = routes.decode_with_gates(encoded, rows)
        else:
            parsed.routes = routes.decode(encoded, rows)
    if features is not None:
        entries = meta.get("router_features")
        if not isinstance(entries, list) or len(entries) != count:
            raise UserError(
                f"SGLang returned router_features of {len(entries) if isinstance(entries, list) else 0} tokens for a response"
                f" of {count}: is it served with route predictors and a feature stride?"
            )
        parsed.features = features.decode(entries)
    if top_log_probs:
        parsed.top = _top(meta, count, top_log_probs, vocabulary)
    if before is not None:
        _check_log_probs(before, "a prompt")
        parsed.prompt_log_probs = before
    return parsed


def numbers(values: Any, name: str, kinds: str = "if") -> np.ndarray:
    """Return numbers [n] of a JSON list: integers as int64, others as float32. Errors: ValueError for anything else."""
    found = np.asarray(values)
    if not isinstance(values, list) or found.ndim != 1 or (len(found) and found.dtype.kind not in kinds):
        raise ValueError(f"{name}: a list of {'whole ' if kinds == 'i' else ''}numbers is needed")
    with np.errstate(over="ignore"):  # overflow gives infinity, which is refused later
        return found.astype(np.int64 if kinds == "i" else np.float32)


def _firsts(meta: dict[str, Any], name: str, start: int = 0) -> np.ndarray:
    """Return log-probs [n] float32 from the entries (log-prob, token, text) of field `name`, starting at entry `start`.

    Errors: ValueError for anything else.
    """
    try:
        return numbers([entry[0] for entry in meta[name][start:]], name)
    except (TypeError, LookupError) as error:
        raise ValueError(f"{name}: {error}") from None


def _split(listed: Any, vocabulary: int) -> list[np.ndarray]:
    """Return an int32 array of token ids for each inner list of a JSON list of lists.

    Errors: as for `numbers`; UserError for tokens outside the vocabulary.
    """
    flat = numbers([*chain.from_iterable(listed)], "output_token_sampling_mask", "i")
    _check_tokens(flat, vocabulary, "the kept tokens")
    return np.split(flat.astype(np.int32), np.cumsum([len(ids) for ids in listed], dtype=int))[:-1]


def _check_tokens(tokens: np.ndarray, vocabulary: int, where: str) -> None:
    wrong = (tokens < 0) | (tokens >= vocabulary)
    if wrong.any():
        raise UserError(
            f"reply of SGLang has token {tokens[wrong.argmax()]} in {where}, outside the model's vocabulary of {vocabulary}:"
            " does the server have another model?"
        )


def impossible(log_probs: np.ndarray) -> np.ndarray:
    """Mark values that cannot be a sampled token's log-prob: above 0 by more than rounding, minus infinity, or NaN."""
    return ~((log_probs > -np.inf) & (log_probs <= MOST_LOG_PROB))


def _check_log_probs(log_probs: np.ndarray, where: str) -> None:
    if (wrong := impossible(log_probs)).any():
        place = wrong.argmax()
        raise UserError(
            f"reply of SGLang has {log_probs.flat[place]:g} as log-prob of token {place} of {where}, which no probability has:"
            " check the server's log, its weights and its precision"
        )


def _check_spans(spans: Sequence[WeightSpan], count: int) -> None:
    """Raise UserError if the weight spans do not cover all `count` tokens in order, without gaps or overlaps."""
    borders = [(span.start, span.end) for span in spans]
    ends = [end for _, end in borders]
    if [start for start, _ in borders] != [0, *ends[:-1]] or sorted({*ends}) != ends or ends[-1] != count:
        raise UserError(
            f"reply of SGLang has weight_versions of the tokens {borders!r:.100}, which do not follow each other from 0 to"
            f" {count}"
        )


def _top(meta: dict[str, Any], tokens: int, k: int, vocabulary: int) -> TopLogProbs:
    """Return the k likeliest tokens at each position, which SGLang sends as flat base64 arrays of ids and log-probs.

    Errors: UserError if there are not k entries per token, or if values cannot be log-probs.
    """
    try:
        flat = [
            np.frombuffer(base64.b64decode(meta[f"output_top_logprobs_{name}_flat_b64"]), dtype).reshape(tokens, k)
            for name, dtype in (("idx", "<i4"), ("val", "<f4"))
        ]
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise UserError(f"reply of SGLang has no {k} log-probs for each of {tokens} tokens ({problem})") from None
    ids, log_probs = flat
    never = log_probs <= NEVER
    ids, log_probs = np.where(never, -1, ids), np.where(never, np.float32(0), log_probs)
    _check_tokens(ids[~never], vocabulary, "the likeliest tokens")
    _check_log_probs(log_probs, "the likeliest tokens")
    return TopLogProbs(ids, log_probs)
