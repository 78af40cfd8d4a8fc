"""A judge of tests: an OpenAI-compatible server, real HTTP, that says what it is told to."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Says = Callable[[str], Any]
"""The message -> the reply's text, or bytes to answer in place of it, or (status, bytes)."""


def nonce_of(message: str) -> str:
    return re.findall(r"VERDICT (\S+):", message)[-1]


def fenced(message: str, name: str = "RESPONSE") -> str:
    """The text in the fence, for one who knows the nonce."""
    nonce = nonce_of(message)
    return message.split(f"<<< {name} {nonce}\n", 1)[1].rsplit(f"\n>>> {name} {nonce}", 1)[0]


def honest(message: str) -> str:
    """The mark that the response deserves is behind its first q."""
    return f"I think so.\nVERDICT {nonce_of(message)}: {re.findall('q([0-9.]+)', fenced(message))[0]}"


def completion(text: Any, ended: str = "stop", **more: Any) -> bytes:
    return json.dumps({"choices": [{"message": {"content": text, **more}, "finish_reason": ended}]}).encode()


class Scripted:
    """The server. says: what it does; seen: messages, of which several may be answered at once."""

    def __init__(self, says: Says = honest) -> None:
        self.says, self.seen, self.headers, self.bodies = says, [], [], []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                message = body["messages"][-1]["content"]
                outer.seen.append(message), outer.bodies.append(body), outer.headers.append(dict(self.headers))
                found = outer.says(message) if "VERDICT" in message else "OK"
                found = (200, completion(found)) if isinstance(found, str) else found
                status, content = found if isinstance(found, tuple) else (200, found)
                try:
                    self.send_response(status)
                    self.send_header("Location", "/elsewhere")
                    self.end_headers()
                    self.wfile.write(content)
                except OSError:  # it was not waited for
                    pass

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def die(self) -> None:
        """Nobody listens any more."""
        if self._thread.is_alive():
            self.server.shutdown()
            self._thread.join(20)
            self.server.server_close()
