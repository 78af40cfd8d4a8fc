"""HTTP requests to servers. Each request has a deadline, and each failure has a message of one line.

    async with session(timeout_s=60.0, key=key) as server:
        answer = await ask(server, "POST", f"{address}/generate", body)

    answer = ask_now("GET", f"{address}/ready", timeout_s=5.0)     # in a thread without an event loop

Proxies set in environment variables are ignored, because a run reaches its servers directly. The caller decides whether to
repeat a request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, override

import aiohttp

from megatron_rl.credentials import bearer
from megatron_rl.event_loop import EventLoop


class NoAnswer(Exception):
    """A server did not answer. The text is the reason, in one line."""

    def __init__(self, why: str, *, late: bool = False) -> None:
        """Store the reason. late: True if the deadline has passed."""
        super().__init__(why)
        self.late = late


@dataclass(frozen=True)
class Answer:
    """A server's answer, with any HTTP status."""

    status: int
    body: bytes

    @override
    def __str__(self) -> str:
        return f"answered {self.status}: {self.text()}"

    @property
    def refuses_key(self) -> bool:
        """True if the server does not accept the API key (status 401 or 403)."""
        return self.status in (401, 403)

    def text(self) -> str:
        """Return the start of the body as one line."""
        return " ".join(self.body.decode(errors="replace").split())[:300]

    def json(self) -> Any:
        """Return the value of the JSON body. Errors: ValueError, RecursionError."""
        return json.loads(self.body)


def session(*, timeout_s: float | None = None, connect_s: float | None = None, key: str = "") -> aiohttp.ClientSession:
    """Return a client session for one event loop, with no limit on open requests. The caller closes it in the same loop.

    timeout_s: longest time in seconds for a request. connect_s: longest time in seconds to connect. key: bearer token of each
    request.
    """
    limits = aiohttp.ClientTimeout(total=timeout_s, sock_connect=connect_s)
    return aiohttp.ClientSession(timeout=limits, connector=aiohttp.TCPConnector(limit=0), headers=bearer(key))


async def ask(
    server: aiohttp.ClientSession,
    method: str,
    url: str,
    body: Mapping[str, Any] | None = None,
    *,
    most_bytes: int | None = None,
    redirects: bool = True,
    timeout: aiohttp.ClientTimeout | None = None,
) -> Answer:
    """Send a request and return the answer. body: content to send as JSON. timeout: replaces the session's timeout.

    Errors: NoAnswer, also for an answer of more than `most_bytes` bytes.
    """
    limits = timeout or server.timeout  # aiohttp would take None as "no timeout"
    try:
        async with server.request(method, url, json=body, allow_redirects=redirects, timeout=limits) as reply:
            if most_bytes is None:
                return Answer(reply.status, await reply.read())
            read = bytearray()
            async for chunk in reply.content.iter_chunked(65536):
                read += chunk
                if len(read) > most_bytes:
                    raise NoAnswer(f"answers more than {most_bytes} bytes")
            return Answer(reply.status, bytes(read))
    except (aiohttp.ClientError, OSError, ValueError) as error:  # TimeoutError is an OSError
        text = " ".join(f"{type(error).__name__} {error}".split())  # aiohttp's errors have several lines
        if isinstance(error, aiohttp.InvalidURL):  # its text quotes the address, which may contain a password
            text = "invalid address"
        raise NoAnswer(text, late=isinstance(error, TimeoutError)) from None


def ask_now(method: str, url: str, body: Mapping[str, Any] | None = None, *, timeout_s: float, key: str = "") -> Answer:
    """Call `ask` from a thread without an event loop and wait for the answer. Errors: NoAnswer."""

    async def one() -> Answer:
        async with session(timeout_s=timeout_s, key=key) as server:
            return await ask(server, method, url, body)

    with closing(EventLoop("ask")) as loop:
        return loop.run(one())
