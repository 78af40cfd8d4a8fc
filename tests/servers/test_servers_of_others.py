"""Servers that others start: whose addresses are believed, and what is said of their keys."""

from __future__ import annotations

import json
import os
import socketserver
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from transformers import PreTrainedConfig

from megatron_rl.config.load import build_config
from megatron_rl.errors import UserError
from megatron_rl.models.parallel_check import read_hf_config
from megatron_rl.servers import fleet
from megatron_rl.servers.external import WrongKey, problems, release, server_of, workers_of
from megatron_rl.sync.engines import owner_of
from tools.serve import write_address


@pytest.fixture
def begin():
    """begin(kind of server, handler) -> port of such a server on this machine; the test's end ends it."""
    made = []

    def start(kind: type[socketserver.TCPServer], handler: type[socketserver.BaseRequestHandler]) -> int:
        made.append(kind(("127.0.0.1", 0), handler))
        threading.Thread(target=made[-1].serve_forever, args=(0.05,), daemon=True).start()
        return made[-1].server_address[1]

    yield start
    for server in made:
        server.shutdown()
        server.server_close()


@pytest.fixture
def says(begin):
    """says(bytes) -> address of something that sends so to everybody, whatever that is."""

    def start(content: bytes) -> str:
        class Handler(socketserver.StreamRequestHandler):
            def handle(self):
                while self.rfile.readline().strip():
                    pass
                self.wfile.write(content)

        return f"127.0.0.1:{begin(socketserver.ThreadingTCPServer, Handler)}"

    return start


@pytest.fixture
def serve(begin):
    """serve(key) -> address of a server that is ready, and tells of itself those who have its key."""

    def start(key: str = "") -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                open_to_all = self.path == "/ready" or not key
                allowed = open_to_all or self.headers["Authorization"] == f"Bearer {key}"
                self.send_response(200 if allowed else 401)
                self.end_headers()
                self.wfile.write(json.dumps({"weight_version": "default"}).encode())

            def log_message(self, *_):
                pass

        return f"http://127.0.0.1:{begin(ThreadingHTTPServer, Handler)}"

    return start


@pytest.fixture
def join(monkeypatch, tmp_path):
    """join(key in rollout.api_key) -> a fleet of the servers in tmp_path, and what it says."""
    monkeypatch.setattr(fleet, "problems", lambda *_, **__: [])
    monkeypatch.setattr(fleet, "check_servers", lambda *_, **__: None)

    def make(key: str = "", **rollout) -> tuple[fleet.Fleet, list[str]]:
        if key:
            (tmp_path / "mine").write_text(key)
            rollout["api_key"] = f"file:{tmp_path / 'mine'}"
        rollout = {"address_folder": str(tmp_path), "server": {"start_timeout_s": 0.1}} | rollout
        config, said = build_config({"model": {"path": "x"}, "rollout": rollout}), list[str]()
        return fleet.Fleet(config, PreTrainedConfig(), pushes=False, run="", say=said.append), said

    return make


def test_a_server_that_asks_for_another_key_is_named_with_the_remedy(serve, join, tmp_path):
    address = serve("another")
    (tmp_path / "a.address").write_text(address)
    servers, said = join()
    wrong = "asks for another key; set rollout.api_key to the place of that key (env:NAME or file:PATH)"
    with pytest.raises(UserError) as error:
        servers.wait_ready()
    assert f"; {address} {wrong}" in str(error.value)
    assert said == [f"rollout: {address} is not used: it {wrong}"]
    with pytest.raises(WrongKey, match="it asks for another key"):
        server_of(address, "wrong")


@pytest.mark.parametrize("ours", ["", "ours"])
def test_a_server_without_a_key_is_used_and_named(ours, serve, join):
    address = serve()
    servers, said = join(ours, address_folder=None, addresses=[address])
    servers.wait_ready()
    assert servers.addresses == [address]
    [line] = said
    assert line.startswith(
        f"rollout: {address} answers without a key, so that whoever reaches its port can change its weights"
    )


def test_a_server_with_our_key_is_used_without_a_word(serve, join, tmp_path):
    servers, said = join("ours")
    (tmp_path / "a.address").write_text(f"{serve('ours')}\n")
    servers.wait_ready()
    assert len(servers.addresses) == 1 and not said


@pytest.mark.parametrize(
    "content",
    [
        b"hello\nworld\n\n",
        b"HTTP/1.0 302 x\r\nLocation: /server_info\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n[]",
        b"HTTP/1.0 200 OK\r\n\r\nnull",
        b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 50_000,
        b'HTTP/1.0 200 OK\r\n\r\n{"workers": [{"url": 5}]',
    ],
)
def test_what_is_no_server_is_one_line(content, says):
    address = says(content)
    with pytest.raises(
        UserError, match=rf"rollout.addresses: http://{address}/server_info does not answer as SGLang"
    ) as told:
        server_of(address)
    assert "\n" not in str(told.value) and "\r" not in str(told.value)
    assert workers_of(address) is None
    release([address], "mine")


@pytest.mark.parametrize(
    "odd", [{"dtype": 5}, {"tp_size": "x"}, {"json_model_override_args": "{"}, {"context_length": []}, {}]
)
def test_a_server_that_says_odd_things_of_itself_is_refused(odd, tiny_model):
    folder = tiny_model("qwen3")
    config = build_config({"model": {"path": str(folder)}})
    model = {"architectures": 5, "weight_version": ["a.b"]}
    assert problems(odd, model, config, read_hf_config(folder), pushes=True, run="mine")
    assert owner_of(5) == owner_of(None) == owner_of("5") == "" and owner_of("a.5") == "a"


def test_an_address_is_not_written_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("mine")
    for name in ("a.partial", "a.address"):
        (tmp_path / name).symlink_to(tmp_path / "mine")
    write_address(tmp_path / "a.address", "http://host:1")
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "a.address").read_text() == "http://host:1\n" and not (tmp_path / "a.address").is_symlink()


def test_odd_address_files_are_left_out(serve, join, tmp_path):
    servers, said = join("ours")
    (tmp_path / "good.address").write_text(address := serve("ours"))
    (tmp_path / "binary.address").write_bytes(b"\xff\xfe")
    (tmp_path / "empty.address").touch()
    (tmp_path / "lines.address").write_text("http://a:1\nhttp://b:2")
    (tmp_path / "dangling.address").symlink_to(tmp_path / "nothing")
    (tmp_path / "folder.address").mkdir()
    os.mkfifo(tmp_path / "pipe.address")  # would be waited for without end
    started = time.monotonic()
    assert servers.known() == [address] and time.monotonic() - started < 60
    assert not said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
def test_another_users_server_is_not_told_the_key(serve, join, tmp_path):
    servers, said = join()
    (tmp_path / "a.address").write_text(address := serve("x"))
    os.chown(tmp_path / "a.address", 65534, 65534)
    assert servers.known() == servers.known() == []
    assert said == [
        f"rollout: {tmp_path}/a.address belongs to another user, and its server is not used: set rollout.api_key to use it"
    ]
    assert join("ours")[0].known() == [address]
