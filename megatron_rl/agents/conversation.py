"""The record of one sample while it grows: the prompt, the sampled replies, and observations, which are not trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megatron_rl.data.engine_routes import EngineRoutes, join_gates, join_routes
from megatron_rl.data.sequence import FIELDS, RouterFeatures, TopLogProbs
from megatron_rl.data.trajectory import Trajectory, Turn, WeightSpan
from megatron_rl.dialects.base import encodable
from megatron_rl.servers.reply import Reply

Messages = Sequence[Mapping[str, Any]]
"""Messages in OpenAI's form: role, content, and calls in tool_calls."""


@dataclass
class Conversation:
    """Tokens of a conversation so far. Replies and observations alternate, and a reply comes first."""

    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    """All tokens after the prompt."""
    turns: list[Turn] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    finish_reason: str = ""
    """Reason of the conversation's end; empty while it continues."""
    seconds: float = 0.0
    """Seconds that the conversation has taken so far."""

    @property
    def context(self) -> list[int]:
        """Token ids (prompt and all turns) after which the next reply is sampled."""
        return [*self.prompt, *self.tokens]

    def known_routes(self, pushed: str | None = None) -> int:
        """Return the number of known rows of the table of routes, which the engine need not send again.

        The last token of a reply is routed only in the next turn. pushed: version of the weights of the last weight sync, if
        known.

        A weight sync flushes the engine's cache, so the engine computes all routes again with the new weights. Therefore, if
        some known rows belong to other weights, the result is 0, and the engine sends all rows again.
        """
        last = next((turn for turn in reversed(self.turns) if turn.role == "assistant"), None)
        versions = {version for _, version in self._tables()}
        if last is None or len(versions) > 1 or (pushed is not None and versions != {pushed}):
            return 0
        return len(self.prompt) + last.end - 1

    def _tables(self) -> list[tuple[Reply, str]]:
        """Return the replies whose tables of routes together form the whole table, with their weight versions.

        The first of them is the last reply whose table contains all rows from the start.
        """
        first = max((i for i, reply in enumerate(self.replies) if not reply.routes_start), default=0)
        routed = [reply for reply in self.replies[first:] if reply.routes is not None]
        return [(reply, reply.weight_spans[-1].version) for reply in routed]

    def add_reply(self, reply: Reply, messages: Messages = ()) -> Turn:
        """Append a reply's tokens unchanged. messages: the same reply in the form of messages."""
        self.replies.append(reply)
        return self._add("assistant", reply.tokens.tolist(), messages)

    def add_observation(self, tokens: Sequence[int], role: str = "tool", messages: Messages = ()) -> Turn:
        """Append an observation (the answer to a reply). tokens include the template's separators, messages do not."""
        return self._add(role, tokens, messages)

    def _add(self, role: str, tokens: Sequence[int], messages: Messages) -> Turn:
        turn = Turn(role, len(self.tokens), len(self.tokens) + len(tokens))
        for message in messages:
            said = {"role": str(message["role"]), "content": encodable(str(message.get("content") or ""))}
            turn.messages.append(said | {key: message[key] for key in ("tool_calls",) if message.get(key)})
        self.tokens += tokens
        self.turns.append(turn)
        return turn

    def drop_open_observation(self) -> None:
        """Drop an observation at the end that no reply follows, because nothing is trained on it."""
        if self.turns and self.turns[-1].role != "assistant":
            self.tokens = self.tokens[: self.turns.pop().start]

    def trajectory(self, routes: EngineRoutes | None, **settings: Any) -> Trajectory:
        """Return the trajectory of all turns. routes: layout of the replies' tables of routes; None if they have no tables.

        settings: the other fields of `Trajectory`.
        """
        said = [turn for turn in self.turns if turn.role == "assistant"]
        pairs = list(zip(said, self.replies, strict=True))
        return Trajectory(
            tokens=np.asarray(self.context, np.int32),
            prompt_length=len(self.prompt),
            fields={name: self._field(name, pairs) for name in ("loss_mask", "rollout_log_probs")},
            finish_reason=self.finish_reason,
            kept=self._kept(pairs),
            routes=self._routes(routes),
            gates=self._gates(),
            features=_features(pairs),
            top=self._top(pairs),
            weight_spans=_spans(pairs),
            turns=self.turns,
            **settings,
        )

    def _field(self, name: str, pairs: list[tuple[Turn, Reply]]) -> np.ndarray:
        values = np.full(len(self.tokens), FIELDS[name].default, FIELDS[name].dtype)
        for turn, reply in pairs:
            values[turn.start : turn.end] = reply.fields[name]
        return values

    def _kept(self, pairs: list[tuple[Turn, Reply]]) -> list[np.ndarray] | None:
        if all(reply.kept is None for _, reply in pairs):
            return None
        kept = [np.zeros(0, np.int32)] * len(self.tokens)
        for turn, reply in pairs:
            kept[turn.start : turn.end] = reply.kept or []
        return kept

    def _top(self, pairs: list[tuple[Turn, Reply]]) -> TopLogProbs | None:
        found = [(turn, reply.top) for turn, reply in pairs if reply.top is not None]
        if not found:
            return None
        whole = TopLogProbs.none(len(self.tokens), found[0][1].token_ids.shape[1])
        for turn, top in found:
            whole.token_ids[turn.start : turn.end], whole.log_probs[turn.start : turn.end] = (
                top.token_ids,
                top.log_probs,
            )
        return whole

    def _routes(self, shape: EngineRoutes | None) -> np.ndarray | None:
        tables = [(reply.routes, version) for reply, version in self._tables() if reply.routes is not None]
        if shape is None or not tables:
            return None
        return join_routes(tables, tables[-1][1], shape.shape)

    def _gates(self) -> np.ndarray | None:
        gates = [(reply.gates, version) for reply, version in self._tables() if reply.gates is not None]
        return join_gates(gates, gates[-1][1]) if gates else None


def _features(pairs: list[tuple[Turn, Reply]]) -> RouterFeatures | None:
    found = [(turn.start, reply.features) for turn, reply in pairs if reply.features is not None]
    if not found:
        return None
    return RouterFeatures(
        torch.cat([features.positions + start for start, features in found]),
        torch.cat([features.hidden for _, features in found]),
        torch.cat([features.logits for _, features in found]),
    )


def _spans(pairs: list[tuple[Turn, Reply]]) -> list[WeightSpan]:
    """Return weight spans over the whole response. A span includes an observation between replies with the same weights."""
    spans: list[WeightSpan] = []
    for turn, reply in pairs:
        for span in reply.weight_spans:
            start, end = turn.start + span.start, turn.start + span.end
            if spans and spans[-1].version == span.version:
                spans[-1].end = end
            else:
                spans.append(WeightSpan(span.version, start, end))
    return spans
