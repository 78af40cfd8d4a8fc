"""Hook of mkdocs: pages and sources outside of docs/ become pages of the site, and links to them work there, too."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\((?!https?:|mailto:|#|!)([^)#\s]+)(#[^)\s]*)?\)")
LANGUAGES = {
    ".py": "python",
    ".sh": "bash",
    ".sbatch": "bash",
    ".yaml": "yaml",
    ".toml": "toml",
    ".cpp": "cpp",
    ".h": "cpp",
}


def anchor_of(heading: str, separator: str = "-") -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give headings the anchors that they have on GitHub."""
    config.mdx_configs["toc"]["slugify"] = anchor_of
    return config


@event_priority(100)  # before the plugin that recognizes notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that mkdocs.yml names, the API reference, and a page for each source that a page links to."""
    for path, name in config.extra["pages"].items():
        if name not in files.src_uris:  # the site's first page stands for the README
            files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    modules = "\n\n".join(f"::: {module}" for module in config.extra["api"])
    files.append(File.generated(config, "api.md", content=f"# API\n\n{modules}\n"))
    pages = [file for file in files if file.src_uri.endswith(".md")]
    for source in sorted({target for page in pages for target in _sources_of(page, config)}):
        files.append(File.generated(config, _page_of(source), content=_content(source)))
    return files


@event_priority(100)
def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links out of docs/ into links within the site."""
    return _with_links(markdown, page.file, config)


def _origin(file: File, config: MkDocsConfig) -> str:
    """Path of a page's text below the checkout."""
    if (ROOT / "docs" / file.src_uri).exists():
        return f"docs/{file.src_uri}"
    return next(path for path, name in config.extra["pages"].items() if name == file.src_uri)


def _target(link: str, origin: str) -> str:
    return os.path.normpath(os.path.join(os.path.dirname(origin), link))


def _page_of(path: str) -> str:
    return f"source/{path}.md"


def _name_on_site(path: str, config: MkDocsConfig) -> str:
    if path in config.extra["pages"]:
        return config.extra["pages"][path]
    return path.removeprefix("docs/") if path.startswith("docs/") else _page_of(path)


def _sources_of(file: File, config: MkDocsConfig) -> set[str]:
    if file.src_uri == "api.md" or file.src_uri.startswith("source/"):
        return set()
    origin = _origin(file, config)
    targets = {_target(link, origin) for link, _ in LINK.findall(file.content_string)}
    inside = {path for path in targets if path in config.extra["pages"] or path.startswith("docs/")}
    return {path for path in targets - inside if (ROOT / path).exists()}  # a missing one is found as a broken link


def _content(path: str) -> str:
    source = ROOT / path
    if source.is_dir():
        names = sorted(found.name for found in source.iterdir() if not found.name.startswith(("_", ".")))
        return f"# {path}\n\n" + "".join(f"- `{name}`\n" for name in names)
    text = source.read_text()
    return f"# {path}\n\n````{LANGUAGES.get(source.suffix, 'text')}\n{text}\n````\n"


def _with_links(markdown: str, file: File, config: MkDocsConfig) -> str:
    if file.src_uri == "api.md" or file.src_uri.startswith("source/"):
        return markdown
    origin, folder = _origin(file, config), os.path.dirname(file.src_uri)

    def on_site(link: re.Match) -> str:
        name = _name_on_site(_target(link[1], origin), config)
        return f"]({os.path.relpath(name, folder or '.')}{link[2] or ''})"

    return LINK.sub(on_site, markdown)
