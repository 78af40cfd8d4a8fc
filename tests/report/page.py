"""A report's page taken apart: its text, and its charts as vl-convert draws them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import vl_convert

CELLS = ("td", "th", "dt", "dd")


class Page(HTMLParser):
    """Tags, links, text, and the charts' JSON."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.cells: list[str] = []
        self.text = ""
        self._open, self._in_cell = "", False
        self.scripts: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.data = json.loads(self.scripts[1])
        self.charts = {card["title"]: card for card in self.data["cards"]}

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self._open = tag
        self.links += [value for name, value in attributes if name in ("src", "href", "srcset", "action")]
        if tag == "script":
            self.scripts.append("")
        if tag in CELLS:
            self.cells.append("")
            self._in_cell = True

    def handle_endtag(self, tag):
        self._open = ""
        self._in_cell &= tag not in CELLS

    def handle_data(self, text):
        if self._open == "script":
            self.scripts[-1] += text
        elif self._open != "style":
            self.text += text
            if self._in_cell:
                self.cells[-1] = (self.cells[-1] + text).strip()

    def row(self, first: str, length: int) -> list[str]:
        """The cell of this text and those after it."""
        at = self.cells.index(first)
        return self.cells[at : at + length]

    def series(self, title: str) -> dict[str, list[list[float]]]:
        """{label: [[step, value], ...]} of a chart over steps."""
        card = self.charts[title]
        rows = card["spec"]["data"]["values"]
        return {
            label: [[row["step"], row[f"s{i}"]] for row in rows if f"s{i}" in row]
            for i, (label, _) in enumerate(card["legend"])
        }

    def drawn(self, title: str, width: int = 500) -> list[dict[str, Any]]:
        """All marks of a chart as Vega draws it, each with its group's "role" and "marktype", and x and y of the whole."""
        spec = {"height": 190, **self.charts[title]["spec"], "width": width, "config": self.data["config"]}
        return list(_marks(vl_convert.vegalite_to_scenegraph(spec)["scenegraph"]))

    def ticks(self, title: str) -> tuple[list[tuple[float, str]], list[tuple[float, str]]]:
        """(position, text) of the labels of the horizontal and of the vertical axis."""
        labels = [mark for mark in self.drawn(title) if mark["role"] == "axis-label"]
        down = [(mark["y"], mark["text"]) for mark in labels if mark.get("align") == "right"]
        across = [(mark["x"], mark["text"]) for mark in labels if mark.get("align") != "right"]
        return across, down


def _marks(node: dict[str, Any], x: float = 0.0, y: float = 0.0) -> Iterator[dict[str, Any]]:
    group = {name: node.get(name) for name in ("role", "marktype", "name")}
    for item in node.get("items", []):
        yield {**item, **group, "x": x + item.get("x", 0), "y": y + item.get("y", 0)}
        inner = (x + item.get("x", 0), y + item.get("y", 0)) if node.get("marktype") == "group" else (x, y)
        for child in item.get("items", []):
            yield from _marks(child, *inner)
