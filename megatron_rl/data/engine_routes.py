"""Routed experts and router features as SGLang returns them, as the tables that a trajectory carries.

Which weights a table comes from, as found with SGLang 0.5.23: the engine keeps one row of experts per slot of its
key-value cache and reads them when a request ends. A push retracts all requests (`/pause_generation` mode retract; one
whose prompt is in the middle of chunked prefill too) and flushes the prefix cache, so that a retracted request is
prefilled again, prompt and all tokens so far, under the new weights: the rows of its earlier tokens are replaced. A table
as a whole is therefore of the weights of the last response token, while log-probs of earlier tokens stay those of the
weights that sampled them. Features are taken when a token is sampled, and stay too. An engine whose weights were changed
in another way (pause mode in_place, no flush) has tables of mixed rows that nothing in a reply tells apart.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from megatron_rl_plugin.gates import ID_BITS, MOST_EXPERTS, STEPS

from megatron_rl.data.sequence import RouterFeatures
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.errors import UserError
from megatron_rl.routing.table import RouteShape, has_route, names_one_twice

WIRE_DTYPES = (np.dtype("<i4"), np.dtype(np.uint8), np.dtype("<i2"))
"""The last one where there are more than 256 experts. Four-byte integers of another shape that are as long as smaller ones of
this model would have zeros between them: an expert twice."""


@dataclass(frozen=True)
class EngineRoutes:
    """Rows and columns of the engine's table for a model (`models.shape.engine_routes`)."""

    layers: int
    """All layers: the engine's table has dense ones too."""
    moe_layers: tuple[int, ...]
    """Indices of the layers that have experts: the ones that a trajectory keeps."""
    experts: int
    topk: int
    gates: bool = False
    """True if replies have the experts' weights too."""

    def __post_init__(self) -> None:
        """Errors: UserError for gates of more experts than fit beside them."""
        if self.gates and self.experts > MOST_EXPERTS:
            raise UserError(
                f"config: routing.replay_gates and rollout.gates are for {MOST_EXPERTS} experts at most, and the model has"
                f" {self.experts}; set both to false"
            )

    @property
    def shape(self) -> RouteShape:
        """The columns that a trajectory keeps."""
        return RouteShape(self.moe_layers, self.experts, self.topk)

    @property
    def bytes_per_token(self) -> int:
        """Most bytes of a reply for a token."""
        return self.layers * self.topk * 4 * 4 // 3

    def decode(self, encoded: str, tokens: int) -> np.ndarray:
        """Base64 of raw [tokens, layers, topk] -> [tokens, moe_layers, topk] uint8 (int16 above 255 experts).

        SGLang's own integers have 4 bytes; our plugin, where a server has it, makes them 1 or 2 (its routes.py). Errors:
        UserError for what are not routes of this model, or have gates beside them.
        """
        return self._ids(self._raw(encoded, tokens, WIRE_DTYPES if self.experts > 256 else WIRE_DTYPES[:2]))

    def decode_with_gates(self, encoded: str, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """The same from a server that sends gates along (the plugin's gates.py): ids, and their weights as float32.

        Errors: UserError as of `decode`, and for routes without gates.
        """
        raw = self._raw(encoded, tokens, WIRE_DTYPES)
        words = raw.view("<u4") if raw.dtype.itemsize == 4 else raw.astype("<u4")
        gates = (words >> ID_BITS).astype(np.float32) / np.float32(STEPS)
        if not gates.any(-1).all():  # those of a token's experts are never all 0
            raise UserError(
                "routed_experts from SGLang have no gates: start the server through tools/serve.py with this config, or set"
                " routing.replay_gates and rollout.gates to false"
            )
        return self._ids((words & MOST_EXPERTS - 1).view("<i4")), gates

    def _raw(self, encoded: str, tokens: int, known: Sequence[np.dtype]) -> np.ndarray:
        """[tokens, moe_layers, topk] of one of these types."""
        try:
            raw = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError, TypeError) as error:
            raise UserError(f"routed_experts from SGLang is not base64 ({error}): was the reply cut off?") from None
        ids = tokens * self.layers * self.topk
        dtype = next((dtype for dtype in known if len(raw) == ids * dtype.itemsize), None)
        if dtype is None:
            raise UserError(
                f"routed_experts from SGLang has {len(raw)} bytes, but {tokens} tokens x {self.layers} layers x"
                f" {self.topk} experts are {' or '.join(str(ids * dtype.itemsize) for dtype in known)}: another model, or a"
                " reply that was cut off?"
            )
        table = np.frombuffer(raw, dtype).reshape(tokens, self.layers, self.topk)
        return table[:, self.moe_layers] if len(self.moe_layers) < self.layers else table

    def _ids(self, table: np.ndarray) -> np.ndarray:
        if table.size and (table.min() < 0 or table.max() >= self.experts):
            raise UserError(
                f"routed_experts from SGLang names expert {table.min() if table.min() < 0 else table.max()},"
                f" but the model has {self.experts}"
            )
        table = table.astype(self.shape.dtype)
        if names_one_twice(table):
            raise UserError(
                "routed_experts from SGLang names an expert twice in one row: were all tokens' routes captured?"
            )
        return table


