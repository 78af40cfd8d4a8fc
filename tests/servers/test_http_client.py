"""The one way to ask a server: deadlines, limits, secrets and proxies, against servers of the standard library."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megatron_rl.http_client import Answer, NoAnswer, ask, ask_now, session
from megatron_rl.servers.server import reserve_port

SLOW_S = 60.0


class Server(ThreadingHTTPServer):
    """Its handlers end when the test is `over`."""

    def __init__(self, away: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.over, self.away = threading.Event(), away


class Handler(BaseHTTPRequestHandler):
    """Answers with what it was asked; /away leads to `server.away`, /slow waits until the test is over, /large is large."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]: it serves these alone

    def do_GET(self) -> None:
        asked = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        if self.path == "/slow":
            self.server.over.wait(SLOW_S)
        body = json.dumps({"method": self.command, "body": asked, "key": self.headers.get("Authorization")}).encode()
        body += b" " * (100_000 if self.path == "/large" else 0)
        self.send_response({"/away": 302, "/refused": 403, "/busy": 503}.get(self.path, 200))
        if self.path == "/away":
            self.send_header("Location", self.server.away)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """serve(away="") -> address of a new server."""
    servers: list[Server] = []

    def make(away: str = "") -> str:
        server = Server(away)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield make
    for server in servers:
        server.over.set()
        server.shutdown()
        server.server_close()


def ask_once(method: str, url: str, *, timeout_s: float = 20.0, key: str = "", **options) -> Answer:
    async def one() -> Answer:
        async with session(timeout_s=timeout_s, key=key) as server:
            return await ask(server, method, url, **options)

    return asyncio.run(one())


def test_an_answer_of_any_status(serve):
    address = serve()
    answer = ask_now("POST", f"{address}/generate", {"n": 3}, timeout_s=20.0, key="k3")
    assert answer.status == 200
    assert answer.json() == {"method": "POST", "body": '{"n": 3}', "key": "Bearer k3"}
    assert ask_now("GET", address, timeout_s=20.0).json() == {"method": "GET", "body": "", "key": None}
    busy, refused = (ask_now("GET", f"{address}/{path}", timeout_s=20.0) for path in ("busy", "refused"))
    assert (busy.status, busy.refuses_key, refused.refuses_key) == (503, False, True)
    assert str(busy).startswith('answered 503: {"method"')


def test_it_is_asked_from_a_thread_that_runs_a_loop_too(serve):
    address = serve()

    async def inside() -> int:
        return ask_now("GET", address, timeout_s=20.0).status

    threads = threading.active_count()
    assert asyncio.run(inside()) == 200
    assert not [thread for thread in threading.enumerate() if thread.name == "ask"], f"{threads} before"


def test_proxies_of_the_environment_are_not_used(serve, monkeypatch):
    with reserve_port() as nobody:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{nobody.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        address = serve()
        assert ask_now("GET", address, timeout_s=20.0).status == 200
        assert ask_once("GET", address).status == 200


def test_one_that_does_not_answer_is_late(serve):
    with pytest.raises(NoAnswer) as error:
        ask_now("GET", f"{serve()}/slow", timeout_s=0.2)
    assert error.value.late and "\n" not in str(error.value)


def test_why_there_is_no_answer_is_one_line():
    with reserve_port() as nobody:
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(NoAnswer, match=rf"ClientConnectorError .*{address[7:-6]}") as error:
            ask_now("GET", address, timeout_s=20.0)
    assert not error.value.late and "\n" not in str(error.value)


@pytest.mark.parametrize("address", ["http://user:hunter2@host:port", "http://", "http://[::1", "hunter2"])
def test_no_address_is_quoted(address):
    with pytest.raises(NoAnswer) as error:
        ask_now("GET", address, timeout_s=20.0)
    assert "hunter2" not in str(error.value)


def test_an_answer_that_is_too_large(serve):
    address = serve()
    with pytest.raises(NoAnswer, match="answers more than 99999 bytes"):
        ask_once("GET", f"{address}/large", most_bytes=99_999)
    assert len(ask_once("GET", f"{address}/large", most_bytes=200_000).body) > 100_000


def test_a_key_is_not_carried_to_another_server(serve):
    address = serve(away=serve())
    assert ask_once("GET", f"{address}/away", key="k3").json()["key"] is None
    assert ask_once("GET", f"{address}/away", key="k3", redirects=False).status == 302
