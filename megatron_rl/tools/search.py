"""Search in a local folder of documents as a tool. Results are ranked by BM25 (SQLite's full-text index)."""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, override

from megatron_rl.tools.tool import Tool, ToolLost, in_thread

SUFFIXES = (".txt", ".md", ".rst", ".html")
PASSAGE = 1000
"""Approximate number of characters in a passage. A passage ends at the end of a paragraph."""


def passages(text: str) -> Iterator[str]:
    """Cut a text into pieces of about PASSAGE characters, between paragraphs if possible."""
    piece = ""
    for paragraph in re.split(r"\n\s*\n", text):
        for start in range(0, len(paragraph), PASSAGE):
            part = paragraph[start : start + PASSAGE]
            if piece and len(piece) + len(part) > PASSAGE:
                yield piece
                piece = ""
            piece = f"{piece}\n\n{part}" if piece else part
    if piece.strip():
        yield piece


class Search(Tool):
    """Tool `search`: returns the passages in a folder that match a query best."""

    name = "search"
    description = "Searches a folder of documents and returns the passages that fit the query best."
    parameters: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "words to look for"}},
        "required": ["query"],
        "additionalProperties": False,
    }

    def __init__(self, folder: str, passages: int = 3) -> None:
        """folder: folder whose text files are read once, at the start; passages: number of passages in an answer."""
        self.folder, self.count = Path(folder), passages
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        self._lock = threading.Lock()

    @override
    async def open(self) -> None:
        await in_thread(self._read)

    def _read(self) -> None:
        files = (
            sorted(path for path in self.folder.rglob("*") if path.suffix in SUFFIXES) if self.folder.is_dir() else []
        )
        if not files:
            raise ToolLost(
                f"{self.folder} is not a folder with documents ({', '.join(SUFFIXES)}); set tool_options.search.folder"
            )
        with self._lock:
            self._index.execute("CREATE VIRTUAL TABLE passages USING fts5(path, text, tokenize='porter unicode61')")
            for file in files:
                rows = (
                    (str(file.relative_to(self.folder)), part) for part in passages(file.read_text(errors="replace"))
                )
                self._index.executemany("INSERT INTO passages VALUES (?, ?)", rows)

    @override
    async def call(self, arguments: dict[str, Any], session: Any) -> str:
        return await in_thread(self._search, arguments["query"])

    def _search(self, query: str) -> str:
        words = re.findall(r"\w+", query)[:32]
        if not words:
            return "no words to look for"
        wanted = " OR ".join(f'"{word}"' for word in words)
        select = "SELECT path, text FROM passages WHERE passages MATCH ? ORDER BY bm25(passages) LIMIT ?"
        with self._lock:
            found = self._index.execute(select, (wanted, self.count)).fetchall()
        return "\n\n".join(f"[{path}]\n{text}" for path, text in found) or "nothing found"

    @override
    async def close(self) -> None:
        self._index.close()
