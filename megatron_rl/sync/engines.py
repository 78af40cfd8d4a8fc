"""Control calls to one or several SGLang servers at the same time. Each call has a deadline and a one-line error message."""

from __future__ import annotations

import concurrent.futures
import contextlib
from concurrent.futures import Future

import aiohttp

from megatron_rl.credentials import WRONG_KEY
from megatron_rl.event_loop import EventLoop
from megatron_rl.http_client import NoAnswer, ask, session
from megatron_rl.sync.transport import WeightSyncError

_SHORT_S = 10.0


class Engines:
    """The rollout servers that receive the weights. Calls go to all of them at the same time."""

    def __init__(self, addresses: list[str], timeout_s: float, *, key: str = ""):
        """key: API key of all servers; empty if they need none. Errors: WeightSyncError if there are no servers."""
        if not addresses:
            raise WeightSyncError("weight sync: no rollout server to push to (rollout.addresses is empty)")
        self.addresses = [address.rstrip("/") for address in addresses]
        self.timeout_s = timeout_s
        self._loop = EventLoop("weight-sync")
        self._http = self._loop.run(_session(key))
        self._told: list[Future] = []

    def start(self, path: str, bodies: dict | list[dict] | None = None) -> list[Future]:
        """Start a POST to every server, after earlier calls of `tell` have ended. bodies: one for all servers, or one each."""
        concurrent.futures.wait(self._told, _SHORT_S)
        each = bodies if isinstance(bodies, list) else [bodies] * len(self.addresses)
        return [
            self._loop.start(self._request("POST", address, path, body, self.timeout_s))
            for address, body in zip(self.addresses, each, strict=True)
        ]

    def wait(self, calls: list[Future]) -> list[dict]:
        """Wait for the replies. Errors: WeightSyncError as soon as one call has failed, without waiting for the others."""
        done, pending = concurrent.futures.wait(calls, self.timeout_s, concurrent.futures.FIRST_EXCEPTION)
        for call in done:
            call.result()
        if pending:
            raise WeightSyncError(f"weight sync: no answer from SGLang within {self.timeout_s:g} s (sync.timeout_s)")
        return [call.result() for call in calls]

    def call(self, path: str, bodies: dict | list[dict] | None = None) -> list[dict]:
        """Send a POST to every server and wait for all replies."""
        return self.wait(self.start(path, bodies))

    def get(self, path: str) -> list[dict]:
        """Send a GET to every server and return the replies. Each server has 10 s to answer."""
        return self.wait([self._loop.start(self._request("GET", a, path, None, _SHORT_S)) for a in self.addresses])

    def attempt(self, path: str, body: dict | None = None) -> None:
        """Send a clean-up POST to every server, and wait up to 10 s for the answers. Error answers are ignored."""
        self.tell(path, body)
        with contextlib.suppress(WeightSyncError):
            self.wait(self._told)

    def tell(self, path: str, body: dict | None = None) -> None:
        """Send a clean-up POST to every server without waiting. The next call, or `close`, waits for the answers."""
        concurrent.futures.wait(self._told, _SHORT_S)
        self._told = [self._loop.start(self._request("POST", a, path, body, _SHORT_S)) for a in self.addresses]

    async def _request(self, method: str, address: str, path: str, body: dict | None, timeout_s: float) -> dict:
        where = f"weight sync: {address}{path}"
        limits = aiohttp.ClientTimeout(total=None, sock_connect=min(10.0, timeout_s), sock_read=timeout_s)
        data = None if method == "GET" else body or {}
        try:
            reply = await ask(self._http, method, address + path, data, redirects=False, timeout=limits)
        except NoAnswer as error:
            if error.late:
                raise WeightSyncError(f"{where}: no answer within {timeout_s:g} s (sync.timeout_s)") from None
            raise WeightSyncError(f"{where}: {error} (is the server still running?)") from None
        try:
            content = reply.json()
        except ValueError:
            content = {"message": reply.body.decode(errors="replace")[:500]}
        if reply.refuses_key:
            raise WeightSyncError(f"{where}: {WRONG_KEY.format(setting='rollout.api_key')}")
        if reply.status != 200 or content.get("success") is False:
            message = " ".join(str(content.get("message") or content.get("error") or content).split())
            raise WeightSyncError(f"{where}: refused ({reply.status}): {message}")
        return content

    def close(self) -> None:
        """Close the connections after the calls of `tell` have ended."""
        concurrent.futures.wait(self._told, _SHORT_S)
        self._loop.run(self._http.close())
        self._loop.close()


async def _session(key: str) -> aiohttp.ClientSession:
    return session(key=key)


# -- owner ---------------------------------------------------------------------------------------------------------------
# The owner of a server's weights: on servers, versions have the form RUN.STEP, with the random id of the run.


FROM_FOLDER = "default"
"""SGLang's version name for the weights with which the server was started."""
RELEASED = "released"
"""Version name of the weights on a server that a run has stopped using."""


def version_of(run: str, step: int | str) -> str:
    """Return the version name RUN.STEP of a run's weights, as servers store it. A run without an id has only the step."""
    return f"{run}.{step}" if run else str(step)


def owner_of(version: object) -> str:
    """Return the id of the run that pushed the weights of this version; '' if no run pushed them, or the run has no id."""
    return str(version or "").rpartition(".")[0]


def as_own(version: str, run: str) -> str:
    """Return only the step if the version belongs to this run, else the whole version."""
    return version.rpartition(".")[2] if owner_of(version) == run else version