@dataclass(frozen=True)
class EngineFeatures:
    """Sizes of the router features that the engine exports for a response token."""

    moe_layers: int
    hidden: int
    """0: the logits alone."""
    experts: int
    dtype: torch.dtype
    """The engine's: of the hidden part. Logits are fp32."""

    @property
    def logits_alone(self) -> EngineFeatures:
        """The same without hidden states: enough to compare routers, where no predictor learns."""
        return replace(self, hidden=0)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a reply for a token whose features it has."""
        return self.moe_layers * (self.hidden * self.dtype.itemsize + self.experts * 4) * 4 // 3

    def decode(self, entries: Sequence[str | None]) -> RouterFeatures:
        """One entry per response token: None, or base64 of h [moe_layers, hidden], then z [moe_layers, experts].

        Errors: UserError for what is not base64, or of another size.
        """
        split = self.moe_layers * self.hidden * self.dtype.itemsize
        size = split + self.moe_layers * self.experts * 4
        present = {i: entry for i, entry in enumerate(entries) if entry is not None}
        hidden, logits = bytearray(), bytearray()
        for entry in present.values():
            try:
                raw = base64.b64decode(entry, validate=True)
            except (binascii.Error, ValueError, TypeError) as error:
                raise UserError(
                    f"router_features from SGLang are not base64 ({error}): was the reply cut off?"
                ) from None
            if len(raw) != size:
                raise UserError(
                    f"router_features from SGLang have {len(raw)} bytes a token, but {self.moe_layers} MoE layers x"
                    f" ({self.hidden} values of {self.dtype} + {self.experts} logits of 4 bytes) are {size}"
                )
            hidden += raw[:split]
            logits += raw[split:]
        return RouterFeatures(
            torch.tensor(list(present), dtype=torch.int32),
            _tensor(hidden, self.dtype, (len(present), self.moe_layers, self.hidden)),
            _tensor(logits, torch.float32, (len(present), self.moe_layers, self.experts)),
        )

    def check(self, features: RouterFeatures, tokens: int) -> None:
        """Check that they belong to this model and a response of so many tokens. Errors: ValueError saying why not."""
        count, positions = len(features.positions), features.positions
        for name, width in (("hidden", self.hidden), ("logits", self.experts)):
            shape, wanted = tuple(getattr(features, name).shape), (count, self.moe_layers, width)
            if shape != wanted and not (name == "hidden" and shape == (*wanted[:2], 0)):
                raise ValueError(f"router features: {name} is {list(shape)}, the model wants {list(wanted)}")
        if count and not (int(positions.min()) >= 0 and int(positions.max()) < tokens and (positions.diff() > 0).all()):
            raise ValueError(f"router features: their positions are not ascending within the {tokens} response tokens")


def _tensor(raw: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(raw, dtype=dtype).view(shape) if raw else torch.empty(shape, dtype=dtype)


def check_gates(gates: np.ndarray | None, routes: np.ndarray) -> None:
    """Check that recorded gates belong to these routes. Errors: ValueError saying why not."""
    if gates is None:
        raise ValueError(
            "it has routes without gates: record it with rollout.gates: true, or set routing.replay_gates and rollout.gates to"
            " false"
        )
    if gates.shape != routes.shape or gates.dtype != np.float32:
        raise ValueError(f"gates are {gates.dtype} {list(gates.shape)}, its routes want float32 {list(routes.shape)}")
    if not ((gates >= 0) & (gates <= 1)).all():
        raise ValueError("gates are not between 0 and 1")
    if (gates.any(-1) & ~has_route(torch.from_numpy(routes)).numpy()).any():
        raise ValueError("a token without a route has gates")


def join_routes(turns: Sequence[tuple[np.ndarray, str]], version: str, shape: RouteShape) -> np.ndarray:
    """The table of a conversation from those of its turns, each with the new rows alone: [sum of rows, moe_layers, topk].

    turns: (table, version of the last token's weights). Turn t asked with routes_start = rows of the tables before it,
    which is the token count of the conversation so far less one: the last token of a response gets its route only as
    input of the next turn. version: the weights whose routes are wanted; a turn of others, from before a push, becomes
    sentinels.

    A turn that is known to come after a push asks with routes_start = 0, and its table stands alone (`Conversation`): rows of
    earlier turns are then those behind which the later turns were sampled. Log-probs of earlier turns stay those of the
    weights that sampled them, as in a response that a push has met in its middle (top of this file).
    """
    return np.concatenate([table if found == version else shape.empty(len(table)) for table, found in turns])


def join_gates(turns: Sequence[tuple[np.ndarray, str]], version: str) -> np.ndarray:
    """The same of the experts' weights, where 0 says that they are not known."""
    return np.concatenate([gates if found == version else np.zeros_like(gates) for gates, found in turns])


def sampled_by(trajectory: Trajectory, version: str) -> bool:
    """True if the last response token is known to come from weights `version`: with it the whole table does.

    The top of this file says why. A response without tokens says nothing about its version.
    """
    last = trajectory.weight_spans[-1] if trajectory.weight_spans else None
    return last is not None and last.end > last.start and last.version == version


def drop_stale_routes(trajectory: Trajectory, *, fresh: bool) -> None:
    """Forget the routes of a trajectory, with gates and features, unless they are of the trainer's weights (`fresh`).

    Of a fresh one, forgets the features that earlier weights have seen.
    """
    if trajectory.routes is None:
        return
    if not fresh:
        trajectory.routes = trajectory.gates = trajectory.features = None
    elif trajectory.features is not None:
        trajectory.features = trajectory.features.since(trajectory.weight_spans[-1].start)
