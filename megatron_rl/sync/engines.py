"""SGLang's control calls to one or many servers at once, each with a deadline, errors as one line."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
from concurrent.futures import Future, ThreadPoolExecutor

import urllib3

from megatron_rl.config.credentials import WRONG_KEY, bearer
from megatron_rl.sync.transport import WeightSyncError

_SHORT_S = 10.0


class Engines:
    """The servers that receive the weights. Calls go to all of them at the same time."""

    def __init__(self, addresses: list[str], timeout_s: float, *, key: str = ""):
        """key: of all of them; empty: they ask for none. Errors: WeightSyncError where there are none."""
        if not addresses:
            raise WeightSyncError("weight sync: no rollout server to push to (rollout.addresses is empty)")
        self.addresses = [address.rstrip("/") for address in addresses]
        self.timeout_s = timeout_s
        self._http = urllib3.PoolManager(maxsize=2, retries=False)
        self._threads = ThreadPoolExecutor(2 * len(addresses), thread_name_prefix="weight-sync")
        self._headers = {"Content-Type": "application/json"} | bearer(key)
        self._told: list[Future] = []

    def start(self, path: str, bodies: dict | list[dict] | None = None) -> list[Future]:
        """Begin a POST to every server: one body for all, or one each. Earlier calls of `tell` reach them first."""
        concurrent.futures.wait(self._told, _SHORT_S)
        each = bodies if isinstance(bodies, list) else [bodies] * len(self.addresses)
        return [
            self._threads.submit(self._request, "POST", address, path, body, self.timeout_s)
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
        """POST to every server and wait for all replies."""
        return self.wait(self.start(path, bodies))

    def get(self, path: str) -> list[dict]:
        """GET from every server, within 10 s."""
        return self.wait([self._threads.submit(self._request, "GET", a, path, None, _SHORT_S) for a in self.addresses])

    def attempt(self, path: str, body: dict | None = None) -> None:
        """POST to every server to clean up; any answer within 10 s will do."""
        self.tell(path, body)
        with contextlib.suppress(WeightSyncError):
            self.wait(self._told)

    def tell(self, path: str, body: dict | None = None) -> None:
        """POST to every server to clean up, without waiting: the next call, or close, waits."""
        concurrent.futures.wait(self._told, _SHORT_S)
        self._told = [self._threads.submit(self._request, "POST", a, path, body, _SHORT_S) for a in self.addresses]

    def _request(self, method: str, address: str, path: str, body: dict | None, timeout_s: float) -> dict:
        where = f"weight sync: {address}{path}"
        data = None if method == "GET" else json.dumps(body or {})
        limits = urllib3.Timeout(connect=min(10.0, timeout_s), read=timeout_s)
        try:
            # Less work on the processor than httpx, of which a push of a small model would notice the difference.
            reply = self._http.request(method, address + path, body=data, headers=self._headers, timeout=limits)
        except urllib3.exceptions.NewConnectionError as error:  # a subclass of a timeout
            raise WeightSyncError(f"{where}: {_reason(error)} (is the server still running?)") from None
        except urllib3.exceptions.TimeoutError:
            raise WeightSyncError(f"{where}: no answer within {timeout_s:g} s (sync.timeout_s)") from None
        except urllib3.exceptions.HTTPError as error:
            raise WeightSyncError(f"{where}: {_reason(error)} (is the server still running?)") from None
        try:
            content = json.loads(reply.data)
        except ValueError:
            content = {"message": reply.data.decode(errors="replace")[:500]}
        if reply.status in (401, 403):
            raise WeightSyncError(f"{where}: {WRONG_KEY.format(setting='rollout.api_key')}")
        if reply.status != 200 or content.get("success") is False:
            message = " ".join(str(content.get("message") or content.get("error") or content).split())
            raise WeightSyncError(f"{where}: refused ({reply.status}): {message}")
        return content

    def close(self) -> None:
        """Give up the connections, after what was told has arrived."""
        concurrent.futures.wait(self._told, _SHORT_S)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._http.clear()


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# -- owner ---------------------------------------------------------------------------------------------------------------
# Whose weights a server has: a run's versions are RUN.STEP there, with the run's own random id.


FROM_FOLDER = "default"
"""SGLang's version of the weights that it was started with."""
RELEASED = "released"
"""Version of weights that a run has left on a server which it no longer uses."""


def version_of(run: str, step: int | str) -> str:
    """The version of a run's weights of a step, as servers have it; of a run without an id the step alone."""
    return f"{run}.{step}" if run else str(step)


def owner_of(version: object) -> str:
    """The run that pushed a version, as a server says it; empty: none, or one without an id."""
    return str(version or "").rpartition(".")[0]


def as_own(version: str, run: str) -> str:
    """The step of a version of this run; other versions as they are."""
    return version.rpartition(".")[2] if owner_of(version) == run else version
