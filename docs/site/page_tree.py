"""The tree of pages. The groups of `docs/index.md` are its headings and their lists of links, which read well in the
repository too; in the site each is a table of contents in the sidebar. Some pages have others below them, those of
the reference in the order of its links. A guide that no list of the index names comes last."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

INDEX = "docs/index"
OTHERS = "More"
BELOW = {"docs/architecture": "../gt/**/README", "examples/README": "README_*"}
REFERENCE = "docs/api"

_GROUP = re.compile(r"^## (?P<title>.+)\n(?P<body>(?:(?!## ).*\n?)*)", re.MULTILINE)
_LINK_TO_REFERENCE = re.compile(r"\]\((api/\w+)\.md\)")
_ENTRY = re.compile(r"^- \[(?P<title>[^\]]+)\]\((?P<page>[^)#]+)\)", re.MULTILINE)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", add_tables_of_contents)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def add_tables_of_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    if docname == INDEX:
        groups = groups_of(source[0])
        rest = _unlisted(app.srcdir / "docs", source[0])
        source[0] += "".join(_table(title, entries) for title, entries in [*groups.items(), (OTHERS, rest)] if entries)
    elif docname == REFERENCE:
        source[0] += _table("", _LINK_TO_REFERENCE.findall(source[0]))
    elif docname in BELOW:
        source[0] += _table("", [BELOW[docname]])


def groups_of(text: str) -> dict[str, list[str]]:
    """The entries of each heading that has a list of links: `title <page>`."""
    found = {group["title"]: _ENTRY.findall(group["body"]) for group in _GROUP.finditer(text)}
    return {
        title: [f"{name} <{page.rpartition('.')[0]}>" for name, page in entries]
        for title, entries in found.items()
        if entries
    }


def _unlisted(folder: Path, index: str) -> list[str]:
    """The guides that the index does not link to."""
    guides = sorted(path.stem for path in folder.glob("*.md"))
    return [guide for guide in guides if f"]({guide}.md)" not in index and f"docs/{guide}" != INDEX]


def _table(caption: str, entries: list[str]) -> str:
    options = [":hidden:", f":caption: {caption}" if caption else ":glob:"]
    return "\n".join(["", "```{toctree}", *options, "", *entries, "```", ""])
