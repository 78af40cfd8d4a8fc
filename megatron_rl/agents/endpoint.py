"""The recording endpoint: an OpenAI-compatible server in front of the policy, with one session per sample.

Each session has its own base URL, http://127.0.0.1:PORT/SESSION/v1, for the plain `openai` client and everything built on it.
The endpoint records all samples (recorder.py). Rewards are posted to another URL, which contains a secret.
"""

from __future__ import annotations

import json
import logging
import reprlib
import secrets
from typing import Any

from aiohttp import web

from megatron_rl.agents.recorder import BadRequest, Session, chunks
from megatron_rl.errors import UserError
from megatron_rl.tasks.openai_messages import loads

log = logging.getLogger(__name__)

IGNORED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "tool_choice",
    "logit_bias",
)
IGNORED += ("response_format", "logprobs", "top_logprobs")
"""Request parameters that are ignored: the policy is sampled according to rollout.sampling."""
MOST_BYTES = 16 * 2**20
"""Largest size of a request in bytes. A million tokens of text fit, even if JSON escapes each character (six bytes)."""
MOST_REWARD = 1e9
"""Largest magnitude of a reward, so that squares and sums of rewards are far from the limits of fp32."""


class Endpoint:
    """HTTP server with one session per sample. The endpoint belongs to one event loop."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Create it without listening. port: 0 for any free port."""
        self.sessions: dict[str, Session] = {}
        self._host, self.port = host, port
        self._runner: web.AppRunner | None = None
        self._told: set[str] = set()

    async def start(self) -> None:
        """Start to listen for requests. Errors: UserError if the port is taken."""
        app = web.Application(client_max_size=MOST_BYTES)
        app.router.add_post("/{session}/v1/chat/completions", self._chat)
        app.router.add_get("/{session}/v1/models", self._models)
        app.router.add_post("/{session}/reward/{key}", self._reward)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self.port, backlog=1024).start()
        except OSError as error:
            raise UserError(f"agent endpoint: port {self.port} of {self._host}: {error.strerror}") from None
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    def url(self, session: str) -> str:
        """Return the base URL of a session."""
        return f"http://{self._host}:{self.port}/{session}/v1"

    def reward_url(self, session: str) -> str:
        """Return the URL for posting the session's reward. Anybody who knows the URL may post."""
        return f"http://{self._host}:{self.port}/{session}/reward/{self.sessions[session].reward_key}"

    def _session(self, request: web.Request) -> Session:
        found = self.sessions.get(request.match_info["session"])
        if found is None:
            raise web.HTTPNotFound(text=_error("there is no such session"), content_type="application/json")
        return found

    async def _body(self, request: web.Request) -> dict[str, Any]:
        try:
            raw = await request.read()
            body = loads(raw.decode(json.detect_encoding(raw), "surrogatepass"))
        except (ValueError, web.RequestPayloadError) as error:
            raise BadRequest(f"the request is not JSON ({' '.join(str(error).split())})") from None
        except web.HTTPRequestEntityTooLarge:
            raise web.HTTPRequestEntityTooLarge(
                MOST_BYTES, text=_error(f"a request has at most {MOST_BYTES} bytes"), content_type="application/json"
            ) from None
        if not isinstance(body, dict):
            raise BadRequest("the request is not a JSON object")
        return body

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        return web.json_response(
            {"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "megatron_rl"}]}
        )

    async def _reward(self, request: web.Request) -> web.Response:
        """Set the session's reward from {"reward": number} or {"reward": {part: number}}."""
        session = self._session(request)
        if not secrets.compare_digest(request.match_info["key"].encode(errors="replace"), session.reward_key.encode()):
            raise web.HTTPForbidden(
                text=_error("this is not the session's reward URL"), content_type="application/json"
            )
        try:
            parts = reward_parts((await self._body(request)).get("reward"))
            if unknown := sorted(parts.keys() - {*session.parts}):
                raise ValueError(f"the task has no reward part {unknown[0]!r:.40}: it has {', '.join(session.parts)}")
            session.reward = parts
        except (BadRequest, ValueError) as error:
            return web.json_response(text=_error(str(error)), status=400)
        return web.json_response({})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        try:
            body = await self._body(request)
            self._tell(body)
            completion = await session.complete(body)
        except BadRequest as error:
            return web.json_response(text=_error(str(error)), status=400)
        except UserError as error:
            return web.json_response(text=_error(str(error), "server_error"), status=500)
        if not body.get("stream"):
            return web.json_response(completion)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for chunk in chunks(completion, usage=bool((body.get("stream_options") or {}).get("include_usage"))):
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _tell(self, body: dict[str, Any]) -> None:
        """Warn once about each parameter of a request that is ignored."""
        for name in IGNORED:
            if body.get(name) is not None and name not in self._told:
                self._told.add(name)
                log.warning(
                    f"agent endpoint: {name} = {reprlib.repr(body[name])} is ignored: the policy is sampled by"
                    " rollout.sampling"
                )


def reward_parts(value: Any) -> dict[str, float]:
    """Return the reward parts in an agent's answer; a plain number is the part `correct`. Errors: ValueError."""
    parts = value if isinstance(value, dict) else {"correct": value}
    try:
        if any(isinstance(part, str | bytes) for part in parts.values()):
            raise TypeError
        found = {str(name): float(part) for name, part in parts.items()}
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"a reward is a number, or numbers by name, not {reprlib.repr(value)}") from None
    if not all(-MOST_REWARD <= part <= MOST_REWARD for part in found.values()):  # also refuses NaN
        raise ValueError(f"a reward is between {-MOST_REWARD:g} and {MOST_REWARD:g}, not {reprlib.repr(value)}")
    return found


def _error(message: str, kind: str = "invalid_request_error") -> str:
    code = "context_length_exceeded" if message.startswith("context_length_exceeded") else None
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
