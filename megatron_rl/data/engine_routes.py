"""Decoding of the routed experts and router features in SGLang's replies into the tables that a trajectory carries.

How SGLang 0.5.23 builds a table of routes, as we observed: the engine keeps one row of experts per slot of its key-value cache,
and reads the rows when a request ends. A weight sync retracts all requests (`/pause_generation` with mode retract), also
requests in the middle of a chunked prefill, and flushes the prefix cache. The engine then prefills a retracted request again
under the new weights, with its prompt and all tokens so far. This replaces the rows of earlier tokens.

So all routes of a table come from the weights that sampled the last response token. Log-probs of earlier tokens, however, stay
those of the weights that sampled these tokens. Router features are recorded when a token is sampled, and do not change either.
If an engine changes weights in another way (pause mode in_place, no flush), its tables mix rows of several weights, and replies
do not tell which.
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
"""Integer types in replies; the last one is only for models with more than 256 experts. If the engine serves a wrong model, a
table of four-byte integers may have the length that is right for shorter integers. Read as shorter integers, this table's zero
bytes name an expert twice. `decode` therefore refuses the table."""


@dataclass(frozen=True)
class EngineRoutes:
    """Layout of the engine's table of routes for a model. `models.shape.engine_routes` creates it."""

    layers: int
    """Number of all layers, because the engine's table has entries for dense layers too."""
    moe_layers: tuple[int, ...]
    """Indices of the layers with experts. A trajectory keeps only these."""
    experts: int
    topk: int
    gates: bool = False
    """True if replies also contain the gates (weights of the experts)."""

    def __post_init__(self) -> None:
        """Check the number of experts. Errors: UserError if expert ids are too large to share an integer with gates."""
        if self.gates and self.experts > MOST_EXPERTS:
            raise UserError(
                f"config: routing.replay_gates and rollout.gates support at most {MOST_EXPERTS} experts, and the model has"
                f" {self.experts}; set both to false"
            )

    @property
    def shape(self) -> RouteShape:
        """Shape of the table of routes that a trajectory stores."""
        return RouteShape(self.moe_layers, self.experts, self.topk)

    @property
    def bytes_per_token(self) -> int:
        """Largest number of bytes that a reply needs for the routes of one token."""
        return self.layers * self.topk * 4 * 4 // 3

    def decode(self, encoded: str, tokens: int) -> np.ndarray:
        """Decode the base64 text of a table [tokens, layers, topk] to [tokens, moe_layers, topk].

        The result is uint8, or int16 above 255 experts. SGLang's own integers have 4 bytes; servers with our plugin send 1 or 2
        bytes (its routes.py). Errors: UserError if the text is no table of this model's routes, or if it also contains gates.
        """
        return self._ids(self._raw(encoded, tokens, WIRE_DTYPES if self.experts > 256 else WIRE_DTYPES[:2]))

    def decode_with_gates(self, encoded: str, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Decode a table with gates, which the plugin's gates.py sends. Return (expert ids, gates as float32).

        Errors: UserError as in `decode`, and if the table contains no gates.
        """
        raw = self._raw(encoded, tokens, WIRE_DTYPES)
        words = raw.view("<u4") if raw.dtype.itemsize == 4 else raw.astype("<u4")
        gates = (words >> ID_BITS).astype(np.float32) / np.float32(STEPS)
        if not gates.any(-1).all():  # at least one gate of a token is above 0
            raise UserError(
                "routed_experts from SGLang have no gates: start the server through tools/serve.py with this config, or set"
                " routing.replay_gates and rollout.gates to false"
            )
        return self._ids((words & MOST_EXPERTS - 1).view("<i4")), gates

    def _raw(self, encoded: str, tokens: int, known: Sequence[np.dtype]) -> np.ndarray:
        """Decode the table to [tokens, moe_layers, topk]. known: possible integer types; the table's length decides which."""
        try:
            raw = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError, TypeError) as error:
            raise UserError(f"routed_experts from SGLang is not base64 ({error}): was the reply cut off?") from None
        ids = tokens * self.layers * self.topk
        dtype = next((dtype for dtype in known if len(raw) == ids * dtype.itemsize), None)
        if dtype is None:
            raise UserError(
                f"routed_experts from SGLang has {len(raw)} bytes, but {tokens} tokens x {self.layers} layers x"
                f" {self.topk} experts are {' or '.join(str(ids * dtype.itemsize) for dtype in known)}: is the model another"
                " one, or was the reply cut off?"
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
    """Sizes of the router features (inputs and logits of the routers) that the engine exports for each response token."""

    moe_layers: int
    hidden: int
    """Width of the hidden states; 0 if only logits are exported."""
    experts: int
    dtype: torch.dtype
    """Data type of the hidden states in the engine. Logits are fp32."""

    @property
    def logits_alone(self) -> EngineFeatures:
        """Sizes of the features without hidden states. Logits are enough to compare routers if no predictor is trained."""
        return replace(self, hidden=0)

    @property
    def bytes_per_token(self) -> int:
        """Number of bytes that a reply needs for the features of one token."""
        return self.moe_layers * (self.hidden * self.dtype.itemsize + self.experts * 4) * 4 // 3

    def decode(self, entries: Sequence[str | None]) -> RouterFeatures:
        """Decode one entry per response token: None, or base64 of h [moe_layers, hidden] and then z [moe_layers, experts].

        h are the routers' inputs and z their logits. Errors: UserError if an entry is not base64 or has another size.
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
        """Check that features fit this model and a response of `tokens` tokens. Errors: ValueError with the reason."""
        count, positions = len(features.positions), features.positions
        for name, width in (("hidden", self.hidden), ("logits", self.experts)):
            shape, wanted = tuple(getattr(features, name).shape), (count, self.moe_layers, width)
            if shape != wanted and not (name == "hidden" and shape == (*wanted[:2], 0)):
                raise ValueError(f"router features: {name} is {list(shape)}, the model wants {list(wanted)}")
        if count and not (int(positions.min()) >= 0 and int(positions.max()) < tokens and (positions.diff() > 0).all()):
            raise ValueError(f"router features: positions do not ascend within the {tokens} response tokens")


def _tensor(raw: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(raw, dtype=dtype).view(shape) if raw else torch.empty(shape, dtype=dtype)


def check_gates(gates: np.ndarray | None, routes: np.ndarray) -> None:
    """Check that recorded gates fit the recorded routes. Errors: ValueError with the reason."""
    if gates is None:
        raise ValueError(
            "it has routes without gates: record it again with rollout.gates: true, or set routing.replay_gates and"
            " rollout.gates to false"
        )
    if gates.shape != routes.shape or gates.dtype != np.float32:
        raise ValueError(f"gates are {gates.dtype} {list(gates.shape)}, the routes need float32 {list(routes.shape)}")
    if not ((gates >= 0) & (gates <= 1)).all():
        raise ValueError("gates are not between 0 and 1")
    if (gates.any(-1) & ~has_route(torch.from_numpy(routes)).numpy()).any():
        raise ValueError("a token without a route has gates")


def join_routes(turns: Sequence[tuple[np.ndarray, str]], version: str, shape: RouteShape) -> np.ndarray:
    """Join the tables of a conversation's turns, each with new rows only, to one table [sum of rows, moe_layers, topk].

    turns: (table, version of the weights of the turn's last token). version: the weights whose routes are wanted. A turn with
    other weights, from before a weight sync, gets sentinels instead of its routes.

    A turn's request sets routes_start to the number of rows in the earlier tables, and the server sends only the rows after
    them. This number is one less than the number of tokens in the conversation so far: the last token of a response gets its
    route only as an input of the next turn. After a known weight sync, the request sets routes_start to 0, and the turn's table
    is used alone (`Conversation`). In this table, the rows for earlier turns are the routes under which the later turns were
    sampled. Log-probs of earlier turns still belong to the weights that sampled them, as in a response that a weight sync
    interrupted (see the module's docstring).
    """
    return np.concatenate([table if found == version else shape.empty(len(table)) for table, found in turns])


def join_gates(turns: Sequence[tuple[np.ndarray, str]], version: str) -> np.ndarray:
    """Join the gates of a conversation's turns as `join_routes` joins routes. Gates that are not known are 0."""
    return np.concatenate([gates if found == version else np.zeros_like(gates) for gates, found in turns])


def sampled_by(trajectory: Trajectory, version: str) -> bool:
    """Return True if the last response token, and so the whole table, is known to come from weights `version`.

    The module's docstring explains why the last token is enough. The result is False for a response without tokens.
    """
    last = trajectory.weight_spans[-1] if trajectory.weight_spans else None
    return last is not None and last.end > last.start and last.version == version


def drop_stale_routes(trajectory: Trajectory, *, fresh: bool) -> None:
    """Delete a trajectory's routes, gates and features if they are not from the trainer's current weights.

    fresh: the routes and gates are from the current weights. In this case, delete only the features from earlier weights.
    """
    if trajectory.routes is None:
        return
    if not fresh:
        trajectory.routes = trajectory.gates = trajectory.features = None
    elif trajectory.features is not None:
        trajectory.features = trajectory.features.since(trajectory.weight_spans[-1].start)
