"""Servers that others start, and that come and go: of rollout.addresses, routers there, and rollout.address_folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from transformers import PreTrainedConfig

from megatron_rl.config import Config
from megatron_rl.credentials import MOST_BYTES, WRONG_KEY, key_of, key_of_folder
from megatron_rl.errors import UserError
from megatron_rl.http_client import NoAnswer, ask_now
from megatron_rl.servers.client import with_scheme
from megatron_rl.servers.external import (
    WrongKey,
    asks_for_no_key,
    check_servers,
    problems,
    release,
    server_of,
    workers_of,
)

PAUSE_S = 0.5
"""Between two looks at servers that are waited for."""
NEW_S = 2.0
"""Longest wait for a sign of life of a server that is no member: one that is late is looked at again at the next push."""
SETTLE_S = 5.0
"""Servers that come back after all were lost often come together: so long is waited for the others of them."""


class Fleet:
    """The external servers of a run, of rank 0. It has the methods of `ChildServers` that `Recovery` and `Engine` call.

    A member is sent the weights at every push and is asked by the client. Members change in `renew` alone, after which the
    weights are pushed: a server that is new, or was started again, has them before its first request.
    """

    sleeps = False

    def __init__(
        self, config: Config, hf_config: PreTrainedConfig, *, pushes: bool, run: str, say: Callable[[str], None]
    ) -> None:
        """pushes: weights go there; else they answer with those that they have. run: its id. say: told who comes and goes."""
        self.config, self.hf_config, self.pushes, self._say = config, hf_config, pushes, say
        self.run = run
        self.folder = Path(config.rollout.address_folder) if config.rollout.address_folder else None
        self.key = key_of(config.rollout.api_key, "rollout.api_key")
        self._own_key = self.folder is not None and not self.key
        """It is the folder's, so its servers are this user's."""
        if self.folder is not None and not self.key:
            self.key = key_of_folder(self.folder)
        self._strange: set[Path] = set()
        """Address files of other users."""
        self.addresses: list[str] = []
        """Addresses of the members."""
        self._behind: dict[str, list[str]] = {}
        """Servers of each of rollout.addresses: what a router has said last, or the address itself."""
        self._routers: set[str] = set()
        self._refused: dict[str, str] = {}
        """Servers that cannot do what the config asks, and why."""
        self._sizes: dict[str, int] = {}
        """GPUs of each server that can."""

    def close(self) -> None:
        """They are others' to end, and another run may use them now."""
        if self.pushes:
            release(self.addresses, self.run, self.key)

    def lost(self) -> bool:
        """Never known without asking them."""
        return False

    def known(self) -> list[str]:
        """All addresses that somebody names, members or not."""
        found = self._listed()
        if self.folder is not None:
            found += [address for file in sorted(self.folder.glob("*.address")) if (address := self._address_in(file))]
        return [*dict.fromkeys(found)]

    def _address_in(self, file: Path) -> str:
        """Empty where it has none, or is not to be believed."""
        try:
            if not file.is_file():
                return ""
            if self._own_key and file.stat().st_uid not in (os.geteuid(), 0):
                if file not in self._strange:
                    self._say(
                        f"rollout: {file} is another user's, and its server is not used: set rollout.api_key to use it"
                    )
                self._strange.add(file)
                return ""
            with file.open() as opened:
                text = opened.read(MOST_BYTES).strip()
        except (OSError, UnicodeDecodeError):  # its server takes it away
            return ""
        return with_scheme(text) if text and text.isprintable() and " " not in text else ""

    def _listed(self) -> list[str]:
        """Servers of rollout.addresses, and behind the routers there. A router that is gone leaves its servers."""
        for address in self.config.rollout.addresses:
            if address in self._behind and address not in self._routers:  # a server, which stays one
                continue
            workers = workers_of(address, NEW_S, key=self.key)
            if workers is not None:
                self._routers.add(address)
                self._behind[address] = workers
            else:
                self._behind.setdefault(address, [with_scheme(address)])
        return [server for address in self.config.rollout.addresses for server in self._behind[address]]

    def wait_ready(self) -> None:
        """The first members: all of rollout.addresses, and as many from the folder as rollout.server.count says, or one.

        Errors: UserError for one of rollout.addresses that does not answer or cannot do what the config asks, and where none
        is in the folder in time.
        """
        listed = self._listed()
        check_servers(listed, self.config, self.hf_config, pushes=self.pushes, run=self.run, key=self.key)
        wanted = len(listed) + (self.config.rollout.server.count or 1 if self.folder is not None else 0)
        self._renew(max(1, wanted), self.config.rollout.server.start_timeout_s)

    def changed(self, patience_s: float = 0.0, *, trouble: bool = False) -> int:
        """How many members do not answer, and how many others do; where there is none, those within the time."""
        del trouble  # all are asked, whether there is any or not
        deadline = time.monotonic() + patience_s
        while True:
            answering = self._answering()
            count = len({*answering} ^ {*self.addresses})
            if count or time.monotonic() >= deadline:
                return count
            time.sleep(PAUSE_S)

    def renew(self) -> list[str]:
        """Make members of all that answer and can do what the config asks; waits for one where there is none."""
        self._renew(1, self.config.rollout.server.start_timeout_s, settle_s=SETTLE_S)
        return self.addresses

    def _renew(self, wanted: int, timeout_s: float, settle_s: float = 0.0) -> None:
        start = time.monotonic()
        came_s, waited = None, False
        while True:
            found = self._answering()
            if found and came_s is None:
                came_s = time.monotonic()
            waited_s = time.monotonic() - start
            settled = came_s is not None and (not waited or time.monotonic() - came_s >= settle_s)
            if (len(found) >= wanted and settled) or waited_s >= timeout_s:
                break
            waited = True
            time.sleep(PAUSE_S)
        if not found:
            where = f"rollout.address_folder {self.folder}" if self.folder is not None else "rollout.addresses"
            known = [*self.known()]
            named = f" ({', '.join(known)})" if known else " (which names none)"
            why = "".join(f"; {address} {problem}" for address, problem in self._refused.items())
            raise UserError(
                f"rollout: no server of {where}{named} answered within {timeout_s:g} s"
                f" (rollout.server.start_timeout_s){why}"
            )
        self._tell(self.addresses, found)
        if len(found) < wanted:
            self._say(f"rollout: {len(found)} of {wanted} servers answered within {timeout_s:g} s: going on with these")
        self.addresses = found

    def _tell(self, before: Iterable[str], now: list[str]) -> None:
        if not before:
            return
        others = f"{len(now)} server{'s' if len(now) > 1 else ''}"
        for address in before:
            if address not in now:
                self._say(f"rollout: {address} does not answer any more: going on with {others}")
        for address in now:
            if address not in before:
                self._say(f"rollout: {address} is here, and gets the weights before its first request")

    def _answering(self) -> list[str]:
        """Known servers that are ready, or wait for a push, and can do what the config asks. A new one is looked at once."""
        known = self.known()
        with ThreadPoolExecutor(max(1, len(known))) as threads:
            ready = [*threads.map(self._ready, known)]
        found = []
        for address, answers in zip(known, ready, strict=True):
            if not answers:
                self._refused.pop(address, None)  # what starts there next may be another one
                self._sizes.pop(address, None)
                continue
            if address not in self._sizes and address not in self._refused:
                try:
                    self._look_at(address)
                except UserError:  # it has gone since
                    continue
            if address not in self._refused:
                found.append(address)
        return found

    def _look_at(self, address: str) -> None:
        """Check that a server can do what the config asks, and is as large as the others.

        Errors: UserError where it is gone.
        """
        found, size = [], 1
        try:
            info, model = server_of(address, self.key)
        except WrongKey:  # it is there
            found.append(WRONG_KEY.format(setting="rollout.api_key").removeprefix("it "))
        else:
            found += problems(info, model, self.config, self.hf_config, pushes=self.pushes, run=self.run)
            size = told if isinstance(told := info.get("tp_size"), int) else 1
        others = {self._sizes[member] for member in self.addresses if member in self._sizes}
        if self.pushes and not found and others and size not in others:
            found.append(f"has --tensor-parallel-size {size}, and the other servers {min(others)}")
        if not found:
            self._sizes[address] = size
            if not self.key or asks_for_no_key(address):
                self._say(
                    f"rollout: {address} answers without a key, so that whoever reaches its port can change its weights: start"
                    " it through tools/serve.py, or with --api-key and --admin-api-key and rollout.api_key"
                )
            return
        self._refused[address] = "; it ".join(found)
        self._say(f"rollout: {address} is not used: it {self._refused[address]}")

    def _ready(self, address: str) -> bool:
        timeout_s = self.config.rollout.health_check_timeout_s
        if address not in self.addresses:  # of a lost host, say, for which no push should wait long
            timeout_s = min(NEW_S, timeout_s)
        try:
            status = ask_now("GET", f"{address}/ready", timeout_s=timeout_s).status
        except NoAnswer:
            return False
        # SGLang says 503 where a push that failed, or whose trainer was killed, left it paused: only the next push lets it
        # go on. It says the same where the model is loaded and not yet warm, which takes a push too.
        return status == 200 or (self.pushes and status == 503)
