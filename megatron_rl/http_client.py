"""The way to ask a server over HTTP: each request has a deadline, and each failure is one line.

    async with session(timeout_s=60.0, key=key) as server:
        answer = await ask(server, "POST", f"{address}/generate", body)

    answer = ask_now("GET", f"{address}/ready", timeout_s=5.0)     # in a thread without an event loop

Proxies that the environment names are not used: servers of a run are reached as they are addressed. Whether a request is tried
again is the caller's decision, who knows what it asks for.
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
    """A server has not answered. As a text: why, in one line."""

    def __init__(self, why: str, *, late: bool = False) -> None:
        """late: the deadline has passed."""
        super().__init__(why)
        self.late = late


@dataclass(frozen=True)
class Answer:
    """An answer of any status."""

    status: int
    body: bytes

    @override
    def __str__(self) -> str:
        return f"answered {self.status}: {self.text()}"

    @property
    def refuses_key(self) -> bool:
        """The server asks for another key."""
        return self.status in (401, 403)

    def text(self) -> str:
        """The beginning of the body, in one line."""
        return " ".join(self.body.decode(errors="replace").split())[:300]

    def json(self) -> Any:
        """The body's value. Errors: ValueError, RecursionError."""
        return json.loads(self.body)


def session(*, timeout_s: float | None = None, connect_s: float | None = None, key: str = "") -> aiohttp.ClientSession:
    """Connections to servers, to be made in an event loop and closed there, as many as there are requests under way.

    timeout_s: most seconds of a request, connect_s: of connecting. key: the bearer token of each request.
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
    """The answer to a request. body: sent as JSON. timeout: in the place of the session's.

    Errors: NoAnswer, also for one of more than `most_bytes`.
    """
    limits = timeout or server.timeout  # to aiohttp None would be none
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
        text = " ".join(f"{type(error).__name__} {error}".split())  # aiohttp has several lines
        if isinstance(error, aiohttp.InvalidURL):  # it quotes the address, which may have a password in it
            text = "no address"
        raise NoAnswer(text, late=isinstance(error, TimeoutError)) from None


def ask_now(method: str, url: str, body: Mapping[str, Any] | None = None, *, timeout_s: float, key: str = "") -> Answer:
    """`ask`, waited for here. Errors: NoAnswer."""

    async def one() -> Answer:
        async with session(timeout_s=timeout_s, key=key) as server:
            return await ask(server, method, url, body)

    with closing(EventLoop("ask")) as loop:
        return loop.run(one())
