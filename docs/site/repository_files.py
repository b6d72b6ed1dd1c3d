"""Links to files of the repository that are no pages, such as `../gt/core/messages.py`: the site has a page with the
text of each such file, and of each such folder one with links to its files."""

from __future__ import annotations

import html
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform
from sphinx.util.osutil import relative_uri

FOLDER = "source"
LEXERS = {"": "text", ".txt": "text", ".py": "python", ".yaml": "yaml", ".toml": "toml", ".json": "json", ".sh": "sh"}


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_transform(LinkToText)
    app.connect("env-purge-doc", _forget)
    app.connect("env-merge-info", _merge)
    app.connect("html-collect-pages", pages_of_files)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def linked_files(env: BuildEnvironment) -> dict[str, set[Path]]:
    """The files and folders that each page links to, by the name of the page."""
    if not hasattr(env, "linked_files"):
        env.linked_files = {}  # type: ignore[attr-defined]
    return env.linked_files  # type: ignore[attr-defined]


class LinkToText(SphinxTransform):
    """Turns links to files, of which MyST makes downloads, and to folders into links to pages with their text."""

    default_priority = 5

    def apply(self, **kwargs: Any) -> None:
        for link in self._links():
            path = self._path_of(link["reftarget"])
            linked_files(self.env).setdefault(self.env.docname, set()).update([path, *_files_in(path)])
            name = path.relative_to(self.env.srcdir)
            uri = relative_uri(self.app.builder.get_target_uri(self.env.docname), f"{FOLDER}/{name}.html")
            link.replace_self(nodes.reference("", "", *link.children, refuri=uri, internal=True))

    def _links(self) -> list[addnodes.download_reference | addnodes.pending_xref]:
        files = self.document.findall(addnodes.download_reference)
        others = [link for link in self.document.findall(addnodes.pending_xref) if link["reftype"] == "myst"]
        return [
            *[link for link in files if is_text(self._path_of(link["reftarget"]))],
            *[link for link in others if self._path_of(link["reftarget"]).is_dir()],
        ]

    def _path_of(self, target: str) -> Path:
        page = Path(self.env.doc2path(self.env.docname))
        return Path(os.path.normpath(page.parent / target.partition("#")[0]))


def is_text(path: Path) -> bool:
    """Whether a file is shown as text; links to others, such as pictures, are downloads."""
    return path.is_file() and path.suffix in LEXERS


def _files_in(path: Path) -> list[Path]:
    return sorted(each for each in path.iterdir() if is_text(each)) if path.is_dir() else []


def pages_of_files(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The pages with the text of linked files; of a folder, links to the files in it."""
    for path in sorted(set().union(*linked_files(app.env).values())):
        name = str(path.relative_to(app.srcdir))
        context = {"title": name, "body": f"<h1>{html.escape(name)}</h1>{_body(app, path)}"}
        yield f"{FOLDER}/{name}", context, "page.html"


def _body(app: Sphinx, path: Path) -> str:
    if path.is_dir():
        files = [html.escape(each.name) for each in _files_in(path)]
        return "".join(
            f'<p><a href="{html.escape(path.name)}/{name}.html"><code>{name}</code></a></p>' for name in files
        )
    highlighter = app.builder.highlighter  # type: ignore[attr-defined]
    return highlighter.highlight_block(path.read_text(), LEXERS[path.suffix], linenos="inline")


def _forget(app: Sphinx, env: BuildEnvironment, docname: str) -> None:
    linked_files(env).pop(docname, None)


def _merge(app: Sphinx, env: BuildEnvironment, docnames: list[str], other: BuildEnvironment) -> None:
    linked_files(env).update(linked_files(other))
