"""External servers, which may come and go. Their addresses come from rollout.addresses, routers and rollout.address_folder."""

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
"""Pause between two checks for awaited servers, in seconds."""
NEW_S = 2.0
"""Longest wait, in seconds, for an answer of a server that is not a member. The next push checks a late server again."""
SETTLE_S = 5.0
"""Seconds to wait for more servers after all were lost and one came back, because servers often come back together."""


class Fleet:
    """External servers of a run, used on rank 0. The class has the methods of `LocalServers` that `Recovery` and `Engine` call.

    The servers in use are called members. They receive the weights at every push, and the client sends requests to them. Only
    `renew` changes the members after the start, and a push follows. A new or restarted server therefore has the weights before
    its first request.
    """

    sleeps = False

    def __init__(
        self, config: Config, hf_config: PreTrainedConfig, *, pushes: bool, run: str, say: Callable[[str], None]
    ) -> None:
        """pushes: whether the run pushes weights; otherwise servers keep the weights of their model folders.

        run: id of the run. say: function that prints a message, for example when a server joins or is lost.
        """
        self.config, self.hf_config, self.pushes, self._say = config, hf_config, pushes, say
        self.run = run
        self.folder = Path(config.rollout.address_folder) if config.rollout.address_folder else None
        self.key = key_of(config.rollout.api_key, "rollout.api_key")
        self._own_key = self.folder is not None and not self.key
        """True if the API key comes from rollout.address_folder. Only address files of this user or root are then used."""
        if self.folder is not None and not self.key:
            self.key = key_of_folder(self.folder)
        self._strange: set[Path] = set()
        """Address files that belong to other users, and are not used."""
        self.addresses: list[str] = []
        """Addresses of the members."""
        self._behind: dict[str, list[str]] = {}
        """Servers of each entry of rollout.addresses: for a router, its latest list; for a server, its own address."""
        self._routers: set[str] = set()
        self._refused: dict[str, str] = {}
        """Servers that cannot do what the config needs, each with the reason."""
        self._sizes: dict[str, int] = {}
        """Tensor-parallel size of each suitable server, by address."""

    def close(self) -> None:
        """Release the servers for another run; they are not stopped, because other programs own them."""
        if self.pushes:
            release(self.addresses, self.run, self.key)

    def lost(self) -> bool:
        """Return False: only a failed request shows that an external server is lost."""
        return False

    def known(self) -> list[str]:
        """Return the addresses of all servers in rollout.addresses, behind routers and in the folder, members or not."""
        found = self._listed()
        if self.folder is not None:
            found += [address for file in sorted(self.folder.glob("*.address")) if (address := self._address_in(file))]
        return [*dict.fromkeys(found)]

    def _address_in(self, file: Path) -> str:
        """Return the address in an address file; '' if it holds no valid address or belongs to another user."""
        try:
            if not file.is_file():
                return ""
            if self._own_key and file.stat().st_uid not in (os.geteuid(), 0):
                if file not in self._strange:
                    self._say(
                        f"rollout: {file} belongs to another user, and its server is not used: set rollout.api_key to use it"
                    )
                self._strange.add(file)
                return ""
            with file.open() as opened:
                text = opened.read(MOST_BYTES).strip()
        except (OSError, UnicodeDecodeError):  # its server removes the file
            return ""
        return with_scheme(text) if text and text.isprintable() and " " not in text else ""

    def _listed(self) -> list[str]:
        """Return the servers of rollout.addresses; routers are replaced by their servers, even if a router is gone."""
        for address in self.config.rollout.addresses:
            if address in self._behind and address not in self._routers:  # a server, never a router
                continue
            workers = workers_of(address, NEW_S, key=self.key)
            if workers is not None:
                self._routers.add(address)
                self._behind[address] = workers
            else:
                self._behind.setdefault(address, [with_scheme(address)])
        return [server for address in self.config.rollout.addresses for server in self._behind[address]]

    def wait_ready(self) -> None:
        """Wait for the first members: all of rollout.addresses, and rollout.server.count (default: 1) from the folder.

        Errors: UserError if a server of rollout.addresses does not answer or cannot do what the config needs, or if no server
        appears in the folder in time.
        """
        listed = self._listed()
        check_servers(listed, self.config, self.hf_config, pushes=self.pushes, run=self.run, key=self.key)
        wanted = len(listed) + (self.config.rollout.server.count or 1 if self.folder is not None else 0)
        self._renew(max(1, wanted), self.config.rollout.server.start_timeout_s)

    def changed(self, patience_s: float = 0.0, *, trouble: bool = False) -> int:
        """Return the number of silent members and answering non-members. Wait up to `patience_s` s until it is above 0."""
        del trouble  # all servers are asked in either case
        deadline = time.monotonic() + patience_s
        while True:
            answering = self._answering()
            count = len({*answering} ^ {*self.addresses})
            if count or time.monotonic() >= deadline:
                return count
            time.sleep(PAUSE_S)

    def renew(self) -> list[str]:
        """Make all answering, suitable servers members, and wait for one if there is none. Return the addresses."""
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
            self._say(f"rollout: {len(found)} of {wanted} servers answered within {timeout_s:g} s: using these")
        self.addresses = found

    def _tell(self, before: Iterable[str], now: list[str]) -> None:
        if not before:
            return
        others = f"{len(now)} server{'s' if len(now) > 1 else ''}"
        for address in before:
            if address not in now:
                self._say(f"rollout: {address} does not answer any more: continuing with {others}")
        for address in now:
            if address not in before:
                self._say(f"rollout: {address} has joined, and gets the weights before its first request")

    def _answering(self) -> list[str]:
        """Return the known, suitable servers that are ready or wait for a push. A new server is checked once."""
        known = self.known()
        with ThreadPoolExecutor(max(1, len(known))) as threads:
            ready = [*threads.map(self._ready, known)]
        found = []
        for address, answers in zip(known, ready, strict=True):
            if not answers:
                self._refused.pop(address, None)  # the next server there may be another one
                self._sizes.pop(address, None)
                continue
            if address not in self._sizes and address not in self._refused:
                try:
                    self._look_at(address)
                except UserError:  # the server has gone since then
                    continue
            if address not in self._refused:
                found.append(address)
        return found

    def _look_at(self, address: str) -> None:
        """Check that a server can do what the config needs and has the tensor-parallel size of the members. Store the result.

        Errors: UserError if the server does not answer.
        """
        found, size = [], 1
        try:
            info, model = server_of(address, self.key)
        except WrongKey:  # the server exists
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
        if address not in self.addresses:  # for example on a lost host: a push should not wait long for it
            timeout_s = min(NEW_S, timeout_s)
        try:
            status = ask_now("GET", f"{address}/ready", timeout_s=timeout_s).status
        except NoAnswer:
            return False
        # SGLang answers 503 if a push failed, or its trainer was killed, and left the server paused: only the next push lets
        # the server continue. It also answers 503 if the model is loaded but not yet warm; such a server accepts a push too.
        return status == 200 or (self.pushes and status == 503)
