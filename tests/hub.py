"""A Hugging Face hub of a test's own: the few answers that downloads ask for, of folders on this disk."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Repo:
    """A model of the hub. gated, private: nobody here may read it; broken: the status of every answer."""

    folder: Path
    commits: dict[str, str] = field(default_factory=lambda: {"main": "a" * 40})
    gated: bool = False
    broken: int = 0


@dataclass
class Hub:
    repos: dict[str, Repo]
    port: int = 0
    asked: list[str] = field(default_factory=list)
    """Methods and paths of all requests."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        found = re.fullmatch(
            r"/(?:api/models/)?([\w.-]+/[\w.-]+?)(?:/(revision|tree|resolve)/([^/?]+)(?:/(.*))?)?", path
        )
        repo = self.repos.get(found[1]) if found else None
        if found is None or repo is None:  # as the hub tells those who have no token
            return 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, b""
        if repo.broken:
            return repo.broken, {}, b"broken"
        wanted = found[3] or "main"
        commit = repo.commits.get(wanted, wanted)
        if commit not in repo.commits.values():
            return 404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {wanted}"}, b""
        files = {file.name: file for file in sorted(repo.folder.iterdir())}
        sums = {name: hashlib.sha1(file.read_bytes()).hexdigest() for name, file in files.items()}
        if found[2] == "tree":
            listed = [
                {"type": "file", "oid": sums[name], "size": file.stat().st_size, "path": name}
                for name, file in files.items()
            ]
            return 200, {}, json.dumps(listed).encode()
        if found[2] != "resolve":
            siblings = [{"rfilename": name} for name in files]
            info = {"_id": "0", "id": found[1], "sha": commit, "siblings": siblings, "private": False, "tags": []}
            return 200, {}, json.dumps(info | {"downloads": 0, "likes": 0}).encode()
        if repo.gated:
            return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to model is restricted"}, b""
        name = found[4]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{sums[name]}"', "Accept-Ranges": "bytes"}
        return 200, headers, files[name].read_bytes()


@contextmanager
def hub(repos: dict[str, Repo]) -> Iterator[Hub]:
    """Serve the repositories on a free port until the end of the block."""
    served = Hub(repos)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            served.asked.append(f"{self.command} {self.path}")
            status, headers, body = served.answer(self.path.partition("?")[0])
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    served.port = server.server_port
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()


def cache_of(cache: Path, repo: str, model: Path, commit: str, refs: tuple[str, ...] = ("main",)) -> Path:
    """Lay a model out as huggingface_hub's cache has it: blobs, links to them in a snapshot, branches. Returns the snapshot."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    for made in (folder / "refs", folder / "blobs", snapshot):
        made.mkdir(parents=True, exist_ok=True)
    for ref in refs:
        (folder / "refs" / ref).write_text(commit)
    for file in model.iterdir():
        blob = folder / "blobs" / hashlib.sha1(file.read_bytes()).hexdigest()
        shutil.copyfile(file, blob)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob.name))
    return snapshot
